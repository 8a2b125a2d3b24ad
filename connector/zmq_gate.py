"""Who may open a link to this node: the ZAP handler behind the receiver's socket.

libzmq asks it about each handshake (RFC 27/ZAP) and lets no frame pass before the answer. Without a gate, a stranger's endless
multipart message would cost the receiver gigabytes, whatever the high-water mark. Only nodes that were told the link secret, in the
answer to a Reserve, get in; which blocks they may write is for the lease's own secret.

    PLAIN   the sender's name and the link secret, for all on the wire to read: a network that one trusts
    CURVE   encrypted; the sender shows the one public key that the link secret stands for (zmq_curve.py)

CURVE carries no name: the sender says it by its routing id. It is as true as PLAIN's: any sender that was told the secret could say
another's. Handshakes that fail before anybody is asked (another mechanism, no ZMTP, a peer that hangs up) are told by the socket's
monitor, and counted like those that the gate refuses.
Source: https://rfc.zeromq.org/spec/27/
"""

from __future__ import annotations

import hmac
import logging
import secrets
from collections.abc import Sequence
from typing import Final

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from connector.link_names import is_name, node_name
from connector.zmq_curve import draw_receiver_keys, sender_keys
from connector.zmq_options import Context, Socket

_LOG = logging.getLogger(__name__)

_VERSION: Final = b"1.0"
_DOMAIN: Final = "baton"
_NUM_FRAMES: Final = {
    b"PLAIN": 8,
    b"CURVE": 7,
}  # version, request id, domain, address, routing id, mechanism, credentials
_ANONYMOUS: Final = "curve"  # the user name of all that CURVE let in


class ZmqGate:
    """Draws the link secret and answers handshakes; made by one thread, then served by the receiver's."""

    def __init__(self, context: Context, *, is_encrypted: bool = False) -> None:
        self.link_secret = secrets.token_bytes(16)
        self.num_refused = 0
        self._password = self.link_secret.hex().encode()
        self._keys = draw_receiver_keys() if is_encrypted else None
        self._sender_key = z85.decode(sender_keys(self.link_secret).public) if is_encrypted else b""
        self.socket: Socket = context.socket(zmq.REP)  # to be polled
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")
        self.monitor: Socket | None = None  # to be polled, once a socket is guarded

    @property
    def curve_key(self) -> bytes:
        """The receiver's public key; empty where links are not encrypted."""
        return b"" if self._keys is None else z85.decode(self._keys.public)

    def guard(self, socket: Socket) -> None:
        """Make a socket of the same context ask here; before it binds."""
        if self._keys is None:
            socket.setsockopt(zmq.PLAIN_SERVER, 1)
        else:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
        failed = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        self.monitor = socket.get_monitor_socket(failed)

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

    def note_failures(self) -> None:
        """Count the handshakes that failed before the gate was asked; the monitor is ready to be read."""
        assert self.monitor is not None
        while self.monitor.poll(0):
            recv_monitor_message(self.monitor, zmq.NOBLOCK)
            self.num_refused += 1

    def peer(self, sender: zmq.Frame) -> str:
        """The name of the node that a message's first frame stands for."""
        name = str(sender.get("User-Id"))
        if name == _ANONYMOUS:
            said = sender.bytes.partition(b"/")[0].decode(errors="replace")
            name = said if is_name(said) else _ANONYMOUS
        return node_name(name)

    def close(self, guarded: Socket) -> None:
        """Behind the last handshake; the guarded socket, too, is at its end."""
        guarded.disable_monitor()
        if self.monitor is not None:
            self.monitor.close(linger=0)
        self.socket.close()

    def _find_name(self, request: Sequence[bytes]) -> str | None:
        """The name of a sender that knows the secret."""
        if len(request) < 6 or request[0] != _VERSION or len(request) != _NUM_FRAMES.get(request[5]):
            return None
        mechanism, shown = request[5], request[6:]
        if self._keys is not None:
            is_known = mechanism == b"CURVE" and hmac.compare_digest(shown[0], self._sender_key)
            return _ANONYMOUS if is_known else None
        name, password = shown if mechanism == b"PLAIN" else (b"", b"")
        if not hmac.compare_digest(password, self._password):
            return None
        try:
            text = name.decode()
        except UnicodeDecodeError:
            return None
        return text if is_name(text) else None
