"""The router as a process: small, without torch, and what the user can mend is one line and exit code 2."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from router.config import RouterConfig
from runtime.process import listening_socket, why_not_listening
from tests.router.tiny_model import write_model_text
from tests.security.strangers import make_certificates

MAX_RSS_BYTES = 150 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_text(tmp_path_factory.mktemp("served-name"))


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "router", *flags]


@contextmanager
def running(
    model: Path, ready_file: Path, stdin: int = subprocess.DEVNULL, by: tuple[str, ...] = ()
) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """A router on free ports, and what its ready file says."""
    flags = ["--model", str(model), "--port", "0", "--ready-file", str(ready_file)]
    with subprocess.Popen([*by, *command(*flags)], stdin=stdin, stderr=subprocess.PIPE, text=True) as process:
        try:
            end = time.monotonic() + 120
            while not ready_file.exists():
                assert process.poll() is None, process.stderr and process.stderr.read()
                assert time.monotonic() < end
                time.sleep(0.01)
            yield process, json.loads(ready_file.read_text())
        finally:
            process.kill()


@pytest.mark.covers("A04")
def test_it_serves_is_small_has_no_torch_and_ends_with_0_at_a_signal(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path / "ready.json") as (process, ready):
        assert int(ready["pid"]) == process.pid
        assert httpx.get(f"{ready['url']}/health", timeout=60).status_code == 200
        assert httpx.get(f"{ready['url']}/ready", timeout=60).status_code == 503
        assert httpx.get(f"{ready['url']}/v1/models", timeout=60).json()["data"][0]["id"] == model.name
        host, _, port = ready["registry"].rpartition(":")
        socket.create_connection((host, int(port)), timeout=60).close()
        own = psutil.Process(process.pid)
        assert own.memory_info().rss < MAX_RSS_BYTES
        assert not [each.path for each in own.memory_maps() if "torch" in each.path]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 0


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&- 2>&-"])
def test_a_connection_is_never_given_the_number_of_a_stream_that_the_shell_has_closed(
    model: Path, tmp_path: Path, closed: str
) -> None:
    """Its end would end the router."""
    by = ("bash", "-c", f'exec "$@" {closed}', "-")
    with running(model, tmp_path / "ready.json", by=by) as (process, ready):
        for _ in range(3):
            assert httpx.get(f"{ready['url']}/health", timeout=60).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 0


def test_where_few_files_may_be_open_the_router_says_so_and_turns_connections_away_instead_of_cutting_them_off(
    model: Path, tmp_path: Path
) -> None:
    by = ("bash", "-c", 'ulimit -n 200; exec "$@"', "-")
    with running(model, tmp_path / "ready.json", by=by) as (process, ready), ExitStack() as held:
        host, _, port = ready["url"].removeprefix("http://").partition(":")
        for _ in range(130):
            connection = held.enter_context(socket.create_connection((host, int(port)), timeout=60))
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 503 ")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 0
        assert process.stderr is not None
        (line,) = [line for line in process.stderr if "few_descriptors" in line]
    assert "WARNING" in line and "open_files=200 max_connections=100 wanted=4096" in line


def test_a_first_text_starts_no_threads_which_may_not_be_had_then(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a container's limit of processes was reached just then, no text was ever encoded again, and /ready said nothing."""
    monkeypatch.setenv("RAYON_NUM_THREADS", "16")  # how many they would be; others may come, of gRPC, say
    with running(model, tmp_path / "ready.json") as (process, ready):
        own = psutil.Process(process.pid)
        before = own.num_threads()
        answer = httpx.post(f"{ready['url']}/tokenize", json={"model": model.name, "prompt": "x"}, timeout=60)
        assert answer.status_code == 200, answer.text
        assert own.num_threads() < before + 16


def test_a_reload_without_a_file_of_keys_ends_nothing(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path / "ready.json") as (process, ready):
        process.send_signal(signal.SIGHUP)
        for _ in range(2):  # the second, at the latest, once the signal has been taken
            assert httpx.get(f"{ready['url']}/health", timeout=60).status_code == 200
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 0


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_reload_while_it_reads_its_settings_ends_nothing(workers: str, tmp_path: Path) -> None:
    """systemd takes SIGHUP for a good end, and would start nothing again."""
    settings = tmp_path / "settings.toml"
    os.mkfifo(settings)
    words = command("--config", str(settings), "--workers", workers)
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        with settings.open("w"):  # once it has opened it, too
            process.send_signal(signal.SIGHUP)
        _, told = process.communicate(timeout=120)
    assert (process.returncode, "--model is missing" in told) == (2, True)


def test_a_router_that_a_terminal_has_started_ends_with_it(model: Path, tmp_path: Path) -> None:
    ours, its = os.openpty()
    inherited = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, by our children, too
    try:
        with running(model, tmp_path / "ready.json", stdin=its) as (process, _):
            process.send_signal(signal.SIGHUP)  # as the kernel does when the terminal is closed
            assert process.wait(timeout=120) == -signal.SIGHUP
    finally:
        signal.signal(signal.SIGHUP, inherited)
    os.close(ours)
    os.close(its)


