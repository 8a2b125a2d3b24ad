"""Everything that reads what others have written, against bytes that nobody should write: refused or understood, no exception.

`FUZZ_EXAMPLES` says how many to try; `make fuzz` goes on with atheris, by coverage.
"""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.security.messages import sample
from tests.security.targets import TARGETS, joined

ROOT: Final = Path(__file__).parents[2]
EXAMPLES: Final = int(os.environ.get("FUZZ_EXAMPLES", "60"))
MIB: Final = 1 << 20
SIZE: Final = MIB  # of a huge input
NOTHING_ELSE: Final = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)


@pytest.mark.covers("X05", "H13")
@pytest.mark.parametrize("name", TARGETS)
@NOTHING_ELSE
@given(data=st.binary(max_size=2000) | st.lists(st.binary(max_size=300), max_size=8).map(joined))
def test_any_bytes_are_refused_or_understood(name: str, data: bytes) -> None:
    TARGETS[name](data)


@pytest.mark.covers("X05", "H13")
@pytest.mark.parametrize("name", TARGETS)
@NOTHING_ELSE
@given(seed=st.integers(0, 2**32))
def test_what_is_nearly_right_is_refused_or_understood(name: str, seed: int) -> None:
    TARGETS[name](sample(name, seed))


@pytest.mark.covers("X05", "H13")
@pytest.mark.parametrize("name", TARGETS)
@NOTHING_ELSE
@given(seed=st.integers(0, 2**32), cuts=st.lists(st.tuples(st.floats(0, 1), st.binary(max_size=6)), max_size=4))
def test_what_was_right_and_is_damaged_is_refused_or_understood(
    name: str, seed: int, cuts: list[tuple[float, bytes]]
) -> None:
    data = sample(name, seed)
    for share, replacement in cuts:
        at = int(share * len(data))
        data = data[:at] + replacement + data[at + len(replacement) // 2 :]
    TARGETS[name](data)


@pytest.mark.covers("X05", "H13")
def test_what_is_huge_costs_no_more_than_a_bounded_multiple_of_itself() -> None:
    """Each target in a process of its own, with inputs of 1 MiB that are shaped to be blown up by who reads them."""
    command = [sys.executable, "-m", "tests.security.test_fuzz_decoders"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    grown = {name: int(number) for name, number in (line.split() for line in done.stdout.splitlines())}
    assert grown.keys() == {*TARGETS}
    assert {name: number for name, number in grown.items() if number > SIZE * TIMES.get(name, 2) + 8 * MIB} == {}
    assert grown["body"] > SIZE, "nothing is measured"


# How many times its input a reader may take: an empty message, an empty list are objects all the same.
TIMES: Final = {"frames": 64, "nodes-words": 64, "peers-words": 64, "body": 48, "key-file": 12, "write": 4}


def _huge(name: str) -> list[bytes]:
    size = SIZE
    empty = b"\x0a\x00" * (size // 2)
    content = [
        random.Random(0).randbytes(size),
        empty,
        _field(3, b"\x01" * size),
        b"\x0a\x80\x80\x80\x01" * (size // 5),
    ]
    match name:
        case "write":
            shaped = [joined([_field(1, b"\x1a\x00" * (size // 2)), b"x"]), joined([b"x"] * (size // 4))]
        case "frames":
            shaped = [joined([_field(5, _field(1, empty))]), joined([_field(4, _field(1, b"\x1a\x00" * (size // 2)))])]
        case "nodes-words":
            shaped = [joined([_field(1, empty)]), joined([_field(1, _field(1, b"\x2a\x00" * (size // 2)))])]
        case "peers-words":
            shaped = [
                joined([b"\x00" + _field(1, b"\x1a\x00" * (size // 2))]),
                joined([b"\x01" + b"\x3a\x00" * (size // 2)]),
            ]
        case "body":
            shaped = [
                b'{"model":"m","prompt":[' + piece * (size // len(piece)) + b"0]}" for piece in (b"[],", b"1,", b'"",')
            ]
            numbered = b",".join(b'"%d":""' % number for number in range(size // 10))
            shaped += [
                b'{"model":"m","prompt":"x","generated_token_ids":[' + b'"",' * (size // 3) + b"0]}",
                b'{"model":"m","prompt":"x","logit_bias":{' + numbered + b"}}",
                b'{"model":"m","prompt":"x","stream_options":{' + numbered + b"}}",
                b'{"model":"m","messages":[{"role":"user","content":[' + b"{}," * (size // 3) + b"{}]}]}",
            ]
        case _:
            shaped = [joined([piece]) for piece in content]
    return content + shaped


def _field(number: int, content: bytes) -> bytes:
    """A field of bytes, text or message, as protobuf writes it."""
    length, left = [], len(content)
    while left > 127:
        length.append(left & 127 | 128)
        left >>= 7
    return bytes([number << 3 | 2, *length, left]) + content


def main() -> int:
    """Print how far the memory of a process of its own grows with each target."""
    for name, target in TARGETS.items():
        target(sample(name, 0))
        inputs = _huge(name)
        child = os.fork()
        if child == 0:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for data in inputs:
                target(data)
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            os.write(1, f"{name} {grown << 10}\n".encode())
            os._exit(0)
        if os.waitpid(child, 0)[1] != 0:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
