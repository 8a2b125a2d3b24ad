"""What lies in a shared registry comes back as it was written, and anything else not at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.listing import MAX_TEXT_CHARS, entry_problem
from runtime.registry_record import MAX_RECORD_BYTES, decode_gone, decode_record, encode_record, gone_text
from runtime.session import Peer
from tests.registry.test_listing import entry


@pytest.mark.covers("R13")
def test_the_largest_entry_without_a_problem_fits_and_comes_back() -> None:
    largest = entry(name="\U0001f9ea" * MAX_TEXT_CHARS, incarnation=2**64 - 1)
    largest.started_ms = 2**64 - 1
    for address in ("grpc_address", "http_address"):
        setattr(largest, address, ".".join(["a" * 60] * 4) + ":65535")
    for text in ("architecture", "dtype", "weights", "kernels"):
        setattr(largest.fingerprint, text, "\U0001f9ea" * MAX_TEXT_CHARS)
    largest.tokenizer = "\U0001f9ea" * MAX_TEXT_CHARS
    for size in ("num_blocks", "max_num_seqs", "max_model_len"):
        setattr(largest, size, 2**32 - 1)
    assert entry_problem(largest) is None
    record = encode_record(largest)
    assert len(record) <= MAX_RECORD_BYTES
    assert decode_record(largest.node.name.encode(), record) == largest


@pytest.mark.covers("X05")
@given(st.binary(max_size=200))
def test_bytes_that_no_node_wrote_are_no_entry(garbage: bytes) -> None:
    record = encode_record(entry())
    assert decode_record(b"decode-0", garbage) is None
    assert decode_record(b"decode-1", record) is None
    for cut in range(len(record)):
        read = decode_record(b"decode-0", record[:cut] + garbage)
        assert read is None or (read.node, read.grpc_address) == (entry().node, entry().grpc_address)
    assert decode_record(b"decode-0", record + bytes(MAX_RECORD_BYTES)) is None


@pytest.mark.covers("X05")
def test_a_header_that_says_something_else_than_the_entry_is_no_record() -> None:
    """Scripts decide by the header, routers by the entry."""
    record = encode_record(entry())
    assert record.startswith(b"0000000000000001 0 127.0.0.1:5001\n")
    for header in (b"0000000000000002 0 127.0.0.1:5001", b"0000000000000001 9 127.0.0.1:5001", b"1 0 127.0.0.1:5001"):
        assert decode_record(b"decode-0", header + b"\n" + record.partition(b"\n")[2]) is None


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), st.integers(0, 2**64 - 1))
def test_who_has_gone_is_read_as_written(name: str, incarnation: int) -> None:
    peer = Peer(name, incarnation)
    assert decode_gone(gone_text(peer).encode()) == peer


@pytest.mark.covers("X05")
@given(st.binary(max_size=60))
def test_bytes_that_no_script_wrote_say_of_nobody_that_they_have_gone(garbage: bytes) -> None:
    peer = decode_gone(garbage)
    assert peer is None or gone_text(peer).encode() == garbage
    assert decode_gone(b"1 decode-0") is None
