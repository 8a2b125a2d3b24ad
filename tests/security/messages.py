"""Random protobuf messages of any type, with the values that break things: what hypothesis draws and what atheris begins with."""

from __future__ import annotations

import random
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from proto import baton_pb2 as pb

EDGES: Final = (0, 1, 2, 3, 4, 5, 7, 16, 31, 32, 63, 64, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
NAMES: Final = ("", "r", "node", "router", "prefill-0", "a\nb", "x" * 300, "é", "127.0.0.1:1")
BYTES: Final = (b"", b"x", bytes(16), b"0123456789abcdef", b"k" * 32, b"x" * 1000)
FLOATS: Final = (0.0, 0.5, 1.0, -1.0, 1e30, float("inf"), float("nan"))
# By name of the field, what a conversation may well be about: else nothing random would get past the first check.
LIKELY: Final[dict[str, tuple[Any, ...]]] = {
    "request_id": ("r",),
    "choice": (0, 1, 2),
    "more_choices": (1, 2),
    "attempt": (0, 0, 1, 2),
    "next_attempt": (1, 2, 3),
    "num_tokens": (1, 4, 9),
    "max_total_tokens": (9, 20, 64),
    "max_tokens": (2, 4, 8),
    "min_tokens": (0, 1),
    "lease_id": (1, 2, 3),
    "secret": (bytes(16), b"0123456789abcdef"),
    "ms_left": (1, 1000, 100_000),
    "incarnation": (3, 5, 7),
    "name": ("router", "decode-0", "prefill-0"),
    "first_index": (0, 0, 1, 2),
    "token_ids": (0, 1, 31),
    "token_id": (0, 1, 31),
    "prompt_token_ids": (1, 2, 3),
    "generated_token_ids": (1, 2),
    "completion_token_ids": (1, 2),
    "stop_token_ids": (0, 31),
    "block_keys": (b"k" * 32, b"l" * 32),
    "grpc_address": ("127.0.0.1:1",),
    "architecture": ("LlamaForCausalLM",),
    "weights": ("ab",),
    "kernels": ("torch",),
    "dtype": ("fp32",),
    "block_size": (4,),
    "num_layers": (0,),
    "num_kv_heads": (0,),
    "head_dim": (0,),
    "block_index": (0, 1),
    "offset": (0,),
    "length": (64,),
    "source_block": (0, 7),
    "seq": (1, 2, 3),
    "ack": (0, 1),
    "num_logprobs": (0, 2),
    "temperature": (0.0, 1.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0,),
    "repetition_penalty": (0.0, 1.0),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "bias": (1.0,),
    "top_k": (0, 2),
}
_DEPTH: Final = 6
# What each target takes, if it takes messages: one, or a list of records.
KINDS: Final[dict[str, tuple[type[Message], ...]]] = {
    "write": (pb.DataMessage,),
    "described-write": (pb.DataMessage,),
    "link-channel": (pb.LinkHello, pb.DataMessage),
    "frames": (pb.Frame,),
    "nodes-words": (pb.NodeMessage,),
    "peers-words": (pb.RouterMessage, pb.ReserveRequest, pb.RenewRequest, pb.ReleaseRequest, pb.DataMessage),
    "registration": (pb.NodeEntry,),
}


def random_message(kind: type[Message], chance: random.Random, likely: float, depth: int = _DEPTH) -> Message:
    """Any message of a type; most fields set, a share of them (`likely`) to what may fit, the others near some bound."""
    message = kind()
    taken: set[str] = set()
    fields: list[Any] = list(kind.DESCRIPTOR.fields)
    chance.shuffle(fields)
    for field in fields:
        group = field.containing_oneof.name if field.containing_oneof is not None else None
        if group in taken or chance.random() < 0.15 * (1 - likely):
            continue
        if group is not None:
            taken.add(group)
        _set(message, field, chance, likely, depth)
    return message


def _class_of(field: FieldDescriptor) -> type[Message]:
    assert field.message_type is not None
    found: type[Message] = getattr(pb, field.message_type.name)
    return found


def _set(message: Message, field: FieldDescriptor, chance: random.Random, likely: float, depth: int) -> None:
    is_message = field.message_type is not None
    if is_message and depth == 0:
        return
    if not field.is_repeated:
        if is_message:
            getattr(message, field.name).CopyFrom(random_message(_class_of(field), chance, likely, depth - 1))
        else:
            setattr(message, field.name, _value(field, chance, likely))
        return
    for _ in range(chance.choice((0, 1, 1, 2, 3))):
        if is_message:
            getattr(message, field.name).append(random_message(_class_of(field), chance, likely, depth - 1))
        else:
            getattr(message, field.name).append(_value(field, chance, likely))


def _value(field: FieldDescriptor, chance: random.Random, likely: float) -> Any:
    if field.name in LIKELY and chance.random() < likely:
        return chance.choice(LIKELY[field.name])
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            return chance.choice(BYTES if field.type == FieldDescriptor.TYPE_BYTES else NAMES)
        case FieldDescriptor.CPPTYPE_BOOL:
            return chance.random() < 0.5
        case FieldDescriptor.CPPTYPE_ENUM:
            known = () if field.enum_type is None else field.enum_type.values
            return chance.choice([*(value.number for value in known), 99])
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return chance.choice(FLOATS)
        case FieldDescriptor.CPPTYPE_UINT32:
            return chance.choice([edge for edge in EDGES if edge < 2**32])
        case _:
            return chance.choice(EDGES)


def sample(target: str, seed: int) -> bytes:
    """Bytes for a target that it may well understand; a part of them damaged."""
    from tests.security.targets import joined

    chance = random.Random(seed)
    if target not in KINDS:
        return _TEXTS[target][seed % len(_TEXTS[target])]
    pieces = []
    likely = chance.choice((0.0, 0.9, 0.98, 1.0))
    for _ in range(chance.randrange(1, 12)):
        index = chance.randrange(len(KINDS[target]))
        content = bytearray(random_message(KINDS[target][index], chance, likely).SerializeToString())
        if content and chance.random() < 0.2 * (1 - likely):
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        pieces.append(bytes([index]) * (target == "peers-words") + bytes(content))
    if target == "described-write":
        return pieces[0]
    if target == "link-channel":
        return b"".join(bytes([chance.randrange(1, 8)]) + len(each).to_bytes(4, "little") + each for each in pieces)
    return joined(pieces)


_KEY: Final = b"sk-0123456789abcdef name=a requests_per_minute=5\n"
_HEAD: Final = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
_TEXTS: Final[dict[str, tuple[bytes, ...]]] = {
    "kv-record": (b"btkv\x01\x00\x00\x00" + (64).to_bytes(8, "little") + b"k" * 32 + bytes(80), b""),
    "body": (
        b'{"model": "m", "prompt": [1, 2], "n": 2, "stop": ["a"], "logit_bias": {"5": 1}, "stream": true}',
        b'{"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "\\ud800"}]}]}',
        b"[" * 5000,
        b'{"seed": ' + b"9" * 5000 + b"}",
    ),
    "key-file": (_KEY, b"# x\n\n" + _KEY + b"sha256:" + b"0" * 64 + b" name=b", _KEY * 2),
    "http": tuple(
        len(each).to_bytes(3, "little") + each for each in (_HEAD, _HEAD * 40, b"GET / HTTP/1.1\r\n\r\n" * 9)
    ),
}
