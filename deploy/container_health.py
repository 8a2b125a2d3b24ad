"""The image's health check: /health of whatever role runs as process 1, where it listens, by HTTPS where it has certificates.

    python -m deploy.container_health            exit code 0: it answers 200

What process 1 was told by flags counts before the container's variables, these before its file, which is read as it is now, that
before the image's defaults. Nothing but the standard library: this starts every five seconds. Not here: whether requests can be
served (/ready).
"""

from __future__ import annotations

import socket
import sys
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from runtime.authority import believing
from runtime.config import ROOM_TABLES, own_environment, values_in
from runtime.knobs import ConfigError

TIMEOUT_S: Final = 2.0
EVERYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, slots=True)
class Page:
    """Where to ask, and by whose word the answer is the process's own."""

    url: str
    authority: Path | None  # None: by HTTP


def own_address() -> str:
    """The container's, as `container_entry` finds it: the first of `hostname -i`, IPv6 where there is such. Raises OSError."""
    return str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])


def health_page(words: Sequence[str], variables: Mapping[str, str], find_own: Callable[[], str] = own_address) -> Page:
    """Of the process with this command line in a container with these variables. `find_own` is asked where no host was told.

    Raises ConfigError if its file cannot be read.
    """
    room = next((word for word in words[:5] if word in ROOM_TABLES), "")  # python [-P] -m deploy.node_process decode
    path = _said("config", words, variables)
    in_file = values_in(Path(path), room) if path else {}

    def told(knob: str, default: str) -> str:
        said = _said(knob, words, variables) or str(in_file.get(knob, ""))
        return said or variables.get(f"BATON_DEFAULT_{knob.upper()}") or default

    is_router = room == "router"
    host = told("host", "") or find_own()
    host = EVERYWHERE.get(host, host)
    host = f"[{host}]" if ":" in host else host
    port = told("port" if is_router else "http_port", "8000" if is_router else "8002")
    tls_dir = told("tls_dir", "none")
    if tls_dir == "none":
        return Page(f"http://{host}:{port}/health", None)
    return Page(f"https://{host}:{port}/health", Path(tls_dir) / "ca.crt")


def _said(knob: str, words: Sequence[str], variables: Mapping[str, str]) -> str:
    """By flag, or else by variable; empty: by neither."""
    flag = "--" + knob.replace("_", "-")
    for index, word in enumerate(words):
        if word == flag and index + 1 < len(words):
            return words[index + 1]
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return variables.get(f"BATON_{knob.upper()}", "")


def answers(page: Page) -> bool:
    """Whether it does, with 200."""
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if page.authority is not None:
        trusted = believing(page.authority)
        trusted.check_hostname = (
            False  # certificates name hosts as others dial them; this is the container's own address
        )
        handlers.append(urllib.request.HTTPSHandler(context=trusted))
    with urllib.request.build_opener(*handlers).open(page.url, timeout=TIMEOUT_S) as answer:
        return bool(answer.status == 200)


def main() -> int:
    """Ask; 0, or 1 and one line of why not, which `docker inspect` shows."""
    words = Path("/proc/1/cmdline").read_bytes().decode(errors="replace").split("\0")
    try:
        page = health_page(words, own_environment())
        return 0 if answers(page) else 1
    except (OSError, ConfigError) as error:
        sys.stdout.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
