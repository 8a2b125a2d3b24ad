"""Fingerprints differ exactly where KV may not be mixed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config_values import ModelError
from engine.fingerprint import Fingerprint, fingerprint_fields
from engine.model import Model, load_model
from node.assembly import build_engine
from node.config import NodeConfig
from node.identity import NodeIdentity
from proto import baton_pb2 as pb
from runtime.process import NotNow
from runtime.tokenizer_digest import tokenizer_digest


def flip_byte(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def header_end(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_the_same_model_has_the_same_fingerprint_in_another_place(own_model_dir: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(own_model_dir, tmp_path / "copy")
    one, other = (fingerprint_fields(path, "fp32", 16, "torch") for path in (own_model_dir, copy))
    assert one == other
    assert one.to_bytes() == other.to_bytes()


@pytest.mark.covers("H02")
def test_fields_are_those_of_the_message() -> None:
    assert [field.name for field in fields(Fingerprint)] == [field.name for field in pb.Fingerprint.DESCRIPTOR.fields]


@pytest.mark.covers("H02")
@pytest.mark.parametrize(
    "change",
    [
        lambda weights: flip_byte(weights, header_end(weights)),
        lambda weights: flip_byte(weights, -1),
        lambda weights: flip_byte(weights, header_end(weights) // 2),
        lambda weights: weights.write_bytes(weights.read_bytes() + b"\0"),
        lambda weights: (weights.parent / "config.json").write_text((weights.parent / "config.json").read_text() + " "),
    ],
    ids=["first weight", "last weight", "header", "size", "config"],
)
def test_a_changed_byte_changes_the_fingerprint(own_model_dir: Path, change: Callable[[Path], object]) -> None:
    before = fingerprint_fields(own_model_dir, "fp32", 16, "torch")
    change(own_model_dir / "model.safetensors")
    after = fingerprint_fields(own_model_dir, "fp32", 16, "torch")
    assert after.weights != before.weights
    assert after.to_bytes() != before.to_bytes()


@pytest.mark.covers("H02")
def test_a_changed_byte_inside_a_sample_of_a_large_file_changes_the_fingerprint(own_model_dir: Path) -> None:
    """16 samples of 64 KiB, evenly spaced: the middle of 8 MiB falls into the eighth."""
    weights = own_model_dir / "model.safetensors"
    begin = header_end(weights)
    size = 8 << 20
    weights.write_bytes(weights.read_bytes().ljust(begin + size, b"\0"))
    before = fingerprint_fields(own_model_dir, "fp32", 16, "torch")
    sampled = begin + (size - (64 << 10)) * 7 // 15
    flip_byte(weights, sampled - 1)
    assert (
        fingerprint_fields(own_model_dir, "fp32", 16, "torch") == before
    )  # between samples: the price of not reading it all
    flip_byte(weights, sampled)
    assert fingerprint_fields(own_model_dir, "fp32", 16, "torch") != before


@pytest.mark.covers("H02")
def test_a_changed_tensor_changes_the_fingerprint_wherever_it_lies(own_model_dir: Path) -> None:
    """A merged adapter changes a few matrices, and each of them may lie between two samples of the file."""
    tensors = {f"layers.{index}.weight": torch.zeros(256, 64, dtype=torch.bfloat16) for index in range(300)}
    weights = own_model_dir / "model.safetensors"
    save_file(tensors, weights)
    found = {fingerprint_fields(own_model_dir, "fp32", 16, "torch").weights}
    for index in range(0, 300, 30):
        name = f"layers.{index}.weight"
        save_file({**tensors, name: torch.ones_like(tensors[name])}, weights)
        found.add(fingerprint_fields(own_model_dir, "fp32", 16, "torch").weights)
    assert len(found) == 11


@pytest.mark.parametrize("header", [b"{", b"[]", b'{"x": 1}', b'{"x": {"data_offsets": [-5, 99]}}', b"[" * 100_000])
def test_a_header_that_is_none_has_a_fingerprint_and_whoever_loads_it_refuses_it(
    own_model_dir: Path, header: bytes
) -> None:
    weights = own_model_dir / "model.safetensors"
    weights.write_bytes(len(header).to_bytes(8, "little") + header + bytes(1000))
    assert fingerprint_fields(own_model_dir, "fp32", 16, "torch").weights
    with pytest.raises(ModelError):
        load_model(own_model_dir, "fp32")


@pytest.mark.covers("H02")
def test_dtype_and_block_size_are_part_of_it(own_model_dir: Path) -> None:
    one = fingerprint_fields(own_model_dir, "auto", 16, "torch")
    assert one == fingerprint_fields(own_model_dir, "fp32", 16, "torch")
    others = [
        fingerprint_fields(own_model_dir, "bf16", 16, "torch"),
        fingerprint_fields(own_model_dir, "fp32", 32, "torch"),
    ]
    assert len({one.to_bytes(), *(other.to_bytes() for other in others)}) == 3


@pytest.mark.covers("H02")
@pytest.mark.parametrize("change", ["replaced", "written to", "configured"])
def test_a_model_that_is_changed_while_it_is_read_is_refused(
    own_model_dir: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Else a node that computes with the old one would be taken for one that has the new."""
    weights = own_model_dir / "model.safetensors"

    def load_and_change(*args: Any) -> Model:
        model = load_model(*args)
        tensors = {name: 2 * tensor for name, tensor in load_file(weights).items()}
        if change == "replaced":
            save_file(tensors, own_model_dir / "new")
            (own_model_dir / "new").replace(weights)
        elif change == "written to":
            flip_byte(weights, -1)
        else:
            (own_model_dir / "config.json").write_text((own_model_dir / "config.json").read_text() + " ")
        return model

    config = NodeConfig(model=own_model_dir, router=("127.0.0.1:1",), num_blocks=16)
    build_engine(config, NodeIdentity("n", 1)).close()
    monkeypatch.setattr("node.assembly.load_model", load_and_change)
    with pytest.raises(NotNow, match=r"model was changed while it was read: start again"):
        build_engine(config, NodeIdentity("n", 1))


@pytest.mark.covers("R24")
def test_a_node_tells_which_tokenizer_it_has(own_model_dir: Path) -> None:
    config = NodeConfig(model=own_model_dir, router=("127.0.0.1:1",), num_blocks=16)
    told = []
    for text in (None, '{"model": {"vocab": {"a": 0}}}', '{"model": {"vocab": {"b": 0}}}'):
        if text is not None:
            (own_model_dir / "tokenizer.json").write_text(text)
        else:
            (own_model_dir / "tokenizer.json").unlink(missing_ok=True)
        engine = build_engine(config, NodeIdentity("n", 1))
        engine.close()
        told.append(engine.entry().tokenizer)
        assert told[-1] == tokenizer_digest(own_model_dir)
    assert told[0] == "" and len(set(told)) == 3
