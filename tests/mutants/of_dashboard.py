"""Bugs of the dashboard: who may kill a node, what is counted, and what is drawn."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_RULES: Final = ("tests/router/test_kill_rules.py",)
_CONTROL: Final = ("tests/deploy/test_control.py",)
_STATE: Final = ("tests/router/test_dashboard_state.py",)
_PICTURE: Final = ("tests/router/test_timeline_picture.py",)

MUTANTS: Final = (
    Mutant(
        "ends-with-its-readers",
        "A command ends where nobody reads what it says any more, and `baton up` leaves its cluster to be killed.",
        "deploy/heedless.py",
        "            return memoryview(data).nbytes",
        "            raise",
        ("tests/deploy/test_heedless.py",),
    ),
    Mutant(
        "ends-with-a-locale",
        "A name or a text that the locale does not know ends a command with a traceback, and `baton up` with its cluster.",
        "deploy/heedless.py",
        'errors="backslashreplace" if stream.errors == "strict" else stream.errors,',
        "errors=stream.errors,",
        ("tests/deploy/test_heedless.py",),
    ),
    Mutant(
        "starts-on-a-full-disk",
        "`baton up` starts on a disk that takes nothing, and nothing says why its processes end.",
        "deploy/launcher.py",
        "            trial.write(_TRIAL)",
        "            pass",
        ("tests/e2e/test_launch_run_dir.py",),
    ),
    Mutant(
        "streams-given-away",
        "What the shell has closed of stdin, stdout and stderr is a connection's number, and its end the router's.",
        "runtime/process.py",
        "O_RDWR)) <= _STDERR:",
        "O_RDWR)) < 0:",
        ("tests/router/test_process.py",),
    ),
    Mutant(
        "logs-not-appended-to",
        "A log that is cut off while it is written goes on where it was, behind zeros, and its room is not to be had back.",
        "deploy/child_process.py",
        '        with log_path.open("ab") as log:',
        '        with log_path.open("r+b") as log:',
        ("tests/deploy/test_process.py",),
    ),
    Mutant(
        "any-origin-kills",
        "Another site in the same browser may have a node killed.",
        "router/foreign_pages.py",
        "and parts.netloc.lower() == host.lower()",
        "and bool(parts.netloc)",
        _RULES,
    ),
    Mutant(
        "a-form-kills",
        "A content type that a browser sends to other sites unasked is let through.",
        "router/kill_rules.py",
        "if not is_json(headers):",
        'if "content-type" not in headers:',
        _RULES,
    ),
    Mutant(
        "a-foreign-name-kills",
        "A page whose name points to this address is taken for the router's own.",
        "router/kill_rules.py",
        "if not _is_address(host):",
        "if not host:",
        _RULES,
    ),
    Mutant(
        "a-token-of-anything",
        "The launcher obeys who shows any token.",
        "deploy/control.py",
        'return node if hmac.compare_digest(shown.encode("utf-8", "replace"), token.encode()) else None',
        "return node if shown else None",
        _CONTROL,
    ),
    Mutant(
        "live-tokens-not-counted",
        "Tokens are counted when their request ends, so that throughput comes in leaps.",
        "router/shell.py",
        "return self._ended_tokens + sum(each.num_tokens for each in self._answers.values() if not each.is_canary)",
        "return self._ended_tokens",
        ("tests/router/test_metrics.py",),
    ),
    Mutant(
        "now-is-for-ever",
        "Times of requests that ended long ago are shown as times of now.",
        "router/dashboard_state.py",
        "if begins_at is None or now - ends_at > RECENT_S or num_gaps <= 0:",
        "if begins_at is None or num_gaps <= 0:",
        _STATE,
    ),
    Mutant(
        "all-timelines-are-read",
        "A look at the dashboard reads every timeline that is kept.",
        "router/timelines.py",
        "deque(maxlen=BEGUN)",
        "deque()",
        _STATE,
    ),
    Mutant(
        "a-mark-without-its-lane",
        "A node that died before it did anything is missing from the picture, and its death with it.",
        "router/timeline_picture.py",
        "used |= {mark.lane for mark in marks if start <= mark.at <= end and mark.lane is not None}",
        "used |= set()",
        _PICTURE,
    ),
    Mutant(
        "bars-beyond-the-edge",
        "What goes on behind a panel's edge is drawn beyond it.",
        "router/timeline_picture.py",
        "min(bar.end, end)",
        "bar.end",
        _PICTURE,
    ),
    Mutant(
        "a-form-of-another-site-is-read",
        "Any page that is open in a browser spends what nodes can do.",
        "router/bodies.py",
        " and not is_json(headers):",
        " and not headers:",
        ("tests/router/test_bodies.py",),
    ),
    Mutant(
        "bodies-have-no-bound-in-all",
        "Each connection may keep a body of the largest size here, for as long as it likes.",
        "router/bodies.py",
        "        if self._num_under_way + num_bytes > self._max_under_way:\n",
        "        if num_bytes > self._max_under_way:\n",
        ("tests/router/test_bodies.py",),
    ),
    Mutant(
        "a-body-that-is-gone-counts-for-ever",
        "What was counted of bodies on their way is never given back.",
        "router/bodies.py",
        "        self._num_under_way -= num_bytes\n",
        "        pass\n",
        ("tests/router/test_bodies.py",),
    ),
    Mutant(
        "brackets-are-not-counted",
        "JSON of any number of values is read at one go.",
        "router/json_reading.py",
        "    if len(text) > MAX_VALUES:\n        _check_extent(text)\n",
        "",
        ("tests/router/test_json_reading.py",),
    ),
)
