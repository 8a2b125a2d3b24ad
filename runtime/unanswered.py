"""Why somebody who was called did not answer, in words that say what to do: told from what the libraries say of it. Pure.

Not here: calling.
"""

from __future__ import annotations

import re
import ssl
from typing import Final

_REFUSED_CERTIFICATE: Final = re.compile(r"certificate verify failed: (.*?)(?: \(_ssl\.c:\d+\))?\)*$")
_NO_TLS: Final = ("WRONG_VERSION_NUMBER", "record layer failure")  # OpenSSL before 3.2, and since
_NOBODY: Final = "nobody answers there"
_OF_GRPC: Final = (  # what its words have in them, and what that comes of
    ("http1.x server", "speaks HTTP there, not gRPC; a router's registry has a port of its own, --registry-port"),
    ("WRONG_VERSION_NUMBER", "speaks no TLS there; of processes without certificates ask without --tls-dir"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not signed by the ca.crt of --tls-dir, or not for this address"),
    ("Socket closed", "who listens there hangs up; where processes have certificates --tls-dir DIR is needed"),
    ("Connection reset", "who listens there hangs up; where processes have certificates --tls-dir DIR is needed"),
    ("lookup failed", "no such host"),
)
_OF_TLS: Final = {
    "WRONG_VERSION_NUMBER": "speaks no TLS there; is it redis://?",
    "RECORD_LAYER_FAILURE": "speaks no TLS there; is it redis://?",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is refused here; the option ssl_ca_certs names the authority that signed it",
    "NO_CERTIFICATE_OR_CRL_FOUND": "the file of its option ssl_ca_certs holds no certificate, as PEM",
}
_OF_REDIS: Final = {
    "ConnectionError": _NOBODY,
    "ConnectionError:CLOSED": "who listens there hangs up; is it rediss://?",
    "TimeoutError": "who listens there says nothing; a Redis without TLS does so where it is asked by rediss://",
}


def why_no_http(told: str, url: str, authority: str) -> str | None:
    """Of a page at `url`, where somebody listens and the two do not agree on what is spoken; `told` is httpx's, `authority` the
    flag that names a certificate authority. None: it is something else."""
    if url.startswith("https://"):
        if any(each in told for each in _NO_TLS):
            return "speaks no TLS there; is it http://?"
        if (refused := _REFUSED_CERTIFICATE.search(told)) is not None:
            is_unknown = "issuer" in refused[1] or "self" in refused[1]
            hint = f"; {authority} names the authority that signed it" if is_unknown else ""
            return f"its certificate is refused here: {refused[1]}{hint}"
    elif "disconnected without sending" in told:
        return "hangs up without an answer; is it https://?"
    elif told.startswith("illegal "):  # h11's, of a line that begins no answer
        return "speaks no HTTP there; a router's --port does, its --registry-port and a node's --grpc-port do not"
    return None


def why_no_grpc(details: str) -> str:
    """Of a call that ended as unavailable; `details` are gRPC's."""
    return next((sentence for words, sentence in _OF_GRPC if words in details), _NOBODY)


def why_no_redis(word: str) -> str:
    """Of a registry in Redis; `word` is the kind of error that its store names."""
    if (of_tls := word.removeprefix("SSLError:")) != word:
        return _OF_TLS.get(of_tls, f"no TLS comes about with who listens there: {of_tls}")
    return _OF_REDIS.get(word, f"cannot be read: {word}")


def why_no_entry(has_key: bool) -> str:
    """Of a server that answers 401; `has_key`: to who has shown one."""
    flag = "--api-key, or better the variable BATON_API_KEY"
    return f"does not know the key that it was shown: {flag}" if has_key else f"wants a key: {flag}"


def check_key(key: str | None) -> None:
    """Raises ValueError, one sentence without the key, for one that cannot be shown: no HTTP header holds it."""
    if key is not None and not re.fullmatch(r"[ -~]*", key):
        raise ValueError("--api-key: keys are printable ASCII; it has another character, a line's end perhaps")


def why_no_authority(error: OSError) -> str:
    """Of a file that was to hold a certificate authority."""
    return "holds no certificate, as PEM" if isinstance(error, ssl.SSLError) else f"cannot be read: {error.strerror}"
