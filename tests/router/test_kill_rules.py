"""Who may press the dashboard's button: the router's own page, called by address, and no other site in the same browser."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.kill_rules import find_objection

GOOD = {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000", "content-type": "application/json"}


@pytest.mark.covers("X02")
@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost:8000", "[::1]:8000", "192.168.1.7", "10.0.0.5:80"])
def test_the_page_itself_may(host: str) -> None:
    for scheme in ("http", "https"):
        for more in ({}, {"sec-fetch-site": "same-origin"}):
            assert find_objection(GOOD | {"host": host, "origin": f"{scheme}://{host}"} | more) is None


@pytest.mark.covers("X02")
@pytest.mark.parametrize(
    "change",
    [
        {"origin": "http://evil.example"},
        {"origin": "http://127.0.0.1:9000"},  # another server of this machine
        {"origin": "null"},
        {"origin": ""},
        {"origin": "file://127.0.0.1:8000"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "none"},
        {"content-type": "text/plain"},  # what a form may send without being asked
        {"content-type": ""},
        {"host": "evil.example", "origin": "http://evil.example"},  # a name of its own for this address
        {"host": "127.0.0.1.evil.example", "origin": "http://127.0.0.1.evil.example"},
        {"host": "localhost.evil.example", "origin": "http://localhost.evil.example"},
        {"host": "", "origin": "http://"},
        {"host": "[", "origin": "http://["},
    ],
)
def test_nobody_else_may(change: dict[str, str]) -> None:
    assert find_objection(GOOD | change) is not None


@given(st.dictionaries(st.sampled_from(sorted(GOOD)), st.text(max_size=30)))
def test_whatever_is_sent_there_is_an_answer_and_no_origin_but_the_hosts_passes(headers: dict[str, str]) -> None:
    if find_objection(headers) is None:
        assert headers["origin"].partition("//")[2].lower() == headers["host"].lower()
