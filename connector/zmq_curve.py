"""Keys of encrypted zmq links: none lies on a disk, and none outlives its process.

    receiver                                    sender
    draws its own key pair and the link secret
    Reserve's reply, over mTLS ──────────────►  learns the receiver's public key, and the link secret
    lets in whoever shows the public key of  ◄─ CURVE handshake with the key pair that the link secret stands for
    the link secret, and nobody else

So whoever has shown a certificate of the cluster where it reserved may open a link, both ends know that they talk to the right
one, and there are no lists of keys to hand round. Who records the wire learns nothing of it by taking a certificate's key later:
CURVE draws keys for each connection.
Source: https://rfc.zeromq.org/spec/25/ (ZMTP-CURVE), https://rfc.zeromq.org/spec/26/ (CurveZMQ)
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

import zmq
from zmq.utils import z85

KEY_BYTES: Final = 32
_PURPOSE: Final = b"baton zmq sender"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Both in Z85, as libzmq takes them."""

    public: bytes
    secret: bytes


def draw_receiver_keys() -> KeyPair:
    """Those of one process, from libzmq's own source of randomness."""
    return KeyPair(*zmq.curve_keypair())


def sender_keys(link_secret: bytes) -> KeyPair:
    """Those of whoever was told this link secret."""
    secret = z85.encode(hashlib.blake2b(link_secret, digest_size=KEY_BYTES, person=_PURPOSE).digest())
    return KeyPair(zmq.curve_public(secret), secret)
