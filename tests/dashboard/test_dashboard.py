"""What a person sees first, in headless Chromium on a real cluster: nodes, an answer that survives its node, and its picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.dashboard.browser import Browser, missing, opened_browser
from tests.e2e.cluster import Cluster, Watch, started_cluster

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

PROMPT: Final = "Tell me a long story about a relay race."
LONG: Final = 2400  # tokens: enough that its node dies in the middle, though somebody on the way stands still
ENTER: Final = "\ue007"
HOSTILE: Final = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
IDLE: Final = "return document.getElementById('send').textContent === 'Send'"
ANSWER: Final = "return document.querySelector('.message.answer:last-child .answer-text')"

# What stands there when the button says that the answer is whole, though no frame has been drawn since it began.
WHOLE_AT_LAST: Final = """
window.requestAnimationFrame = () => 0;
const send = document.getElementById("send");
new MutationObserver(() => {
  if (send.textContent === "Send") window.atLast = document.querySelector(".answer:last-child .answer-text").textContent;
}).observe(send, { childList: true, characterData: true, subtree: true });
"""

SHOWN_NODES: Final = """return (async () => {
  const { Nodes } = await import("/dashboard/page/nodes.js");
  const blocks = { used: 0, leased: 0, quarantined: 0, cached: 0, free: 1 };
  const node = (name, incarnation, session) => ({ name, incarnation, session, role: "decode", circuit: "closed", blocks });
  const list = document.getElementById("nodes");
  list.replaceChildren();
  const nodes = new Nodes(() => {});
  const seen = (...given) => {
    nodes.show(given, true);
    const ids = [...nodes.cards].map(([id, card]) => [card.root, id]);
    return [...list.children].map((each) => `${new Map(ids).get(each)} ${each.querySelector(".pill").textContent}`);
  };
  const [a, b, c] = ["a", "b", "c"].map((name) => node(name, 1, "up"));
  const looks = [seen(a, b, c)];
  nodes.waitFor("b");
  looks.push(seen(a, c), seen(a, node("b", 1, "lost"), node("b", 2, "up"), c), seen(a, c));
  return looks;
})()"""


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two decode nodes, so that an answer has somewhere to go on."""
    name = f"tiny {HOSTILE[:28]}"  # what an operator calls a model is shown as it is
    folder = tmp_path_factory.mktemp("dashboard")
    (folder / "baton.toml").write_text(f"[router]\nserved_model_name = {name!r}\n")
    flags = ("--decode", "2", "--threads", "1", "--config", str(folder / "baton.toml"))
    with started_cluster(tiny_model, folder, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    """One for all tests of this file: starting it takes longer than they do."""
    with opened_browser() as opened:
        yield opened


@pytest.fixture
def browser(window: Browser, cluster: Cluster) -> Iterator[Browser]:
    """The page, freshly loaded; at the end it has complained of nothing."""
    window.resize(1280, 900)
    window.prefer("light")
    window.open(cluster.url + "/")
    window.wait("return document.querySelectorAll('#nodes .pill.good').length === 3")
    window.log()
    yield window
    assert window.run("return document.title") == "Baton"
    assert not window.log()


def node_of(cluster: Cluster, name: str) -> dict[str, Any]:
    with cluster.client() as client:
        nodes = client.get("/state").json()["nodes"]
    return next(node for node in nodes if node["name"] == name and node["session"] != "lost")


@pytest.mark.covers("O03", "R09")
def test_a_node_killed_by_the_button_costs_an_answer_nothing_and_is_replaced(
    browser: Browser, cluster: Cluster
) -> None:
    with cluster.client() as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": LONG, "temperature": 0}
        undisturbed = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    watch = Watch(cluster.pids)
    try:
        browser.run(f"document.getElementById('max-tokens').value = {LONG}")
        browser.write("#prompt", PROMPT)
        browser.click("#send-kill")
        takeover = browser.wait("return document.querySelector('.takeover')?.textContent")
        killed = takeover.split()[0]
        assert takeover == f"{killed} lost, goes on at decode-{1 - int(killed[-1])}"
        before = next(node["pid"] for node in cluster.nodes if node["node_id"] == killed)
        watch.wait_for_end([before])
        browser.wait(IDLE)
        text = browser.run(f"const mark = document.querySelector('.takeover'); mark.remove(); {ANSWER}.textContent")
    finally:
        watch.close()
    assert text == undisturbed and len(text) > 100
    browser.wait(
        "return [...document.querySelectorAll('#timeline-of')].some(e => e.textContent.includes('2 attempts'))"
    )
    assert browser.run("return document.querySelectorAll('#picture .mark-failed').length") >= 2
    headings = browser.run("return [...document.querySelectorAll('#picture h4')].map(e => e.textContent)")
    assert headings[0] == "To the second token" and headings[1].startswith("The retry") and len(headings) == 3
    lanes = browser.run(
        "return [...document.querySelectorAll('#picture figure:last-child .lane-name')].map(e => e.textContent)"
    )
    assert lanes[0] == "router" and {killed, "wire", f"decode-{1 - int(killed[-1])}"} <= set(lanes)
    assert "NODE_LOST" in browser.run("return document.getElementById('attempts').innerText")
    browser.wait("return document.querySelectorAll('#nodes .pill.good').length === 3")
    assert browser.run("return document.querySelectorAll('#nodes .kill:not([disabled])').length") == 3
    assert node_of(cluster, killed)["session"] == "up"


def test_an_answer_is_all_there_when_the_button_says_that_it_is_done(browser: Browser, cluster: Cluster) -> None:
    with cluster.client() as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, "temperature": 0}
        expected = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    browser.run(WHOLE_AT_LAST)
    browser.run("document.getElementById('max-tokens').value = 8")
    browser.write("#prompt", PROMPT + ENTER)
    assert browser.wait("return window.atLast") == expected


