"""The page in front of a router that does what the test says: late, refused, cut off, or answered by somebody else."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import pytest

from tests.dashboard.browser import POLL_S, WAIT_S, Browser, missing, opened_browser
from tests.dashboard.scripted_router import (
    REQUESTS,
    STATE,
    Asked,
    ScriptedRouter,
    node,
    request,
    scripted_router,
    state,
    timeline,
    token,
)

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

STATUS: Final = "return document.getElementById('status').textContent"
ENTER: Final = "\ue007"
TITLE: Final = "return document.getElementById('timeline-of').textContent"

# What the figures say after each of the given looks, and in how many stretches the first line is drawn.
FIGURES: Final = """return (async (looks) => {
  const { Figures } = await import("/dashboard/page/figures.js");
  document.getElementById("figures").replaceChildren();
  const figures = new Figures();
  const values = () => [...document.querySelectorAll(".figure-value")].slice(0, 2).map((each) => each.textContent);
  const line = () => document.querySelector(".spark-line").getAttribute("d").split("M").slice(1);
  return looks.map((look) => {
    figures.show(look);
    return [...values(), line().map((each) => each.split("L").length).join("+")];
  });
})(...arguments)"""

# A card's pill, and whether its button can be pressed, after each of the given looks: seconds, nodes, whether it is killed now.
NODES: Final = """return (async (looks) => {
  const { Nodes } = await import("/dashboard/page/nodes.js");
  document.getElementById("nodes").replaceChildren();
  const nodes = new Nodes(() => {});
  let undo = () => {};
  return looks.map(([now, given, act]) => {
    if (act === "kill") undo = nodes.waitFor("decode-0", now);
    if (act === "undo") undo();
    nodes.show(given, true, now);
    return [...document.querySelectorAll("#nodes .node")].map((each) => {
      return `${each.querySelector(".pill").textContent}, ${each.querySelector(".kill").disabled ? "waits" : "can be killed"}`;
    });
  });
})(...arguments)"""


def until(condition: Callable[[], bool]) -> None:
    """What a page does shows in what it asks."""
    ends_at = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < ends_at
        time.sleep(POLL_S)


def looked(router: ScriptedRouter, times: int = 2) -> None:
    """From now on; what the last but one of them brought is shown."""
    asked = router.asked.count(STATE)
    until(lambda: router.asked.count(STATE) >= asked + times)


@contextmanager
def blocked_chat(router: ScriptedRouter) -> Iterator[None]:
    """An answer of which the first token comes, and no other while the block lasts."""
    over = threading.Event()

    def chunks() -> Iterator[bytes]:
        yield token("Once")
        over.wait(WAIT_S)
        yield b"[DONE]"

    router.chat = chunks
    try:
        yield
    finally:
        over.set()


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


def test_a_browser_that_keeps_nothing_shows_the_page_and_this_page_keeps_what_it_is_told(
    router: ScriptedRouter,
) -> None:
    """Where site data is blocked each access to a storage raises."""
    key = "sk-of-the-test-0123456789"
    with opened_browser({"profile.default_content_setting_values.cookies": 2}) as page:
        page.open(router.url + "/")
        page.wait(f"{STATUS} === 'ready'")
        with pytest.raises(AssertionError, match="denied"):
            page.run("return localStorage.length")
        page.click("#theme button[data-theme='dark']")
        assert page.run("return document.documentElement.dataset.theme") == "dark"
        router.timeline = lambda name: (401, {"error": {"message": "Who are you?"}})
        router.state = lambda: (401, {"error": {"message": "Who are you?"}})
        page.wait("return document.activeElement.id === 'key'")
        page.write("#key", key + ENTER)
        until(lambda: f"Bearer {key}" in router.keys)
        router.state = lambda: (200, state())
        page.wait(f"{STATUS} === 'ready'")


def test_what_no_header_can_carry_is_no_key_and_is_said_to_be_none(page: Browser, router: ScriptedRouter) -> None:
    router.state = lambda: (401, {"error": {"message": "Who are you?"}})
    page.wait("return document.activeElement.id === 'key'")
    page.write("#key", "sk-\u2026abc" + ENTER)
    problem = "return document.getElementById('key-problem').textContent"
    page.wait(f"{problem} === 'A key is of printable ASCII characters alone.'")
    looked(router)
    assert page.run(f"{problem} === 'A key is of printable ASCII characters alone.'"), "until there is another one"
    page.run("sessionStorage.setItem('baton-api-key', 'sk-\u2026abc')")
    looked(router)
    assert page.run(STATUS) == "key wanted", "one that was kept by an older page is not shown to the router"
    page.write("#key", "sk-mine" + ENTER)
    until(lambda: "Bearer sk-mine" in router.keys)
    page.run("sessionStorage.clear()")
    page.log()


def test_an_answer_that_is_none_of_a_routers_is_said_to_be_none_and_ends_the_chat_all_the_same(
    page: Browser, router: ScriptedRouter
) -> None:
    """As of a proxy whose session is over: 200, and a page to log in."""
    for answer in (b"<html>Please log in</html>", {"no": "state"}):
        router.state = lambda answer=answer: (200, answer)  # type: ignore[misc]
        page.wait(f"{STATUS} === 'no answer'")
        # Waited for: a good answer to a look of before may come behind the first bad one.
        page.wait("return document.getElementById('main').classList.contains('stale')")
        page.wait("return document.getElementById('notice').offsetParent !== null")
        router.state = lambda: (200, state())
        page.wait(f"{STATUS} === 'ready'")
        router.timeline = lambda name, answer=answer: (200, answer)  # type: ignore[misc]
        router.chat = lambda: iter([token("Once"), b"[DONE]"])
        page.write("#prompt", "hi" + ENTER)
        page.wait("return document.querySelector('.answer:last-child .answer-text')?.textContent === 'Once'")
        page.wait("return document.querySelectorAll('.cursor').length === 0")
        router.timeline = lambda name: (200, timeline(name))
    page.log()


def test_what_the_model_thinks_stands_in_front_of_what_it_says(page: Browser, router: ScriptedRouter) -> None:
    thought = b'{"choices": [{"index": 0, "delta": {"reasoning_content": "So "}}]}'
    router.chat = lambda: iter([thought, thought, token("Yes. "), token("Yes."), b"[DONE]"])
    page.write("#prompt", "hi" + ENTER)
    page.wait("return document.querySelectorAll('.cursor').length === 0 && document.querySelector('.answer')")
    told = page.wait("return document.querySelector('.answer:last-child .answer-text')?.textContent")
    assert told == "Thinks: So So \n\nYes. Yes."
    page.write("#prompt", "and?" + ENTER)
    page.wait(
        "return document.querySelectorAll('.answer').length === 2 && document.querySelectorAll('.cursor').length === 0"
    )
    assert router.chats[-1]["messages"][1] == {"role": "assistant", "content": "Yes. Yes."}, "no thought goes back"


@pytest.mark.parametrize("data", [b"{", b"null", b"{}", b'{"choices": null}'])
def test_what_is_no_part_of_an_answer_ends_it_with_a_sentence(
    page: Browser, router: ScriptedRouter, data: bytes
) -> None:
    router.chat = lambda: iter([token("Once"), data])
    page.write("#prompt", "hi" + ENTER)
    told = page.wait("return document.querySelector('.answer .error')?.textContent")
    assert told == "The answer ended early: what came is no part of one."
    page.wait("return document.querySelectorAll('.cursor').length === 0")


def test_a_request_that_is_chosen_while_an_answer_arrives_is_shown(page: Browser, router: ScriptedRouter) -> None:
    router.timeline = lambda name: (200, timeline(name, "stop" if name.startswith("aaaa") else None))
    with blocked_chat(router):
        page.write("#prompt", "hi" + ENTER)
        page.wait(f"{TITLE}.startsWith('dashboar')")
        page.click("#requests .link")
        page.wait(f"{TITLE}.startsWith('aaaaaaaa · stop')")
        assert page.run("return document.getElementById('send').textContent") == "Stop"


def test_a_timeline_that_not_all_workers_were_asked_for_is_asked_for_again_and_one_that_is_gone_is_not(
    page: Browser, router: ScriptedRouter
) -> None:
    gone = threading.Event()
    late = {"error": {"message": "1 of 2 workers have answered."}}
    router.timeline = lambda name: (503, late)
    page.click("#requests .link")
    until(lambda: router.asked.count(REQUESTS + "aaaaaaaa1111") >= 2)
    assert page.run(STATUS) == "ready", "the router is well"
    router.timeline = lambda name: (404, late) if gone.is_set() else (200, timeline(name, None))
    page.wait(f"{TITLE}.startsWith('aaaaaaaa · live')")
    gone.set()
    looked(router)
    asked = router.asked.count(REQUESTS + "aaaaaaaa1111")
    looked(router, 3)
    assert router.asked.count(REQUESTS + "aaaaaaaa1111") <= asked + 1
    assert page.run(f"{TITLE}.startsWith('aaaaaaaa · live')"), "what is drawn stays"
    page.log()  # of what could not be loaded


def test_it_is_said_how_many_workers_are_in_the_numbers_and_of_which_there_is_a_rate(
    page: Browser, router: ScriptedRouter
) -> None:
    model = "return document.getElementById('model').textContent"
    router.state = lambda: (200, state(routers=["a", "b"], num_workers=3))
    page.wait(f"{model} === 'm, 2 of 3 workers have answered'")
    router.state = lambda: (200, state(routers=["a", "b", "c"], num_workers=3))
    page.wait(f"{model} === 'm, 3 workers'")
    one, both, anew = ["a"], ["a", "b"], ["a", "c"]  # whose pids may be the same in containers
    looks = [
        *(
            state(1, 100, routers=both),
            state(2, 110, routers=both),
            state(3, 60, routers=one),
            state(4, 65, routers=one),
        ),
        *(
            state(5, 130, routers=both),
            state(6, 140, routers=both),
            state(7, 150, routers=anew),
            state(8, 160, routers=anew),
        ),
    ]
    assert [rate for _, rate, _ in page.run(FIGURES, looks)] == ["–", "10", "–", "5.0", "–", "10", "–", "10"]


def test_where_several_routers_answer_in_turn_that_is_said_and_what_one_has_not_is_asked_for_again(
    page: Browser, router: ScriptedRouter
) -> None:
    """One that was started anew never comes again, and gone for good is what it does not have."""
    notice = "return document.getElementById('notice').textContent"
    path = REQUESTS + "aaaaaaaa1111"
    router.timeline = lambda name: (404, {"error": {"message": "There is no timeline."}})
    router.state = lambda: (200, state(routers=["b"]))
    looked(router)
    page.click("#requests .link")
    looked(router, 3)
    assert router.asked.count(path) == 1 and page.run(notice) == ""
    turns = itertools.cycle(("a", "b"))
    router.state = lambda: (200, state(routers=[next(turns)], num_workers=2))
    looked(router, 4)
    assert page.run(notice) == "", "one router's workers are late in turn"
    router.state = lambda: (200, state(routers=[next(turns)]))
    page.wait(f"{notice}.startsWith('Several routers answer here in turn')")
    looked(router, 3)
    assert router.asked.count(path) >= 3
    router.timeline = lambda name: (200, timeline(name))
    page.wait(f"{TITLE}.startsWith('aaaaaaaa · stop')")
    page.log()  # of what could not be loaded


def test_a_point_of_a_figures_line_is_of_about_a_second_and_behind_a_gap_it_begins_anew(page: Browser) -> None:
    looks = [
        *(state(1, 0), state(2, 10), state(2.13, 20, live=5), state(2.8, 20, live=3), state(3, 20)),
        *(state(5.5, 45), state(20, 4045), state(21, 4045), state(1, 4100, live=1), state(2, 4110, live=1)),
    ]
    assert page.run(FIGURES, looks) == [
        ["0", "–", "1"],
        ["0", "10", "2"],
        ["5", "10", "2"],
        ["3", "10", "2"],
        ["0", "10", "3"],
        ["0", "10", "4"],
        ["0", "–", "4+1"],
        ["0", "0", "4+2"],
        ["1", "–", "4+2+1"],
        ["1", "10", "4+2+2"],
    ]


def test_below_an_answer_that_was_stopped_stands_how_it_ended_though_the_router_hears_of_it_later(
    page: Browser, router: ScriptedRouter
) -> None:
    stopped_at: list[int] = []

    def told(name: str) -> Asked:
        is_over = bool(stopped_at) and router.asked.count(REQUESTS + name) > stopped_at[0] + 2
        return 200, timeline(name, "aborted" if is_over else None)

    router.timeline = told
    with blocked_chat(router):
        page.write("#prompt", "hi" + ENTER)
        page.wait("return document.querySelector('.answer .meta')?.textContent.includes('decode-0')")
        page.wait("return document.querySelector('.answer .kill')?.offsetParent")
        stopped_at.append(sum(path.startswith(REQUESTS) for path in router.asked))
        page.click("#send")
        page.wait("return document.querySelectorAll('.cursor').length === 0")
        page.wait("return document.querySelector('.answer .meta').textContent.endsWith('aborted')")
        page.wait("return !document.querySelector('.answer .kill')?.offsetParent")


def test_a_killed_node_whose_successor_does_not_come_can_be_asked_for_again(page: Browser) -> None:
    looks = [
        *((0, [node()], ""), (1, [node()], "kill"), (2, [], ""), (30, [], ""), (31.5, [], "")),
        *((40, [], "kill"), (41, [], "undo"), (50, [], "kill"), (55, [node(incarnation="2")], "")),
        *((60, [node(incarnation="2")], "kill"), (91, [node(incarnation="2")], "")),
    ]
    assert page.run(NODES, looks) == [
        *(["up, can be killed"], ["killed, waits"], ["killed, waits"], ["killed, waits"]),
        *(["did not come back, can be killed"], ["killed, waits"], ["did not come back, can be killed"]),
        *(["killed, waits"], ["up, can be killed"], ["killed, waits"], ["up, can be killed"]),
    ]


def test_a_node_that_is_never_dialed_does_not_seem_to_be(page: Browser) -> None:
    assert page.run(NODES, [(0, [node(session="dialing", left_out=True)], "")]) == [["left out (tokenizer), waits"]]


def test_a_button_that_is_pressed_twice_kills_once_and_why_a_node_was_not_killed_is_seen(
    page: Browser, router: ScriptedRouter
) -> None:
    go_on = threading.Event()

    def killed(name: str) -> Asked:
        go_on.wait(WAIT_S)
        return 200, {"killed": name}

    reason = "return document.getElementById('refused').offsetParent && document.getElementById('refused').textContent"
    pill = "return document.querySelector('.node .pill').textContent"
    router.kill = lambda name: (409, {"error": {"message": f"{name} is still starting."}})
    page.click(".node .kill")
    assert page.wait(reason) == "Kill decode-0: decode-0 is still starting."
    page.wait("return !document.querySelector('.node .kill').disabled")
    router.kill = killed
    page.run("const kill = document.querySelector('.node .kill'); kill.click(); kill.click()")
    assert not page.run(reason)
    page.wait(f"{pill} === 'killed'")
    go_on.set()
    looked(router)
    page.run("const kill = document.querySelector('.node .kill'); kill.disabled = false; kill.click()")
    looked(router)
    assert router.killed == ["decode-0"] * 2 and page.run(pill) == "killed"
    assert not page.run(reason)
    page.log()  # of what could not be loaded