@pytest.mark.parametrize("flag", ["--port", "--registry-port"])
def test_a_taken_port_is_one_line_that_names_it_and_exit_code_2(model: Path, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        flags = {"--model": str(model), "--port": "0"} | {flag: port}
        ended = subprocess.run(
            command(*(word for pair in flags.items() for word in pair)), capture_output=True, text=True, timeout=240
        )
    assert ended.returncode == 2
    [line] = ended.stderr.splitlines()
    assert line.startswith(f"baton router: {flag} {port}: cannot listen on 127.0.0.1: ")


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("300.1.1.1", "is no address and no name that this machine knows"),
        ("a..b", "is no address and no name that this machine knows"),
        ("ü" * 64, "is no address and no name that this machine knows"),
        ("192.0.2.1", "is no address of this machine"),
    ],
)
def test_a_host_to_listen_on_that_is_not_here_is_said_of_host_and_not_of_the_port(host: str, why: str) -> None:
    with pytest.raises(OSError, match=r".") as caught:
        listening_socket(host, 0, 1)
    assert why_not_listening(caught.value, "--port", host, 0) == f"--host {host}: {why}"


def test_an_address_that_is_not_up_yet_is_one_line_and_exit_code_75(model: Path) -> None:
    """Who starts it again may find it there."""
    flags = ("--model", str(model), "--port", "0", "--host", "192.0.2.1")
    ended = subprocess.run(command(*flags), capture_output=True, text=True, timeout=240)
    assert ended.returncode == 75
    assert ended.stderr.splitlines()[-1] == "baton router: --host 192.0.2.1: is no address of this machine"


@pytest.mark.parametrize(("name", "why"), [("none", "is not a directory"), ("x" * 300, "File name too long")])
def test_a_bad_model_directory_is_one_line_and_exit_code_2(tmp_path: Path, name: str, why: str) -> None:
    flags = ("--model", str(tmp_path / name), "--port", "0")
    ended = subprocess.run(command(*flags), capture_output=True, text=True, timeout=240)
    assert ended.returncode == 2
    assert ended.stderr == f"baton router: --model {tmp_path / name}: {why}\n"


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_ready_file_that_cannot_be_written_is_one_line_and_exit_code_2(model: Path, workers: str) -> None:
    flags = ("--model", str(model), "--port", "0", "--workers", workers, "--ready-file", "/no/such/x")
    ended = subprocess.run(command(*flags), capture_output=True, text=True, timeout=240)
    assert ended.returncode == 2
    assert ended.stderr == "baton router: --ready-file /no/such/x: cannot be written: No such file or directory\n"


def test_it_is_imported_soon_and_without_what_is_not_its_business() -> None:
    """In the processor's time, once it has been compiled: a fifth of the bound, unless what is beside it takes its caches."""
    program = (
        "import time, sys; import router.process; "
        "print(time.process_time(), [name for name in ('torch', 'engine', 'connector', 'transformers') if name in sys.modules])"
    )

    def cpu_s() -> float:
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True)
        seconds, foreign = ended.stdout.split(" ", 1)
        assert foreign.strip() == "[]"
        return float(seconds)

    assert any(cpu_s() < 4.0 for _ in range(3))


def test_an_empty_name_for_the_model_and_an_empty_host_are_refused() -> None:
    with pytest.raises(ValueError, match="--served-model-name: must not be empty"):
        RouterConfig(model=Path("m"), served_model_name="")
    with pytest.raises(ValueError, match=r"--model 'm.udcff': is no name that clients could ask for"):
        RouterConfig(model=Path("m\udcff"))
    assert RouterConfig(model=Path("m\udcff"), served_model_name="m").served_model_name == "m"
    with pytest.raises(ValueError, match="--host: must be an address of this machine, or"):
        RouterConfig(model=Path("m"), host="")


@pytest.mark.covers("X04")
@pytest.mark.parametrize("is_guarded", [False, True])
def test_a_router_that_listens_everywhere_names_what_is_missing(tmp_path: Path, is_guarded: bool) -> None:
    """And says nothing with both."""
    model, ready, keys = write_model_text(tmp_path / "model"), tmp_path / "ready.json", tmp_path / "keys"
    keys.write_text("sk-0123456789abcdef\n")
    keys.chmod(0o600)
    command = [sys.executable, "-m", "router", "--model", str(model), "--host", "0.0.0.0", "--port", "0"]
    if is_guarded:
        command += ["--api-keys", str(keys), "--tls-dir", str(make_certificates(tmp_path / "certs"))]
    with subprocess.Popen([*command, "--ready-file", str(ready)], stderr=subprocess.PIPE, text=True) as process:
        try:
            give_up_at = time.monotonic() + 120
            while not ready.exists() and process.poll() is None and time.monotonic() < give_up_at:
                time.sleep(0.02)
            assert ready.exists()
        finally:
            process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        told = [line for line in process.stderr.read().splitlines() if " exposed " in line]
    if is_guarded:
        assert not told
    else:
        (line,) = told
        assert "without --api-keys whoever can reach it can use it; without --tls-dir prompts" in line
