"""The server that a chat talks to: any with OpenAI's API over HTTP. Asks, and hands on the events of the answer as they come."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import httpx

from deploy.chat_talk import Message
from deploy.router_pages import without_number
from runtime.authority import believing
from runtime.server_url import read_url
from runtime.unanswered import why_no_authority, why_no_entry, why_no_http

_CONNECT_S: Final = 10.0
_PATH: Final = "/v1/chat/completions"


class ChatProblem(Exception):
    """It cannot be had; the message is one sentence for the user."""


class Refused(ChatProblem):
    """The server answered with an error."""

    def __init__(self, message: str, status: int, retry_after: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class ChatServer:
    """One server, over a new connection for each question: people think for longer than servers keep idle ones."""

    def __init__(self, url: str, api_key: str | None, ca: Path | None, timeout_s: float) -> None:
        """`timeout_s`: of silence. Raises ChatProblem if `ca` is no certificate authority."""
        self.url = str(read_url(url))
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        try:
            verify = believing(ca)
        except OSError as error:
            raise ChatProblem(f"--ca {ca}: {why_no_authority(error)}") from None
        timeout = httpx.Timeout(timeout_s, connect=_CONNECT_S)
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(headers=headers, timeout=timeout, verify=verify, limits=limits, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def first_model(self) -> str:
        """The name of a model that is served. Raises ChatProblem."""
        with self._problems():
            answer = self._client.get(f"{self.url}/v1/models")
            self._check(answer)
            try:
                return str(answer.json()["data"][0]["id"])
            except (ValueError, LookupError, TypeError, RecursionError):
                raise ChatProblem(f"{self.url}/v1/models: names no model; give --model") from None

    def events(
        self, model: str, messages: Sequence[Message], fields: dict[str, Any]
    ) -> Generator[dict[str, Any], None, None]:
        """The answer's events. Closing the iterator hangs up, which aborts the request. Raises ChatProblem."""
        asked = {"model": model, "messages": list(messages), "stream": True, "stream_options": {"include_usage": True}}
        with self._problems(), self._client.stream("POST", self.url + _PATH, json=asked | fields) as answer:
            if answer.status_code != httpx.codes.OK:
                answer.read()
                self._check(answer)
            is_done = False
            for line in _lines(answer.iter_bytes()):
                if line.startswith("data:"):
                    data = line[5:].strip()
                    is_done = data == "[DONE]"
                    if not is_done:
                        yield self._event(data)
            if not is_done:
                raise ChatProblem(f"{self.url}: the answer broke off; what came of it is above")

    def _event(self, data: str) -> dict[str, Any]:
        try:
            event: dict[str, Any] = json.loads(data)
            if event.get("error"):
                raise ChatProblem(f"{self.url}: {_sentence(data)}")
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise ChatProblem(f"{self.url}: sends what is no event of a chat: {data[:80]}") from None
        return event

    def _check(self, answer: httpx.Response) -> None:
        if answer.status_code == httpx.codes.OK:
            return
        told = _sentence(answer.text)
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            told = f"{why_no_entry('Authorization' in answer.request.headers)} ({told})"
        elif answer.status_code == httpx.codes.NOT_FOUND and "error" not in answer.text:
            told = "has no such page, so it does not speak OpenAI's API there"
        problem = f"{self.url}: {answer.status_code}: {told}"
        raise Refused(problem, answer.status_code, answer.headers.get("Retry-After"))

    @contextmanager
    def _problems(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            nobody = f"nobody answers there ({without_number(error)}); `make up` starts a cluster, --url names another server"
            raise ChatProblem(f"{self.url}: {why_no_http(str(error), self.url, '--ca FILE') or nobody}") from None
        except httpx.TimeoutException:
            raise ChatProblem(f"{self.url}: is silent") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            told = str(error) or type(error).__name__
            raise ChatProblem(f"{self.url}: {why_no_http(told, self.url, '--ca FILE') or told}") from None


def _lines(parts: Iterable[bytes]) -> Iterator[str]:
    """Of a stream of events. httpx ends lines at U+2028 and the like, too, which JSON may have in a text."""
    rest = b""
    for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
    yield rest.decode(errors="replace")


def _sentence(body: str) -> str:
    """Of an error in OpenAI's shape, or the first words of another one."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:300]
    except (ValueError, LookupError, TypeError, RecursionError):
        return " ".join(body.split())[:120] or "without a word"
