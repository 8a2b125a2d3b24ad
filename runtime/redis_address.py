"""Where a shared registry is: a Redis URL, checked before anything is started, and shown without its secrets.

`redis://[[USER]:PASSWORD@]HOST[:PORT][/DB]`, `rediss://…` the same over TLS, `unix://[[USER]:PASSWORD@]/PATH[?db=DB]`; what has a
meaning in a URL is percent-encoded. Loads no Redis client: flags are checked before anything heavy is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, urlsplit

EMBEDDED: Final = "embedded"
DEFAULT_NAMESPACE: Final = "baton"
DEFAULT_PORT: Final = 6379

_SCHEMES: Final = ("redis", "rediss", "unix")
_NAMESPACE: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_FILES: Final[tuple[str, ...]] = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_CHOICES: Final = {"ssl_cert_reqs": ("none", "optional", "required"), "ssl_check_hostname": ("true", "false")}
_TLS_OPTIONS: Final = frozenset({*_FILES, *_CHOICES})
_FORMS: Final = "redis://HOST:PORT/DB, rediss://HOST:PORT/DB or unix:///PATH"


def registry_problem(registry: str, namespace: str | None) -> str | None:
    """What is wrong with `--registry` and `--registry-namespace`, in one sentence without secrets; None if nothing is."""
    if registry == EMBEDDED:
        if namespace is not None:
            return f"--registry-namespace {namespace}: means something in Redis only, and --registry is embedded"
        return None
    if namespace is not None and not _NAMESPACE.fullmatch(namespace):
        return f"--registry-namespace {namespace}: must be 1 to 64 letters, digits, '.', '_' or '-'"
    problem = url_problem(registry, "embedded, ") or file_problem(registry)
    return problem and f"--registry {shown(registry)}: {problem}"


def shown(registry: str) -> str:
    """The same for a log or an error: without user, password and options. Of what is no URL of ours hardly anything: a password
    that was not encoded may stand where the host should be."""
    if registry == EMBEDDED:
        return registry
    if url_problem(registry) is not None:
        scheme = registry.partition("://")[0]
        return f"{scheme}://…" if scheme in _SCHEMES else "…"
    url = urlsplit(registry)
    return f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"


def server_of(registry: str) -> tuple[str, int] | None:
    """Host and port of the Redis; None: a socket of this machine. For a URL that has no registry_problem."""
    url = urlsplit(registry)
    return None if url.scheme == "unix" else (url.hostname or "", url.port or DEFAULT_PORT)


def url_problem(registry: str, others: str = "") -> str | None:
    """What is wrong with it as the URL of a Redis, in a phrase without secrets; `others`: what else it might have been."""
    must = f"must be {others}{_FORMS}"
    try:
        url = urlsplit(registry)
        host, port = url.hostname, url.port
    except ValueError:  # a port that is no number, a bracket that is not closed
        return must
    if url.scheme not in _SCHEMES or not registry.startswith(f"{url.scheme}://"):
        return must
    if url.fragment or not registry.isprintable():
        return "must not have a '#', nor a character that cannot be printed: write %23 for it"
    if url.scheme == "unix":
        if not url.path.strip("/") or host is not None:
            return "must name a socket: unix:///PATH"
        allowed = frozenset({"db"})
    else:
        if not host or port == 0:
            return must
        if not re.fullmatch(r"/?\d{0,5}", url.path, re.ASCII):
            return "what follows the port must be the number of a database, such as /0"
        allowed = _TLS_OPTIONS if url.scheme == "rediss" else frozenset()
    options = parse_qs(url.query, keep_blank_values=True)
    if options.keys() - allowed:
        return f"its options must be of {', '.join(sorted(allowed))}" if allowed else "it takes no options"
    if twice := next((name for name, values in options.items() if len(values) > 1), None):
        return f"the option {twice} must be given once"
    if not re.fullmatch(r"\d{1,5}", options.get("db", ["0"])[0], re.ASCII):
        return "the option db must be a number"
    for name, choices in _CHOICES.items():
        if options.get(name, choices)[0] not in choices:
            return f"the option {name} must be {', '.join(choices[:-1])} or {choices[-1]}"
    if "ssl_keyfile" in options and "ssl_certfile" not in options:
        return "the option ssl_keyfile must come with ssl_certfile"
    return None


def file_problem(url: str) -> str | None:
    """Which file that its options name cannot be used, in a phrase; for a URL that has no url_problem."""
    options = parse_qs(urlsplit(url).query, keep_blank_values=True)
    files = {name: options[name][0] for name in _FILES if name in options}
    for name, path in files.items():
        if not Path(path).is_file():
            return f"the option {name} must name a file, and {path!r} is none"
    return _tls_problem(files) if files else None


def _tls_problem(files: Mapping[str, str]) -> str | None:
    import ssl  # 15 ms, for those who ask for it

    from runtime.unanswered import why_no_authority

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if (path := files.get("ssl_ca_certs")) is not None:
        try:
            context.load_verify_locations(path)
        except OSError as error:  # an SSLError is one
            return f"the file of its option ssl_ca_certs {why_no_authority(error)}"
    if (path := files.get("ssl_certfile")) is not None:
        try:
            # Without a password OpenSSL would ask who is at the terminal.
            context.load_cert_chain(path, files.get("ssl_keyfile"), password="")
        except ssl.SSLError:
            named = "ssl_certfile and ssl_keyfile" if "ssl_keyfile" in files else "ssl_certfile"
            return f"its option {named} must name a certificate and its key, as PEM that is not encrypted"
        except OSError as error:
            return f"the file of its option ssl_certfile or ssl_keyfile cannot be read: {error.strerror}"
    return None
