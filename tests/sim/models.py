"""The models that nodes serve: one, and in a part of the seeds on some hosts another one, as while nodes get a new one.

They differ in what they say: the other one knows fewer tokens (engine/fake_runner.py). Which of them a node serves is settled when
its process starts, and may be another one than its predecessor's; another role changes nothing about it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from proto import baton_pb2 as pb
from proto.block_key import fingerprint_bytes, seed_key
from tests.sim.scenario import BLOCK_SIZE, VOCAB_SIZE, Scenario

_P_OTHER_AGAIN: Final = 0.5  # that a process which follows another on one of those hosts serves the other model, too


@dataclass(frozen=True, slots=True)
class Model:
    """What a node serves."""

    weights: str
    vocab_size: int

    @property
    def fingerprint(self) -> pb.Fingerprint:
        """As the node's entry and Reserve have it."""
        return pb.Fingerprint(
            architecture="fake",
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            dtype="i4",
            block_size=BLOCK_SIZE,
            weights=self.weights,
            kernels="f",
        )

    @property
    def key_seed(self) -> bytes:
        """Of its blocks' keys."""
        told = self.fingerprint
        return seed_key(fingerprint_bytes({each.name: getattr(told, each.name) for each in told.DESCRIPTOR.fields}))


OURS: Final = Model("w", VOCAB_SIZE)
OTHER: Final = Model("v", 7)


def models_of(scenario: Scenario) -> tuple[Model, ...]:
    """Those that some node may serve."""
    return (OURS, OTHER) if scenario.knobs.num_other else (OURS,)


def model_on(scenario: Scenario, host: str, generation: int) -> Model:
    """What the process that is the host's `generation`-th serves."""
    first_other = scenario.knobs.num_mixed - scenario.knobs.num_other
    role, _, number = host.rpartition("-")
    if role != "mixed" or int(number) < first_other:
        return OURS
    is_other = random.Random(f"model {scenario.seed} {host} {generation}").random() < _P_OTHER_AGAIN
    return OTHER if generation == 1 or is_other else OURS
