"""What this process shows to others and asks of them: the one place where that is decided, for gRPC and HTTP.

A directory (`--tls-dir`) with the names that Kubernetes and cert-manager use holds one host's part; `baton certs make` makes it:

    ca.crt    the cluster's certificate authority, and nobody else's: whoever it has signed is a member
    tls.crt   this host's certificate, for servers and clients both, with every name and address that it is known by
    tls.key   its key

With it every gRPC channel is TLS at both ends (a server asks for a certificate of this authority, a client checks that and the name
that it has dialled) and HTTP is HTTPS. Without it nothing is encrypted and nobody is asked. KV over zmq takes its keys from
Reserve's reply, which comes over such a channel (connector/zmq_curve.py).

Files that have changed are taken up by the next handshake; what is then wrong with them logs one line and leaves the old ones in
use until the new ones are good, which a certificate that begins in a minute becomes by itself. Only TLS 1.2 and up. What gRPC's
library refuses in a handshake it tells nobody: grpc_server.py finds out. HTTPS counts it here.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

from runtime.logs import log_event

_LOG: Final = logging.getLogger(__name__)
_LOOK_S: Final = 1.0  # between two looks at the files
_MAX_TURNS: Final = 4  # of a handshake's two ends: each speaks twice

# Nobody but members is dialled, wherever this host's variables (http_proxy) send what goes out into the world.
_DIRECT: Final = (("grpc.enable_http_proxy", 0),)

ChannelOptions = Sequence[tuple[str, Any]]
_Mark = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The content of a directory, checked."""

    ca: bytes
    certificate: bytes
    key: bytes
    ends_at: float  # of certificate or authority, in Unix time

    def server_configuration(self) -> grpc.ServerCertificateConfiguration:
        """What gRPC's servers show and ask for."""
        return grpc.ssl_server_certificate_configuration([(self.key, self.certificate)], root_certificates=self.ca)


class CredentialsError(ValueError):
    """The directory cannot be used; the message is one sentence."""


class Credentials:
    """Those of one directory, or none."""

    def __init__(self, directory: Path | None, host: str | None = None) -> None:
        """`host`: the name or address that others dial, if this process knows it. Raises CredentialsError."""
        self._directory = directory
        self._host = host
        self._looked_at = 0.0
        self._mark: _Mark = ()
        self._fault = ""  # of the files with this mark, which are looked at again and again as long as there is one
        self._http: list[ssl.SSLContext] = []
        self._files: TlsFiles | None = None
        if directory is not None:
            self._mark = _mark(directory)
            self._files = _read(directory, host)

    @property
    def is_encrypted(self) -> bool:
        """Whether there are any."""
        return self._files is not None

    @property
    def scheme(self) -> str:
        """Of this process's HTTP."""
        return "https" if self.is_encrypted else "http"

    def ends_at(self) -> float | None:
        """When this host's certificate ends, or its authority's where that is earlier, in Unix time; None: there is none."""
        files = self._current()
        return None if files is None else files.ends_at

    def channel(self, address: str, options: ChannelOptions = ()) -> grpc.aio.Channel:
        """A channel to another process of the cluster."""
        files, options = self._current(), (*_DIRECT, *options)
        if files is None:
            return grpc.aio.insecure_channel(address, options=options)
        shown = grpc.ssl_channel_credentials(files.ca, files.key, files.certificate)
        return grpc.aio.secure_channel(address, shown, options=options)

    def bind(self, server: grpc.aio.Server, address: str, on_handshake: Callable[[], None] = lambda: None) -> int:
        """Have a server listen there; the port. Raises RuntimeError if it cannot.

        `on_handshake` is called for each connection, on a thread of gRPC's, when TLS begins.
        """
        files = self._files
        if files is None:
            return server.add_insecure_port(address)
        asked = grpc.dynamic_ssl_server_credentials(
            files.server_configuration(),
            self._changed_configuration(files, on_handshake),  # type: ignore[arg-type]  # its None says: no change
            require_client_authentication=True,
        )
        return server.add_secure_port(address, asked)

    def http_context(self, on_refused: Callable[[], None]) -> ssl.SSLContext | None:
        """For an HTTPS server, which asks for no certificate: browsers, probes and clients with keys have none.

        `on_refused` is called for each handshake that fails.
        """
        if self._files is None or self._directory is None:
            return None
        # A connection has taken the certificate of its context when it looks whether there is another one: that is the second's.
        context, current = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        for each in (context, current):
            each.minimum_version = ssl.TLSVersion.TLSv1_2
            each.load_cert_chain(self._directory / "tls.crt", self._directory / "tls.key")
        context.sslobject_class = _counting(on_refused)

        def look(connection: ssl.SSLObject, name: object, own: object) -> None:
            self._current()
            connection.context = current

        context.sni_callback = look
        self._http += [context, current]
        return context

    def _changed_configuration(
        self, files: TlsFiles, on_handshake: Callable[[], None]
    ) -> Callable[[], grpc.ServerCertificateConfiguration | None]:
        """For gRPC's servers, which ask at each handshake, on a thread of theirs."""
        shown = files

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal shown
            on_handshake()
            current = self._current()
            if current is None or current == shown:
                return None
            shown = current
            return current.server_configuration()

        return fetch

    def _current(self) -> TlsFiles | None:
        """The files as they are now, or as they were when they were last good. Any thread: at worst two look at once."""
        now = time.monotonic()
        if self._directory is None or now < self._looked_at + _LOOK_S:
            return self._files
        self._looked_at = now
        mark = _mark(self._directory)
        if mark == self._mark and not self._fault:
            return self._files
        try:
            files = _read(self._directory, self._host)
            for context in self._http:
                context.load_cert_chain(self._directory / "tls.crt", self._directory / "tls.key")
        except (CredentialsError, OSError) as error:
            if (mark, str(error)) != (self._mark, self._fault):
                log_event(_LOG, logging.ERROR, "certificates_kept", directory=self._directory, reason=error)
            self._mark, self._fault = mark, str(error)
            return self._files
        self._mark, self._fault = mark, ""
        log_event(_LOG, logging.INFO, "certificates_read", directory=self._directory)
        self._files = files
        return files


