"""A router's pages, for commands that look at a cluster: where it is, what it wants to be shown, and one way to ask.

Not here: what the pages say (router/sight.py), what is made of it (status.py, doctor.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import httpx

from runtime.authority import believing
from runtime.command_words import as_flags
from runtime.server_url import read_url
from runtime.unanswered import check_key, why_no_authority, why_no_entry, why_no_http

ASK_TIMEOUT_S: Final = 10.0
NODE_TIMEOUT_S: Final = 3.0
_AUTHORITY: Final = "--tls-dir DIR"  # names who has signed the router's certificate
_NO_HEADERS: Final[Mapping[str, str]] = {}
_ROUTERS_OWN: Final = frozenset(("missing", "degraded", "nodes"))  # keys of its /state
_NODES_OWN: Final = frozenset(("node_id", "bit_exact", "transport", "versions"))
BARE_FLAGS: Final = ("--once", "--json")  # as people write them: without `on`


class NoAnswer(Exception):
    """A page cannot be had; the message is one sentence."""


def with_url(words: Sequence[str]) -> list[str]:
    """A command's words as flags: one of them may be the URL, and what is on or off may stand alone."""
    return as_flags(words, ("--url",), BARE_FLAGS)


def check_asked(url: str, api_key: str | None, tls_dir: Path | None) -> None:
    """Raises ValueError, one sentence, where no router can be asked with these."""
    try:
        read_url(url)
    except ValueError as error:
        raise ValueError(f"--url {error}") from None
    check_key(api_key)
    if tls_dir is not None and not (tls_dir / "ca.crt").is_file():
        raise ValueError(f"--tls-dir {tls_dir}: there is no ca.crt in it")


class Pages:
    """One router's, and its nodes', over connections that are kept."""

    def __init__(self, url: str, api_key: str | None, tls_dir: Path | None) -> None:
        """Raises NoAnswer if the directory has no certificate authority."""
        self.url = str(read_url(url))
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}  # for the router alone
        try:
            verify = believing(None if tls_dir is None else tls_dir / "ca.crt")
        except OSError as error:
            raise NoAnswer(f"--tls-dir {tls_dir}: ca.crt {why_no_authority(error)}") from None
        self._scheme = "http" if tls_dir is None else "https"
        self._client = httpx.Client(timeout=ASK_TIMEOUT_S, trust_env=False, verify=verify)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    @contextmanager
    def as_we_know_them(self) -> Iterator[None]:
        """Of what a page says otherwise than routers of this release do comes NoAnswer."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            told = f"{type(error).__name__}: {error}"
            raise NoAnswer(f"{self.url}: its pages are no router's, or another release's ({told})") from error

    def get(self, path: str, timeout_s: float = ASK_TIMEOUT_S) -> httpx.Response:
        """A page of the router, whatever its status. Raises NoAnswer."""
        return self._get(self.url + path, timeout_s, self._headers, "; `make up` starts a cluster")

    def json(self, path: str) -> Any:
        """A page that must be there. Raises NoAnswer."""
        return _content(self.get(path), self.url + path)

    def state(self) -> dict[str, Any]:
        """The router's /state. Raises NoAnswer, also where it is somebody else's: a node has one, too."""
        state = self.json("/state")
        if not isinstance(state, dict) or not state.keys() >= _ROUTERS_OWN:
            is_node = isinstance(state, dict) and state.keys() >= _NODES_OWN
            whose = f"that of node {state['node_id']}; a router's URL is wanted" if is_node else "somebody else's"
            raise NoAnswer(f"{self.url}/state: is no router's, but {whose}")
        return state

    def node_state(self, address: str) -> tuple[dict[str, Any], httpx.Response]:
        """A node's /state, by its HTTP address, and the answer that it came in. Raises NoAnswer."""
        url = f"{address if '://' in address else f'{self._scheme}://{address}'}/state"
        answer = self._get(url, NODE_TIMEOUT_S)
        state = _content(answer, url)
        if not isinstance(state, dict) or not state.keys() >= _NODES_OWN:
            raise NoAnswer(f"{url}: is no node's")
        return state, answer

    def _get(
        self, url: str, timeout_s: float, headers: Mapping[str, str] = _NO_HEADERS, hint: str = ""
    ) -> httpx.Response:
        try:
            return self._client.get(url, timeout=timeout_s, headers=headers)
        except httpx.TimeoutException:
            raise NoAnswer(f"{url}: no answer within {timeout_s:g} s") from None
        except httpx.ConnectError as error:
            nobody = f"nobody answers there ({without_number(error)}){hint}"
            raise NoAnswer(f"{url}: {why_no_http(str(error), url, _AUTHORITY) or nobody}") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            told = str(error) or type(error).__name__
            raise NoAnswer(f"{url}: {why_no_http(told, url, _AUTHORITY) or told}") from None


def without_number(error: httpx.ConnectError) -> str:
    """Why nobody could be called, in words."""
    return re.sub(r"^\[Errno -?[0-9]+\] ", "", str(error)) or type(error).__name__


def _content(answer: httpx.Response, url: str) -> Any:
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        raise NoAnswer(f"{url}: {why_no_entry('Authorization' in answer.request.headers)}")
    if answer.status_code != httpx.codes.OK:
        raise NoAnswer(f"{url}: is answered {answer.status_code}")
    try:
        return answer.json()
    except (ValueError, RecursionError):  # nested more deeply than Python reads
        raise NoAnswer(f"{url}: is no JSON, so nothing of ours listens there") from None
