"""docs/flags.md lists every flag of every command as it is, and no two commands read a variable differently."""

from __future__ import annotations

from bench.planner import PlanConfig
from bench.serve_config import BenchConfig
from deploy import cli
from deploy.chat import ChatConfig
from runtime.config import parse
from runtime.knobs import knobs_of
from runtime.known_variables import KNOWN_VARIABLES
from tests.architecture.flags_page import COMMANDS, PAGE, VARIABLES, page, variables_module

LOAD = "--trace t --rates r --slo-ttft-ms 1 --slo-tpot-ms 1".split()


def test_the_page_of_flags_is_what_the_commands_take() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "stale: make docs"
    assert "| `--block-size` |" in page()


def test_a_process_knows_the_variables_of_all_commands_without_importing_them() -> None:
    assert VARIABLES.read_text(encoding="utf-8") == variables_module(), "stale: make docs"
    assert {"BATON_CONFIG", "BATON_NUM_BLOCKS", "BATON_CHAT_MODEL", "BATON_API_KEY"} < KNOWN_VARIABLES


def test_help_says_of_which_commands_the_flags_are_no_variables() -> None:
    with_variables = {name for commands, _ in COMMANDS for name in commands.replace("baton ", "").split(", ")}
    others = {" ".join(name) for name in cli.COMMANDS} - with_variables
    assert f"Every flag but those of {', '.join(others)} is also a variable" in cli.HELP


def test_a_variable_that_several_commands_read_is_of_one_kind_to_all_of_them() -> None:
    kinds: dict[str, dict[str, object]] = {}
    for command, config in COMMANDS:
        for knob in knobs_of(config):
            kinds.setdefault(knob.variable, {})[command] = knob.kind
    assert {name: by_command for name, by_command in kinds.items() if len({*by_command.values()}) > 1} == {}


def test_variables_that_are_meant_for_processes_say_nothing_to_who_chats_puts_load_or_plans() -> None:
    """An image has BATON_MODEL, a directory; `baton chat` in its container asked for a model of that name."""
    for_processes = {
        "MODEL": "/model", "PREFILL": "2", "DECODE": "2", "MIXED": "1", "MAX_PROMPT_TOKENS": "9", "DTYPE": "bf16", "REQUESTS": "5",
    }  # fmt: skip
    environment = {f"BATON_{name}": value for name, value in for_processes.items()}
    assert parse(ChatConfig, "baton chat", "", [], environment) == ChatConfig()
    assert parse(BenchConfig, "baton bench", "", [], environment) == BenchConfig()
    assert parse(PlanConfig, "baton plan", "", LOAD, environment) == parse(PlanConfig, "baton plan", "", LOAD, {})
    own = {"BATON_CHAT_MODEL": "a", "BATON_BENCH_MODEL": "b", "BATON_PLAN_MIXED": "3"}
    assert parse(ChatConfig, "baton chat", "", [], own).model == "a"
    assert parse(BenchConfig, "baton bench", "", [], own).model == "b"
    assert parse(PlanConfig, "baton plan", "", LOAD, own).mixed == 3
