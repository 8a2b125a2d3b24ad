"""Who may open a link to this node: the ZAP handler behind the receiver's socket.

libzmq asks it about each handshake (RFC 27/ZAP) and lets no frame pass before the answer: PLAIN, the sender's name and the link
secret. Without a gate, a stranger's endless multipart message would cost the receiver gigabytes, whatever the high-water mark.
Only nodes that were told the secret, in the answer to a Reserve, get in; which blocks they may write is for the lease's own secret.

PLAIN does not hide the secret from someone who reads the wire; on networks where that matters CURVE does (a later issue).
Source: https://rfc.zeromq.org/spec/27/
"""

from __future__ import annotations

import hmac
import logging
import secrets
from collections.abc import Sequence
from typing import Final

import zmq

from connector.link_names import is_name
from connector.zmq_options import Context, Socket

_LOG = logging.getLogger(__name__)

_VERSION: Final = b"1.0"
_DOMAIN: Final = "baton"
_NUM_FRAMES: Final = 8  # version, request id, domain, address, routing id, mechanism, name, password


class ZmqGate:
    """Draws the link secret and answers handshakes; made by one thread, then served by the receiver's."""

    def __init__(self, context: Context) -> None:
        self.link_secret = secrets.token_bytes(16)
        self.num_refused = 0
        self._password = self.link_secret.hex().encode()
        self.socket: Socket = context.socket(zmq.REP)  # to be polled
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")

    def guard(self, socket: Socket) -> None:
        """Make a socket of the same context ask here; before it binds."""
        socket.setsockopt(zmq.PLAIN_SERVER, 1)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)

    def serve(self) -> None:
        """Answer the handshake that waits; the socket is ready to be read."""
        request = self.socket.recv_multipart(zmq.NOBLOCK)
        name = self._find_name(request)
        address = request[3].decode(errors="replace") if len(request) > 3 else ""
        if name is None:
            self.num_refused += 1
            _LOG.warning("event=link_refused address=%s", address)
            verdict = [b"400", b"wrong link secret", b"", b""]
        else:
            _LOG.info("event=link_accepted sender=%s address=%s", name, address)
            verdict = [b"200", b"", name.encode(), b""]
        self.socket.send_multipart([_VERSION, request[1] if len(request) > 1 else b"", *verdict])

    def _find_name(self, request: Sequence[bytes]) -> str | None:
        """The name of a sender that knows the secret."""
        if len(request) != _NUM_FRAMES or request[0] != _VERSION or request[5] != b"PLAIN":
            return None
        name, password = request[6:]
        if not hmac.compare_digest(password, self._password):
            return None
        try:
            text = name.decode()
        except UnicodeDecodeError:
            return None
        return text if is_name(text) else None
