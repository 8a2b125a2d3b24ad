"""The config loader: four sources, one line for every wrong value."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import pytest

from deploy.certs import CertsConfig
from deploy.chat import ChatConfig
from deploy.doctor import DoctorConfig
from deploy.drain import DrainConfig
from deploy.role import RoleConfig
from deploy.status import StatusConfig
from deploy.up_config import UpConfig
from router.config import RouterConfig
from runtime.config import ConfigError, child_environment, knob, load, parse, tables_in, thread_environment

HUGE = "9" * 400  # more than a float holds


@dataclass(frozen=True, slots=True)
class SampleConfig:
    """Every kind of knob."""

    model: Path = knob(help="model directory", metavar="DIR")
    block_size: int = knob(16, "tokens per block", low=1, high=1024)
    lease_s: float = knob(10.0, "life of a lease, 100 % of it", low=0.1)
    dtype: Literal["fp32", "bf16"] = knob("bf16", "computes in")
    checksum: bool = knob(True, "check what arrives")
    threads: int | None = knob(None, "threads; none: all cores", low=1)
    routers: tuple[str, ...] = knob((), "registries")
    name: str = knob("a", "a text")
    config: Path | None = None

    def __post_init__(self) -> None:
        """A check of two values together."""
        if self.block_size == 13 and self.dtype == "fp32":
            raise ValueError("--block-size 13 goes with bf16 only")


def read(argv: Sequence[str], environment: Mapping[str, str] | None = None, toml: Path | None = None) -> SampleConfig:
    """Parse for the room `prefill`."""
    file_flag = ["--config", str(toml)] if toml else []
    return parse(SampleConfig, "baton prefill", "Test.", [*file_flag, *argv], environment or {})


def write(tmp_path: Path, text: str) -> Path:
    """A TOML file."""
    path = tmp_path / "baton.toml"
    path.write_text(text)
    return path


def test_a_flag_wins_over_the_environment_that_over_the_file_that_over_the_default(tmp_path: Path) -> None:
    """One source is taken away after the other."""
    toml = write(tmp_path, 'model = "m"\nblock_size = 3\n')
    environment = {"BATON_BLOCK_SIZE": "2"}
    assert read(["--block-size", "1"], environment, toml).block_size == 1
    assert read([], environment, toml).block_size == 2
    assert read([], {}, toml).block_size == 3
    assert read([], {"BATON_CONFIG": str(toml)}).block_size == 3
    assert read(["--model", "m"]).block_size == 16


def test_an_images_default_loses_to_everything_that_a_user_says_and_counts_as_unsaid(tmp_path: Path) -> None:
    toml = write(tmp_path, "block_size = 3\n")
    image = {"BATON_DEFAULT_BLOCK_SIZE": "9", "BATON_DEFAULT_MODEL": "/model"}
    assert read([], image) == SampleConfig(model=Path("/model"), block_size=9)
    assert read([], image, toml).block_size == 3
    assert read([], image | {"BATON_BLOCK_SIZE": "2"}, toml).block_size == 2
    assert read(["--block-size", "1"], image, toml).block_size == 1
    with pytest.raises(ConfigError, match=r"^BATON_DEFAULT_BLOCK_SIZE=x: must be a whole number between 1 and 1024$"):
        read([], image | {"BATON_DEFAULT_BLOCK_SIZE": "x"})
    up = parse(UpConfig, "baton up", "", [], {"BATON_DEFAULT_NUM_BLOCKS": "7"})
    assert up.num_blocks == 7 and "num_blocks" not in up.given, "it is said to the children in the same way"
    assert parse(ChatConfig, "baton chat", "", [], image).model is None, "a directory is no name to ask for"


SERVERS: Final = """
model = "/model"
num_blocks = 700
registry = "redis://redis:6379/0"
[router]
max_queue = 9
"""


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (StatusConfig, ["status"]),
        (DoctorConfig, ["doctor"]),
        (DrainConfig, ["drain", "--node", "decode-0"]),
        (RoleConfig, ["role", "--node", "decode-0", "--role", "prefill"]),
        (CertsConfig, ["certs make", "--out", "certs"]),
        (ChatConfig, ["chat"]),
    ],
)
def test_an_operators_command_in_a_servers_container_takes_what_is_its_own_out_of_the_servers_file(
    tmp_path: Path, config: Any, words: list[str]
) -> None:
    """BATON_CONFIG is there for the process; a file that the command itself is given has to be for it."""
    toml = write(tmp_path, SERVERS)
    command, *flags = words
    own = {"BATON_REGISTRY": "redis://redis:6379/0"}
    found = parse(config, f"baton {command}", "", flags, {"BATON_CONFIG": str(toml)})
    assert found == parse(config, f"baton {command}", "", flags, own)
    with pytest.raises(ConfigError, match=": unknown key of "):
        parse(config, f"baton {command}", "", ["--config", str(toml), *flags], {})
    with pytest.raises(ConfigError, match="max_qeue: unknown key of router; did you mean max_queue"):
        write(tmp_path, "[router]\nmax_qeue = 9")
        parse(RouterConfig, "baton router", "", ["--model", "m"], {"BATON_CONFIG": str(toml)})


def test_every_type_is_read_from_flags_and_from_toml_alike(tmp_path: Path) -> None:
    """And the file's path reaches a config that has a field for it."""
    toml = write(
        tmp_path,
        'model = "m"\nlease_s = 3\ndtype = "fp32"\nchecksum = false\nthreads = 2\nrouters = ["a:1", "b:2"]\nname = "b"\n',
    )
    flags = "--model m --lease-s 3 --dtype fp32 --checksum off --threads 2 --routers a:1,b:2 --name b".split()
    from_file = read([], {}, toml)
    assert from_file == SampleConfig(
        model=Path("m"),
        lease_s=3.0,
        dtype="fp32",
        checksum=False,
        threads=2,
        routers=("a:1", "b:2"),
        name="b",
        config=toml,
    )
    assert read(flags, {}, toml) == from_file
    assert read(["--threads", "none"], {}, toml).threads is None


