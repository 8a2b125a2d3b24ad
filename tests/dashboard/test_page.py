"""The page in front of a router that does what the test says: late, refused, cut off, or answered by somebody else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from tests.dashboard.browser import Browser, missing, opened_browser
from tests.dashboard.scripted_router import ScriptedRouter, request, scripted_router, state

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

STATUS: Final = "return document.getElementById('status').textContent"


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    """One for all tests of this file."""
    with opened_browser() as opened:
        yield opened


@pytest.fixture
def router() -> Iterator[ScriptedRouter]:
    with scripted_router() as script:
        yield script


@pytest.fixture
def page(window: Browser, router: ScriptedRouter) -> Browser:
    """Freshly loaded, with one answer."""
    window.open(router.url + "/")
    window.wait(f"{STATUS} === 'ready'")
    return window


def test_choices_that_ended_in_several_ways_are_a_failure_where_one_of_them_is(
    page: Browser, router: ScriptedRouter
) -> None:
    ways = {"well": ("mixed", True), "ill": ("mixed", False), "lives": (None, None), "cut": ("length", True)}
    listed = [request(name, outcome, ended_well=is_well) for name, (outcome, is_well) in ways.items()]
    router.state = lambda: (200, state(requests=listed))
    page.wait("return document.querySelectorAll('#requests tr').length === 4")
    shown = page.run("return [...document.querySelectorAll('#requests .pill')].map(e => [e.textContent, e.className])")
    assert shown == [["mixed", "pill plain"], ["mixed", "pill bad"], ["live", "pill live"], ["length", "pill plain"]]
