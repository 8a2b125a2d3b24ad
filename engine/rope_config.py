"""Which rotary frequencies a model was trained with, as its config.json says. Imports no torch.

Keys as transformers 4 wrote them (`rope_theta` beside `rope_scaling`, whose kind may be `type`) and as transformers 5 does (all
in `rope_parameters`). Not here: the frequencies themselves (engine/rope.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from engine.config_values import ModelError, Settings

# Not `dynamic` and `longrope`: they change the frequencies as a sequence grows, and with them what its cached keys ought to be.
KINDS: Final = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Base and scaling of the rotary frequencies; a field that the kind does not use has its default."""

    kind: str = "default"  # of KINDS
    theta: float = 10_000.0
    factor: float = 1.0  # how many times longer than trained
    original_positions: int = 0  # that the model was first trained on: llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncates: bool = True  # yarn: its bounds are rounded to whole dimensions
    attention_factor: float | None = None  # yarn: of cos and sin; None: follows from the factor
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn


def read_rope(source: Settings, max_positions: int) -> RopeConfig:
    """Take the rotary settings of config.json. Raises ModelError, naming key and value."""
    rope = _rope_settings(source)
    values = rope.values
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in KINDS:
        raise ModelError(f"{rope.where} of type {kind!r} is not supported, only {', '.join(KINDS)}")
    for settings in (source, rope):
        if settings.number("partial_rotary_factor", 1.0) != 1.0:
            share = settings.values["partial_rotary_factor"]
            raise ModelError(f"{settings.where}: partial_rotary_factor {share!r} is not supported, only 1.0")
    config = RopeConfig(kind=kind, theta=rope.number("rope_theta", source.number("rope_theta", 10_000.0)))
    if kind == "default":
        return config
    if kind == "linear":
        return RopeConfig(kind=kind, theta=config.theta, factor=rope.number("factor"))
    where = source if source.values.get("original_max_position_embeddings") is not None else rope
    original_positions = where.count("original_max_position_embeddings", max_positions)
    if kind == "llama3":
        return _llama3(rope, config.theta, original_positions)
    if config.theta <= 1:
        raise ModelError(f"{rope.where}: rope_theta {config.theta:g} is not above 1, whose logarithm yarn divides by")
    return RopeConfig(
        kind=kind,
        theta=config.theta,
        factor=rope.number("factor", max_positions / original_positions),
        original_positions=original_positions,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncates=rope.flag("truncate", True),
        attention_factor=_number_or_none(rope, "attention_factor"),
        mscale=_number_or_none(rope, "mscale"),
        mscale_all_dim=_number_or_none(rope, "mscale_all_dim"),
    )


def _rope_settings(source: Settings) -> Settings:
    """The object that says it; where both generations' keys are there, transformers reads the older one."""
    for key in ("rope_scaling", "rope_parameters"):
        values = source.values.get(key)
        if not values:
            continue
        if not isinstance(values, dict):
            raise ModelError(f"{source.where}: {key} is {values!r}, not an object")
        nested = [name for name, value in values.items() if isinstance(value, dict)]
        if nested:
            raise ModelError(f"{source.where}: {key} per layer ({nested[0]}) is not supported, only one for all")
        return Settings(f"{source.where}: {key}", values)
    return Settings(source.where, {})


def _llama3(rope: Settings, theta: float, original_positions: int) -> RopeConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise ModelError(f"{rope.where}: high_freq_factor {high:g} is not above low_freq_factor {low:g}")
    return RopeConfig(
        kind="llama3",
        theta=theta,
        factor=rope.number("factor"),
        original_positions=original_positions,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _number_or_none(rope: Settings, key: str) -> float | None:
    return None if rope.values.get(key) is None else rope.number(key)