def test_a_rooms_table_wins_over_the_top_level_and_other_rooms_tables_are_not_read(tmp_path: Path) -> None:
    """One file can serve a whole cluster."""
    toml = write(tmp_path, 'model = "m"\n[prefill]\nblock_size = 8\n[decode]\nblock_size = 9\nonly_of_decode = 1\n')
    assert read([], {}, toml).block_size == 8
    assert tables_in(toml).keys() == {"prefill", "decode"}


@pytest.mark.parametrize(
    ("argv", "environment", "toml", "sentence"),
    [
        ([], {}, "", "--model is missing (or BATON_MODEL, or model in a --config file)"),
        (["--block-size", "0"], {}, "", "--block-size 0: must be a whole number between 1 and 1024"),
        (["--block-size", "-1"], {}, "", "--block-size -1: must be a whole number between 1 and 1024"),
        (["--block-size", "x"], {}, "", "--block-size x: must be a whole number between 1 and 1024"),
        (["--lease-s", "nan"], {}, "", "--lease-s nan: must be a number, at least 0.1"),
        (["--dtype", "fp8"], {}, "", "--dtype fp8: must be one of fp32, bf16"),
        (["--checksum", "yes"], {}, "", "--checksum yes: must be on or off"),
        (["--threads", "0"], {}, "", "--threads 0: must be a whole number, at least 1, or none"),
        (["--blok-size", "1"], {}, "", "--blok-size: unknown flag; did you mean --block-size?"),
        (["--block", "1"], {}, "", "--block: unknown flag; did you mean --block-size?"),
        (["extra"], {}, "", "extra: unexpected argument; every setting is a flag, see baton prefill --help"),
        (["--model"], {}, "", "--model: its value is missing"),
        (["--model", ""], {}, "", "--model: must be a path"),
        ([], {}, 'model = ""', "{toml}: model = '': must be a path"),
        (["--model", "m", "--block-size", "13", "--dtype", "fp32"], {}, "", "--block-size 13 goes with bf16 only"),
        (["--name", "caf\udce9"], {}, "", "--name: must be text in UTF-8"),
        ([], {"BATON_ROUTERS": "a,\udce9"}, "", "BATON_ROUTERS=a,\udce9: must be text in UTF-8"),
        (["--threads", HUGE], {}, "", f"--threads {HUGE}: is too large a number"),
        (["--block-size", HUGE], {}, "", f"--block-size {HUGE}: must be a whole number between 1 and 1024"),
        ([], {}, f"threads = {HUGE}", f"{{toml}}: threads = {HUGE}: is too large a number"),
        ([], {}, f"lease_s = {HUGE}", f"{{toml}}: lease_s = {HUGE}: is too large a number"),
        ([], {}, f"threads = 0x{'f' * 5000}", "{toml}: threads = …: is too large a number"),
        ([], {}, f"threads = {'9' * 5000}", "--config {toml}: cannot be read: a number in it has too many digits"),
        ([], {}, f"routers = {'[' * 2000}", "--config {toml}: cannot be read: it is nested too deeply"),
        ([], {}, f"[prefill]\nrouters{'.a' * 5000} = 1", "{toml}: routers = …: must be a list of texts"),
        ([], {}, 'name = "a\\u0000b"', "{toml}: name: must be without NUL"),
        ([], {}, 'model = "a\\u0000b"', "{toml}: model = 'a\\x00b': must be without NUL"),
        ([], {}, 'routers = ["a:1", "\\u0000"]', "{toml}: routers = ['a:1', '\\x00']: must be without NUL"),
        ([], {"BATON_BLOCK_SIZE": "big"}, "", "BATON_BLOCK_SIZE=big: must be a whole number between 1 and 1024"),
        ([], {}, "block_size = true", "{toml}: block_size = True: must be a whole number between 1 and 1024"),
        ([], {}, 'block_size = "8"', "{toml}: block_size = '8': must be a whole number between 1 and 1024"),
        ([], {}, "routers = [1]", "{toml}: routers = [1]: must be a list of texts"),
        ([], {}, "blocksize = 8", "{toml}: blocksize: unknown key of prefill; did you mean block_size?"),
        ([], {}, "[prefil]\nblock_size = 8", "{toml}: [prefil]: unknown table; did you mean prefill?"),
        ([], {}, "block_size", "--config {toml}: is not TOML: "),
        (["--config", ""], {}, "", "--config: must be a path"),
        (["--config", "/nowhere"], {}, "", "--config /nowhere: cannot be read: No such file or directory"),
    ],
)
def test_a_wrong_value_is_one_sentence_that_names_place_value_and_bound(
    tmp_path: Path, argv: list[str], environment: dict[str, str], toml: str, sentence: str
) -> None:
    """Whatever the source."""
    path = write(tmp_path, toml) if toml else None
    required = [] if sentence.startswith("--model is missing") else ["--model", "m"]
    with pytest.raises(ConfigError) as caught:
        read([*argv, *required] if "model" not in str(argv) + toml else argv, environment, path)
    assert str(caught.value).startswith(sentence.replace("{toml}", str(path)))
    assert "\n" not in str(caught.value)