def test_a_killed_node_keeps_its_place_until_its_successor_is_there_and_others_that_go_are_gone(
    browser: Browser,
) -> None:
    """By the page's own module, with nodes that this test makes up; all in one go, or the page would draw its own between."""
    shown = browser.run(SHOWN_NODES)
    assert [" ".join(each.replace(" up", "") for each in look) for look in shown] == [
        "a@1 b@1 c@1",
        "a@1 b@1 killed c@1",
        "a@1 b@2 c@1",
        "a@1 c@1",
    ]


@pytest.mark.covers("X05")
def test_what_strangers_write_is_text_wherever_it_is_shown(browser: Browser, cluster: Cluster) -> None:
    browser.run("document.getElementById('max-tokens').value = 4")
    browser.write("#prompt", HOSTILE + ENTER)
    browser.wait("return document.querySelector('.question p')")
    browser.wait(IDLE)
    assert browser.run("return document.querySelector('.question p').textContent") == HOSTILE
    assert HOSTILE[:28] in browser.run("return document.getElementById('model').textContent")
    assert browser.run("return document.querySelectorAll('main img, main script').length") == 0
    with pytest.raises(AssertionError, match="TrustedHTML"):
        browser.run("document.getElementById('model').innerHTML = '<b>x</b>'")
    browser.log()  # which that was an error in


def test_whose_a_request_is_can_be_told_from_the_list(browser: Browser, cluster: Cluster) -> None:
    with cluster.client() as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": "hi", "max_tokens": 1, "request_id": "mine"}
        assert client.post("/v1/completions", json=body).status_code == 200
        assert client.get("/ready?deep=1").status_code == 200
    browser.wait("return [...document.querySelectorAll('.request-name')].some(e => e.textContent === 'mine')")
    browser.wait("return [...document.querySelectorAll('.request-name')].some(e => e.textContent === 'canary')")
    browser.resize(390, 844, 2)
    browser.wait("return innerWidth === 390 && document.documentElement.scrollWidth <= 390")


