"""What the router is told reaches what goes by it: each knob, by its flag, with a value that is not the default."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from router.api import ApiSettings
from router.config import RouterConfig
from router.entrance import RouterCoreConfig
from router.placement import Imbalance
from router.process import api_settings, core_config, http_bounds, imbalance, make_shell
from router.streaming import LAST_WRITE_S
from router.text import ModelText
from router.timeline import Record
from runtime.config import parse
from runtime.credentials import NO_CREDENTIALS
from runtime.http_protocol import HttpBounds
from runtime.knobs import knobs_of
from tests.router.tiny_model import write_model_text

ROOT: Final = Path(__file__).parents[2]


@dataclass(frozen=True)
class Made:
    """Of one config."""

    core: RouterCoreConfig
    imbalance: Imbalance
    api: ApiSettings
    http: HttpBounds


# knob -> what is given, where it arrives, what arrives there
ARRIVES: Final[Mapping[str, tuple[str, Callable[[Made], object], object]]] = {
    "max_queue": ("7", lambda made: made.core.max_queue, 7),
    "refuse_late": ("off", lambda made: made.core.refuses_late, False),
    "max_inflight_prefills": ("8", lambda made: made.core.max_inflight_prefills, 8),
    "preempt_retry_count": ("9", lambda made: made.core.preempt_retry_count, 9),
    "preempt_retry_exclude_decode": ("off", lambda made: made.core.preempt_retry_exclude_decode, False),
    "max_nodes_lost": ("10", lambda made: made.core.max_nodes_lost, 10),
    "max_moves": ("11", lambda made: made.core.max_moves, 11),
    "no_nodes_grace_s": ("1.5", lambda made: made.core.no_nodes_grace_s, 1.5),
    "breaker_failures": ("12", lambda made: made.core.breaker_failures, 12),
    "local_prefill_max_tokens": ("13", lambda made: made.core.local_prefill_max_tokens, 13),
    "placement_seed": ("14", lambda made: made.core.seed, 14),
    "cache_imbalance_tokens": ("15", lambda made: made.imbalance.num_tokens, 15),
    "cache_imbalance_ratio": ("1.25", lambda made: made.imbalance.ratio, 1.25),
    "request_timeout_s": (
        "16",
        lambda made: (made.api.request_timeout_s, made.http.stuck_timeout_s - LAST_WRITE_S),
        (16, 16),
    ),
    "max_body_mib": ("17", lambda made: made.api.max_body_bytes, 17 << 20),
    "max_prompt_tokens": ("18", lambda made: made.api.max_prompt_tokens, 18),
    "max_n": ("19", lambda made: made.api.max_n, 19),
    "tool_parser": ("hermes", lambda made: made.api.tool_parser, "hermes"),
    "reasoning_parser": ("none", lambda made: made.api.reasoning_parser, "none"),
    "launcher": ("localhost:1/abc", lambda made: made.api.launcher is not None, True),
    "max_header_kib": ("20", lambda made: made.http.max_head_bytes, 20 << 10),
    "header_timeout_s": ("2.5", lambda made: made.http.head_timeout_s, 2.5),
}
# What arrives where only a process, or another test, can see it; the file reads it.
ELSEWHERE: Final[Mapping[str, str]] = {
    "model": "router/process.py",
    "served_model_name": "router/process.py",
    "host": "router/process.py",
    "port": "router/process.py",
    "registry": "router/process.py",
    "registry_host": "router/process.py",
    "registry_port": "router/process.py",
    "registry_namespace": "router/process.py",
    "workers": "router/__main__.py",
    "tls_dir": "router/process.py",
    "api_keys": "router/process.py",
    "metrics_need_key": "router/process.py",
    "ready_file": "router/process.py",
    "parent_pid": "router/process.py",
    "placement_prefill": "router/process.py",
    "placement_decode": "router/process.py",
    "cache_index_max_mib": "router/process.py",
    "timelines": "router/process.py",
    "max_connections": "router/process.py",
    "session_grace_s": "router/process.py",
    "drain_timeout_s": "router/process.py",
    "log_level": "router/process.py",
    "log_format": "router/process.py",
    "otlp_endpoint": "router/process.py",
}


def given(**values: str) -> RouterConfig:
    """A config of these flags."""
    flags = [part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", value)]
    return parse(RouterConfig, "baton router", "", ["--model", "m", *flags], {})


@pytest.mark.parametrize("name", [each.name for each in knobs_of(RouterConfig)])
def test_every_knob_of_the_router_arrives_or_is_named_as_read_elsewhere(name: str) -> None:
    assert (name in ARRIVES) != (name in ELSEWHERE)
    if name in ELSEWHERE:
        assert re.search(rf"\bconfig\.{name}\b", (ROOT / ELSEWHERE[name]).read_text())
        return
    flag, arrived, expected = ARRIVES[name]

    def made(config: RouterConfig) -> Made:
        core, api = core_config(config, "", config.placement_seed or 0), api_settings(config, "m", None)
        return Made(core, imbalance(config), api, http_bounds(config, 1))

    assert arrived(made(given(**{name: flag}))) == expected
    assert arrived(made(given())) != expected, "it is the default"


def test_the_shell_keeps_as_many_timelines_as_it_is_told(tmp_path: Path) -> None:
    text = ModelText(write_model_text(tmp_path / "m"))

    async def kept() -> int:
        shell = make_shell(given(timelines="2"), text, NO_CREDENTIALS, None)
        for number in range(3):
            shell.timelines.begin(Record(str(number), None, 8, 1, 0.0, 0.0))
            shell.timelines.ended(str(number), "stop", 0, 0.0)
        await shell.close()
        return len(shell.timelines)

    assert asyncio.run(kept()) == 2