def test_load_ends_the_process_with_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    """No traceback, no usage dump."""
    with pytest.raises(SystemExit) as caught:
        load(SampleConfig, "baton prefill", "Test.", ["--model", "m", "--dtype", "fp8"])
    assert caught.value.code == 2
    assert capsys.readouterr() == ("", "baton prefill: --dtype fp8: must be one of fp32, bf16\n")


def test_help_lists_every_knob_with_its_default_variable_and_key(capsys: pytest.CaptureFixture[str]) -> None:
    """And shows how to call it."""
    with pytest.raises(SystemExit) as caught:
        load(SampleConfig, "baton prefill", "Runs a prefill node.", ["--help"])
    assert caught.value.code == 0
    told = " ".join(capsys.readouterr().out.split())
    for line in (
        "--model DIR model directory (required) [BATON_MODEL, model]",
        "--block-size N tokens per block (default 16) [BATON_BLOCK_SIZE, block_size]",
        "--lease-s X life of a lease, 100 % of it (default 10.0) [BATON_LEASE_S, lease_s]",
        "--dtype fp32|bf16 computes in (default bf16) [BATON_DTYPE, dtype]",
        "--checksum on|off check what arrives (default on) [BATON_CHECKSUM, checksum]",
        "--threads N threads; none: all cores (default none) [BATON_THREADS, threads]",
        "Runs a prefill node.",
        "Example: baton prefill --model DIR",
        'BATON_MODEL=DIR, or in FILE model = "DIR"',
    ):
        assert line in told


def test_an_empty_variable_is_unset_because_that_is_how_compose_files_spell_it() -> None:
    """Not a wrong number."""
    assert read(["--model", "m"], {"BATON_BLOCK_SIZE": ""}).block_size == 16


def test_a_child_gets_its_threads_but_not_the_launchers_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the environment is handed on: BATON_ variables are for every process."""
    monkeypatch.setenv("BATON_CONFIG", "/some/file")
    monkeypatch.setenv("BATON_BLOCK_SIZE", "3")
    environment = child_environment(threads=2)
    assert "BATON_CONFIG" not in environment
    assert environment["BATON_BLOCK_SIZE"] == "3"
    assert environment["OMP_NUM_THREADS"] == "2"
    assert environment["GOMP_SPINCOUNT"] == thread_environment(1)["GOMP_SPINCOUNT"] == "2000"


def test_the_installed_grpc_knows_the_experiments_that_we_name() -> None:
    """Of one that it does not know it would tell the user, in a line of its own."""
    code = (
        "from runtime import config; config.set_grpc_environment(); import grpc; grpc.insecure_channel('a:1').close()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_what_the_user_tells_grpc_wins_be_it_nothing() -> None:
    """So that both ways can be compared."""
    code = "from runtime import config; config.set_grpc_environment(); import os; print(os.environ['GRPC_EXPERIMENTS'])"
    command, environment = [sys.executable, "-c", code], {**child_environment(), "GRPC_EXPERIMENTS": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
    assert done.stdout == "\n"


def test_a_file_that_is_no_utf_8_is_no_toml(tmp_path: Path) -> None:
    """Python's own words were of a codec and a byte's position."""
    path = tmp_path / "baton.toml"
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=f"^--config {path}: is not TOML: it is no UTF-8$"):
        read(["--model", "m"], {}, path)


def test_usage_has_in_brackets_what_may_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    for config, flags in ((UpConfig, "[--model DIR] [flags]"), (RouterConfig, "--model DIR [flags]")):
        with pytest.raises(SystemExit):
            load(config, "baton", "", ["--help"])
        assert capsys.readouterr().out.startswith(f"usage: baton [--config FILE] {flags}\n")