def test_it_fits_a_phone_and_is_light_or_dark_as_one_likes(browser: Browser, cluster: Cluster) -> None:
    background = "return getComputedStyle(document.body).backgroundColor"
    browser.resize(390, 844, 2)
    browser.wait("return innerWidth === 390 && document.documentElement.scrollWidth <= 390")
    light = browser.run(background)
    browser.prefer("dark")
    dark = browser.run(background)
    assert light != dark
    browser.click("#theme button[data-theme='light']")
    assert browser.run(background) == light
    browser.block("*/dashboard.js")  # as while it is on its way
    browser.open(cluster.url + "/")
    assert browser.run(background) == light, "it is remembered, and nothing is drawn in other colours first"
    browser.block()
    browser.log()  # which that was an error in
    browser.open(cluster.url + "/")
    browser.wait("return document.querySelectorAll('#theme button').length === 3")
    browser.click("#theme button[data-theme='auto']")
    assert browser.run(background) == dark


def test_a_screen_reader_and_a_keyboard_get_everywhere(browser: Browser) -> None:
    for selector, role, name in (
        ("#send", "button", "Send"),
        ("#prompt", "textbox", "Message"),
        ("#theme button", "button", "auto"),
        (".area-nodes", "region", "Nodes"),
        (".blocks", "image", "KV blocks: "),
        (".node .kill", "button", "Kill "),
        (".spark", "image", "In flight"),
    ):
        heard = browser.label(selector)
        assert (heard[0].replace("img", "image"), heard[1][: len(name)]) == (role, name)
    unnamed = browser.run(
        "return [...document.querySelectorAll('button, input, textarea')].filter(e => e.offsetParent && "
        "!(e.ariaLabel || e.textContent.trim() || e.labels?.length)).map(e => e.outerHTML)"
    )
    assert not unnamed
    assert browser.run("return document.querySelectorAll('[tabindex]:not([tabindex=\"0\"]):not(main)').length") == 0
    browser.write("#prompt", "hi" + ENTER)
    browser.wait("return document.querySelector('#requests tr:first-child .link')?.ariaPressed === 'true'")
    browser.wait(IDLE)
    browser.run("document.querySelector('#requests tr:last-child .link').focus()")
    browser.write("#requests tr:last-child .link", ENTER)
    browser.wait("return document.querySelector('#requests tr:last-child .link').ariaPressed === 'true'")
    browser.wait("return document.getElementById('timeline-of').textContent.length > 0")
    assert browser.label("#log") == ("log", "Conversation")
    assert browser.label("#picture .panel")[0] in ("image", "img")


@pytest.mark.covers("X02")
def test_a_router_that_wants_a_key_is_given_one_and_one_that_is_gone_is_said_to_be(
    window: Browser, tiny_model: Path, tmp_path: Path
) -> None:
    key = "sk-of-the-test-0123456789"
    (tmp_path / "keys").write_text(key + "\n")
    (tmp_path / "keys").chmod(0o600)
    flags = ("--prefill", "0", "--decode", "0", "--mixed", "1", "--api-keys", str(tmp_path / "keys"))
    with started_cluster(tiny_model, tmp_path, *flags) as cluster:
        assert httpx.get(cluster.url + "/dashboard/state", trust_env=False).status_code == 401
        window.open(cluster.url + "/")
        window.wait("return document.activeElement.id === 'key'")
        window.write("#key", "sk-of-nobody-0123456789" + ENTER)
        window.wait("return document.getElementById('key-problem').textContent.includes('not known')")
        window.write("#key", key + ENTER)
        window.wait("return document.querySelectorAll('#nodes .pill.good').length === 1")
        assert window.run(
            "return document.getElementById('keys').hidden && !document.querySelector('.kill:not([hidden])')"
        )
        assert key not in str(window.run("return [document.cookie, Object.values(localStorage)]"))
    window.wait("return document.getElementById('notice').textContent.startsWith('The router does not answer')")
    window.log()  # of what could not be loaded
