"""What is written of grammars where a node logs: nothing of what clients wrote, and all that a bug says."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

from engine.plan import Grammar
from node.grammar_processes import GrammarProcesses
from tests.architecture.source_tree import DEMO_MODEL

VOCAB_SIZE = 1536
END = 257


@pytest.mark.covers("A14")
def test_a_library_that_warns_of_each_place_in_a_grammar_is_not_heard(capfd: pytest.CaptureFixture[str]) -> None:
    processes = GrammarProcesses(DEMO_MODEL, VOCAB_SIZE)
    processes.open()
    try:
        processes.check(Grammar("regex", "^" * 100 + "secret", False, (END,)))
    finally:
        processes.close()
    assert capfd.readouterr() == ("", "")


def test_a_bug_there_is_heard() -> None:
    own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-P", "-m", "node.grammar_process", str(theirs.fileno())]
    with own, subprocess.Popen(command, pass_fds=(theirs.fileno(),), stderr=subprocess.PIPE, text=True) as process:
        theirs.close()
        own.send(json.dumps({"directory": str(DEMO_MODEL), "vocab_size": VOCAB_SIZE}).encode())
        assert json.loads(own.recv(1000)) == ""
        own.send(b"no JSON")
        _, said = process.communicate(timeout=60)
    assert "JSONDecodeError" in said
