"""What a process owes the operating system: its end, and files that are whole."""

from __future__ import annotations

import ast
import asyncio
import json
import logging
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from pathlib import Path

import pytest

from deploy.child_process import ChildProcess, executed
from runtime.logs import log_event, set_up_logging
from runtime.process import (
    CannotWrite,
    check_writable,
    die_with_parent,
    fatal,
    is_loopback,
    warn_if_exposed,
    write_atomically,
    write_ready_file,
)
from tests.architecture.source_tree import DEMO_MODEL

CHILD = (
    "import sys\n"
    "from runtime.process import die_with_parent\n"
    "die_with_parent(int(sys.argv[1]))\n"
    "print('up', flush=True)\n"
    "input()\n"
)
PARENT = (
    "import os, subprocess, sys\n"
    "child = subprocess.Popen([sys.executable, '-c', sys.argv[1], str(os.getpid())], stdin=subprocess.PIPE)\n"
    "print(child.pid, flush=True)\n"
    "child.wait()\n"
)
WAITER = (
    "import asyncio\n"
    "from runtime.process import first_signal\n"
    "async def main():\n"
    "    first = first_signal()\n"
    "    print('up', flush=True)\n"
    "    print((await first).name, flush=True)\n"
    "    await asyncio.sleep(600)\n"
    "asyncio.run(main())\n"
)
TALKER = """
import signal, sys
while True:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    print("a line", flush=True)
    signal.sigwait([signal.SIGUSR1])
"""


INIT = (
    "from runtime.process import end_while_loading\nend_while_loading()\nprint('loading', flush=True)\ninput()\n"
    + WAITER
)
LOADING = {  # how each is begun, and the flag of a file that it reads meanwhile
    "router": (("router", "--port", "0"), "--tls-dir"),
    "prefill": (("prefill_node", "--router", "127.0.0.1:9"), "--tls-dir"),
    "decode": (("deploy.node_process", "decode", "--router", "127.0.0.1:9"), "--config"),
    "mixed": (("deploy.node_process", "mixed", "--router", "127.0.0.1:9"), "--config"),
}


def test_a_child_dies_with_a_parent_that_was_killed() -> None:
    """SIGKILL gives the parent no chance to say so; the kernel does."""
    with subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        first = {parent.stdout.readline().strip(), parent.stdout.readline().strip()}
        child_pid = int(*(first - {"up"}))
        gone = os.pidfd_open(child_pid)
        assert not select.select([gone], [], [], 0)[0]
        parent.kill()
        assert select.select([gone], [], [], 20)[0], "the child outlived its parent"
        os.close(gone)


