"""The last bits of a rotation's angles are torch's on this CPU: nodes that have other ones have another fingerprint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.model import load_model
from engine.rope import Angles, inverse_frequencies
from engine.rope_config import RopeConfig
from node.assembly import build_engine
from node.config import NodeConfig
from node.identity import NodeIdentity


@pytest.mark.covers("H02")
def test_one_last_bit_of_one_angle_is_another_name_and_how_many_there_are_by_now_is_not() -> None:
    frequencies = inverse_frequencies(RopeConfig(theta=1e6), 128)
    angles = Angles(frequencies, 1.0)
    digest = angles.digest
    angles.up_to(5000)
    assert angles.digest == digest == Angles(frequencies.clone(), 1.0).digest
    other = frequencies.clone()
    other[40] = torch.nextafter(other[40], torch.tensor(1.0))
    assert len({digest, Angles(other, 1.0).digest, Angles(frequencies, 1.1).digest}) == 3


@pytest.mark.covers("H02")
def test_a_nodes_fingerprint_has_what_its_model_computes_with_and_rotates_by(own_model_dir: Path) -> None:
    model = load_model(own_model_dir, "fp32")
    config = NodeConfig(model=own_model_dir, router=("127.0.0.1:1",), num_blocks=64, dtype="fp32")
    engine = build_engine(config, NodeIdentity("decode-0", 1))
    try:
        assert engine.parts.fingerprint.kernels == f"{model.kernels.name}-{model.angles.digest}"
    finally:
        engine.close()