NO_CREDENTIALS: Final = Credentials(None)


def _read(directory: Path, host: str | None) -> TlsFiles:
    content = []
    for name in ("ca.crt", "tls.crt", "tls.key"):
        try:
            content.append((directory / name).read_bytes())
        except OSError as error:
            raise CredentialsError(f"--tls-dir {directory}: {name} cannot be read: {error.strerror}") from None
    ca, certificate, key = content
    from runtime.certificates import check_pair, earliest_end  # heavy: only who has certificates pays for it

    try:
        check_pair(ca, certificate, key, host)
        files = TlsFiles(ca, certificate, key, earliest_end(ca, certificate).timestamp())
    except ValueError as error:
        raise CredentialsError(f"--tls-dir {directory}: {error}") from None
    _shake_hands(directory)
    return files


def _shake_hands(directory: Path) -> None:
    """Show the certificate to oneself, in both directions, as members will: chains, bounds of theirs, and what OpenSSL finds weak.

    Raises CredentialsError. Takes a few milliseconds.
    """
    contexts = [ssl.SSLContext(kind) for kind in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER)]
    name = "ca.crt"
    try:
        for context in contexts:
            context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC does: ca.crt need not have the root
            name = "ca.crt"
            context.load_verify_locations(directory / name)
            name = "tls.crt"
            context.load_cert_chain(directory / name, directory / "tls.key")
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = [contexts[0].wrap_bio(back, there), contexts[1].wrap_bio(there, back, server_side=True)]
        for _ in range(_MAX_TURNS):
            for end in ends:
                with suppress(ssl.SSLWantReadError):
                    end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        raise CredentialsError(
            f"--tls-dir {directory}: {name} is refused by its own ca.crt: {error.verify_message}"
        ) from None
    except ssl.SSLError as error:
        told = (error.reason or "it is not understood").replace("_", " ").lower()
        raise CredentialsError(f"--tls-dir {directory}: {name} cannot be used for TLS: {told}") from None
    except OSError as error:
        raise CredentialsError(f"--tls-dir {directory}: {name} cannot be read: {error.strerror}") from None


def _mark(directory: Path) -> _Mark:
    """What changes when one of the files does, or who may read it: a copy of root's may get its owner later."""
    found = []
    for name in ("ca.crt", "tls.crt", "tls.key"):
        try:
            status = (directory / name).stat()
        except OSError:
            found.append((0, 0, 0))
        else:
            found.append((status.st_mtime_ns, status.st_ctime_ns, status.st_ino))
    return tuple(found)


def _counting(on_refused: Callable[[], None]) -> type[ssl.SSLObject]:
    """asyncio and uvloop say nothing of a handshake that fails, but make their TLS objects by the context's class."""

    class Counting(ssl.SSLObject):
        def do_handshake(self) -> None:
            try:
                super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError:
                on_refused()
                raise

    return Counting