def test_a_child_whose_parent_is_gone_already_does_not_start() -> None:
    """The parent may die between fork and the call."""
    result = subprocess.run([sys.executable, "-c", CHILD, "1"], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "--parent-pid 1: is not the process that started this one, or has ended\n"


def test_without_a_parent_to_watch_nothing_changes() -> None:
    """0 is what a user who starts a node by hand has."""
    die_with_parent(0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_to_stop_and_the_second_ends_the_process(
    number: signal.Signals, second: signal.Signals
) -> None:
    """Also while the clean-up hangs."""
    with subprocess.Popen([sys.executable, "-c", WAITER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        assert process.stdout.readline() == f"{number.name}\n"
        process.send_signal(second)
        assert process.wait(20) == 128 + second


@contextmanager
def as_process_1(*words: str) -> Iterator[subprocess.Popen[str]]:
    """Python with these words as the first process of a namespace, as in a container; what is yielded ends with its exit code."""
    space = ("unshare", "--pid", "--mount-proc", "--kill-child")
    if shutil.which("unshare") is None or subprocess.run([*space, "true"], capture_output=True, check=False).returncode:
        pytest.skip("unshare --pid is not to be had: no process can be number 1 here")
    pipe = subprocess.PIPE
    with subprocess.Popen([*space, sys.executable, *words], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as outside:
        try:
            yield outside
        finally:
            outside.kill()


def terminate_inside(outside: subprocess.Popen[str]) -> None:
    """SIGTERM to the one that is number 1 there, once it waits: of one just before a read, Python hears when that is over."""
    number = int(Path(f"/proc/{outside.pid}/task/{outside.pid}/children").read_text(encoding="ascii"))
    before, num_same = "", 0
    while num_same < 10:
        now = Path(f"/proc/{number}/stat").read_text(encoding="ascii").rpartition(")")[2]
        state, computed = now.split()[0], " ".join(now.split()[11:13])
        before, num_same = computed, num_same + 1 if (state, computed) == ("S", before) else 0
        time.sleep(0.02)
    os.kill(number, signal.SIGTERM)


def test_process_1_of_a_container_ends_when_it_is_told_so_while_it_loads() -> None:
    """The kernel hands it no signal that it has no handler for: it would load on, and be killed later without a drain."""
    with as_process_1("-c", INIT) as process:
        assert process.stdout is not None and process.stdout.readline() == "loading\n"
        terminate_inside(process)
        assert process.wait(60) == 128 + signal.SIGTERM


def test_process_1_of_a_container_is_only_asked_to_stop_once_it_has_loaded() -> None:
    with as_process_1("-c", INIT) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert [process.stdout.readline() for _ in range(2)] == ["loading\n", "up\n"]
        terminate_inside(process)
        assert process.stdout.readline() == "SIGTERM\n"


@pytest.mark.parametrize("role", LOADING)
def test_a_container_that_is_stopped_while_it_loads_is_gone_at_once(role: str, tmp_path: Path) -> None:
    with held_up(role, tmp_path, as_process_1) as process:
        terminate_inside(process)
        assert process.wait(60) == 128 + signal.SIGTERM


@pytest.mark.parametrize("role", LOADING)
def test_who_is_stopped_by_ctrl_c_while_it_loads_says_nothing(role: str, tmp_path: Path) -> None:
    with held_up(role, tmp_path, as_any_process) as process:
        process.send_signal(signal.SIGINT)
        told, _ = process.communicate(timeout=20)
        assert (process.returncode, told) == (-signal.SIGINT, "")


@contextmanager
def as_any_process(*words: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def held_up(
    role: str, folder: Path, started: Callable[..., AbstractContextManager[subprocess.Popen[str]]]
) -> Iterator[subprocess.Popen[str]]:
    """A process of this role where it reads a file that never ends."""
    words, flag = LOADING[role]
    endless = folder / "ca.crt"
    os.mkfifo(endless)
    read = endless if flag == "--config" else folder
    with started("-m", *words, "--model", str(DEMO_MODEL), flag, str(read)) as process:
        writer = None
        while writer is None:
            try:
                writer = os.open(endless, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                assert process.poll() is None, process.communicate()
                time.sleep(0.01)  # nobody reads it yet: nothing else tells
        yield process
        os.close(writer)


def test_a_fatal_error_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    """Even if the message was not."""
    with pytest.raises(SystemExit) as caught:
        fatal("port 8000\n  is taken")
    assert caught.value.code == 2
    assert capsys.readouterr().err == "port 8000 is taken\n"


def test_a_json_file_appears_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    """Also over an older one."""
    path = tmp_path / "ready.json"
    for content in ({"pid": 1, "text": "x" * 9999}, {"pid": 2}):
        write_atomically(path, content)
        assert json.loads(path.read_text()) == content
    assert [each.name for each in tmp_path.iterdir()] == ["ready.json"]


def test_whether_a_file_can_be_written_is_known_before_and_leaves_nothing(tmp_path: Path) -> None:
    """An older one stays as it is."""
    (tmp_path / "ready.json").write_text("{}")
    check_writable("--ready-file", None)
    check_writable("--ready-file", tmp_path / "ready.json")
    check_writable("--ready-file", tmp_path / "new.json")
    assert [each.name for each in tmp_path.iterdir()] == ["ready.json"]
    assert (tmp_path / "ready.json").read_text() == "{}"
    for path in (tmp_path / "no" / "x", tmp_path / "ready.json" / "x", tmp_path):
        with pytest.raises(CannotWrite, match=f"^--ready-file {path}: cannot be written: "):
            check_writable("--ready-file", path)


@pytest.mark.parametrize("role", LOADING)
def test_a_wrong_value_of_who_has_no_stderr_is_exit_code_2(role: str) -> None:
    closed = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "-", sys.executable, "-m", *LOADING[role][0], "--model"]
    assert subprocess.run(closed, check=False).returncode == 2


def test_a_disk_that_takes_files_and_nothing_in_them_is_found_before(tmp_path: Path) -> None:
    """As a full one does."""
    say = "import sys, pathlib, runtime.process as p; p.check_writable('--ready-file', pathlib.Path(sys.argv[1]))"
    full = ["bash", "-c", 'ulimit -f 0; exec "$@"', "-", sys.executable, "-c", say, str(tmp_path / "ready.json")]
    result = subprocess.run(full, capture_output=True, text=True, check=False)
    assert f"CannotWrite: --ready-file {tmp_path / 'ready.json'}: cannot be written: File too large" in result.stderr
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CannotWrite, match=f"^--ready-file {tmp_path / 'no' / 'x'}: cannot be written: "):
        write_ready_file(tmp_path / "no" / "x", {})  # it was there before


@pytest.mark.covers("X04")
def test_listening_beyond_this_machine_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    """The line names what is missing; where nothing is there is none."""
    missing = {"--api-keys": "whoever can reach it can use it", "--tls-dir": "keys can be read"}
    for host in ("127.0.0.1", "127.1.2.3", "localhost", "::1"):
        assert is_loopback(host)
        warn_if_exposed(host, "router", missing)
    assert not caplog.records
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.com"):
        warn_if_exposed(host, "router", {})
        assert not caplog.records
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.com"):
        warn_if_exposed(host, "router", missing)
        assert f"exposed listener=router host={host}" in caplog.records[-1].message
        assert (
            "without --api-keys whoever can reach it can use it; without --tls-dir keys" in caplog.records[-1].message
        )
    assert all(record.levelno == logging.WARNING for record in caplog.records)


@pytest.mark.covers("O05", "X05")
def test_a_strangers_text_in_a_log_line_moves_no_cursor_and_ends_no_line(caplog: pytest.LogCaptureFixture) -> None:
    """What a terminal would obey is written out."""
    log_event(logging.getLogger("x"), logging.WARNING, "refused", model="\x1b[2J\r\na\u2028\x00b\u202e", bare="a\x07")
    assert caplog.messages == [r'refused model="\x1b[2J\r\na\u2028\x00b\u202e" bare="a\x07"']


def test_a_log_line_is_an_event_with_values_that_can_be_split_again() -> None:
    """In a process of its own, because logging is the process's."""
    code = (
        "import logging\n"
        f"from runtime.logs import {set_up_logging.__name__}, {log_event.__name__}\n"
        "set_up_logging('info', 'router')\n"
        "log = logging.getLogger('x')\n"
        "log_event(log, logging.DEBUG, 'hidden')\n"
        "log_event(log, logging.INFO, 'request_ended', request='a b', quote='\"', s=0.25, tokens=3, none=None)\n"
        "log.info('event=link_closed link=%s reason=%s s=%.1f kind=shm', 'p event=x', 'a\\n12:00 INFO forged', 1.26)\n"
        "log.info('event=transport_stuck')\n"
        "log.info('plain words = %s', 'nothing')\n"
    )
    zone = os.environ | {"TZ": "Asia/Kolkata"}
    result = subprocess.run([sys.executable, "-c", code], env=zone, capture_output=True, text=True, check=True)
    line, with_form, bare, plain = result.stderr.splitlines()
    said_at = line.split()[0]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", said_at), "in UTC, wherever it is said"
    assert abs(datetime.fromisoformat(said_at).timestamp() - time.time()) < 60
    assert line.endswith(r' INFO router request_ended request="a b" quote="\"" s=0.25 tokens=3 none=None')
    assert with_form.endswith(
        r' INFO router link_closed link="p event=x" reason="a\n12:00 INFO forged" s=1.26 kind=shm'
    )
    assert bare.endswith(" INFO router transport_stuck")
    assert plain.endswith(" INFO router plain words = nothing")


@pytest.mark.covers("O05")
def test_every_form_that_is_logged_is_an_events() -> None:
    """Of another one the fields are printed as they are: a client's word with a new line in it would be a line of the log."""
    root = Path(__file__).resolve().parents[2]
    rooms = ("connector", "decode_node", "engine", "kernels", "mixed_node", "node", "prefill_node", "router", "runtime")
    calls = [
        node
        for room in rooms
        for path in (root / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and re.fullmatch(r"_?LOG\.(debug|info|warning|error)", ast.unparse(node.func))
    ]
    forms = [ast.literal_eval(call.args[0]) for call in calls]
    assert len(forms) > 10 and [form for form in forms if not form.startswith("event=")] == []


@pytest.mark.covers("O05")
def test_a_log_line_can_be_json_whatever_is_logged() -> None:
    code = (
        "import logging\n"
        f"from runtime.logs import {set_up_logging.__name__}, {log_event.__name__}\n"
        "set_up_logging('info', 'router', 'json')\n"
        "log = logging.getLogger('x')\n"
        "log_event(log, logging.INFO, 'ended', request='a\\nb', s=0.25, ok=True, none=None, level='forged', odd=[1])\n"
        "log.warning('event=link_closed link=%s reason=%r number=%d', 'p=1 event=fake', 'why', 3)\n"
        "log.error('request_failed path=%s', '/x', exc_info=ValueError('v'))\n"
        "log.info('%s', 'plain words = nothing')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ended, closed, failed, plain = map(json.loads, result.stderr.splitlines())
    assert ended.pop("time").endswith("Z")
    assert ended == {
        "level": "INFO", "process": "router", "event": "ended", "request": "a\nb", "s": 0.25, "ok": True, "none": None, "odd": "[1]"
    }  # fmt: skip
    assert (closed["event"], closed["link"], closed["reason"], closed["number"]) == (
        "link_closed",
        "p=1 event=fake",
        "why",
        3,
    )
    assert failed["event"] == "request_failed" and failed["path"] == "/x" and "ValueError: v" in failed["traceback"]
    assert plain["event"] == "log" and plain["message"] == "plain words = nothing"


async def said(read: Callable[[], str], text: str) -> None:
    """Wait until a log has that in it, and nothing else."""
    async with asyncio.timeout(60):
        while (content := read()) != text:
            assert len(content) <= len(text), content
            await asyncio.sleep(0.005)


def test_a_log_that_is_cut_off_while_it_is_written_begins_anew_and_one_that_is_kept_goes_on(tmp_path: Path) -> None:
    """As logrotate's copytruncate does it, and whoever needs room on a full disk: Python's processes reopen no file."""
    (tmp_path / "talker.py").write_text(TALKER)
    log = tmp_path / "node.log"
    log.write_text("of a run before\n")

    async def run() -> None:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        for keeps_log, before in ((False, ""), (True, "a line\n")):
            child = await ChildProcess.start("node", ["talker"], tmp_path, executed(environment), keeps_log=keeps_log)
            try:
                await said(log.read_text, f"{before}a line\n")
                os.truncate(log, 0)
                os.kill(child.pid, signal.SIGUSR1)
                await said(log.read_text, "a line\n")
            finally:
                child.kill()
                await child.ended()

    asyncio.run(run())
