"""Takes the pictures of docs/pictures: a cluster here, a headless browser, and a node killed in the middle of an answer.

python -m tests.dashboard.pictures [--model DIR]        `make pictures`

killed.png     what one sees: an answer arrives, its node is killed, the answer goes on; unmoved: just behind the kill
dashboard.png  the whole page behind it, dark
phone.png      the same on a phone, from the nodes on
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Final

import httpx
import numpy as np
from numpy.typing import NDArray
from PIL import Image, PngImagePlugin

from engine.make_model import make_model
from engine.model_sizes import SIZES
from tests.architecture.source_tree import ROOT
from tests.dashboard.browser import Browser, missing, opened_browser, save
from tests.e2e.cluster import Cluster, started_cluster

DEMO: Final = ROOT / "deploy" / "demo_model"
OUT: Final = ROOT / "docs" / "pictures"
FRAME_S: Final = 0.25
AFTER: Final = 10  # frames behind the answer's end
MOST_FRAMES: Final = 60
LAST_FRAME_MS: Final = 3000
MOST_BYTES: Final = 350_000
COLOURS: Final = 64
PROMPT: Final = "Tell me a story about a fox."
BEFORE: Final = (
    "What is Baton?",
    "What does a prefill node do?",
    "Tell me a story about a fox.",
    "What does a decode node do?",
)
NUM_BEFORE: Final = 18
SLOW_S: Final = 0.1
TO_NODES: Final = "scrollBy(0, document.querySelector('.area-nodes').getBoundingClientRect().top - 58)"
GOES_ON: Final = (
    "const mark = document.querySelector('.takeover'); const cursor = document.querySelector('.cursor');"
    "return Boolean(mark && cursor && mark.nextSibling.textContent.length > 40)"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Take them; 0, or 2 without a browser."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="directory; none: the demo model, else a random one")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(argv)
    if (problem := missing()) is not None:
        sys.stderr.write(f"pictures: {problem}\n")
        return 2
    with tempfile.TemporaryDirectory(prefix="pictures") as folder:
        model = options.model or _usual_model(Path(folder))
        flags = ("--decode", "2", "--threads", "1", "--num-blocks", "256")
        with started_cluster(model, Path(folder), *flags) as cluster, opened_browser() as browser:
            browser.resize(1180, 820)
            browser.prefer("light")
            browser.open(cluster.url + "/")
            browser.wait("return document.querySelectorAll('#nodes .pill.good').length === 3")
            browser.run(f"document.getElementById('max-tokens').value = {options.tokens}")
            _some_requests(cluster)
            with _slowed([node["pid"] for node in cluster.nodes if node["role"] == "decode"]):
                frames, told = _killed_in_the_middle(browser, options.prompt)
            browser.wait("return document.querySelectorAll('#nodes .pill.good').length === 3")
            _save_moving([*frames, browser.screenshot()], told, options.out / "killed.png")
            browser.prefer("dark")
            browser.resize(1280, 768)
            _save_still(browser.screenshot(), options.out / "dashboard.png")
            browser.prefer("light")
            browser.resize(390, 844, 2)
            browser.wait("return innerWidth === 390")
            browser.run(TO_NODES)
            _save_still(browser.screenshot(), options.out / "phone.png")
    return 0


def _some_requests(cluster: Cluster) -> None:
    """About one a second, so that figures, blocks and the list of requests have something to show."""
    with cluster.client() as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        for index in range(NUM_BEFORE):
            asked = [{"role": "user", "content": BEFORE[index % len(BEFORE)]}]
            answer = client.post("/v1/chat/completions", json={"model": model, "messages": asked, "max_tokens": 80})
            assert answer.status_code == httpx.codes.OK, answer.text
            time.sleep(1.0)


def _usual_model(folder: Path) -> Path:
    if (DEMO / "config.json").is_file():
        return DEMO
    make_model(SIZES["llama-tiny"], "fp32", 0, folder / "llama-tiny")
    return folder / "llama-tiny"


@contextmanager
def _slowed(pids: Sequence[int]) -> Iterator[None]:
    """The processes run for a tenth of the time: the demo model is too fast for a film."""
    is_over = threading.Event()

    def tell(number: signal.Signals) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def slow() -> None:
        while not is_over.wait(SLOW_S / 10):
            tell(signal.SIGSTOP)
            is_over.wait(SLOW_S)
            tell(signal.SIGCONT)

    slowing = threading.Thread(target=slow)
    slowing.start()
    try:
        yield
    finally:
        is_over.set()
        slowing.join()


def _killed_in_the_middle(browser: Browser, prompt: str) -> tuple[list[bytes], bytes]:
    """Screenshots from the question to a while after its answer, and the one that tells most: text behind the mark."""
    frames, told = [browser.screenshot()], None
    browser.write("#prompt", prompt)
    browser.click("#send-kill")
    num_after = 0
    while num_after < AFTER and len(frames) < MOST_FRAMES:
        begun = time.monotonic()
        frames.append(browser.screenshot())
        if told is None and browser.run(GOES_ON):
            told = browser.screenshot()
        num_after += browser.run("return document.getElementById('send').textContent === 'Send'")
        time.sleep(max(FRAME_S - (time.monotonic() - begun), 0))
    assert browser.run("return document.querySelectorAll('.takeover').length"), "nothing was killed in time"
    assert told is not None, "the answer was over before it was seen to go on"
    return frames, told


def _save_moving(shots: Sequence[bytes], still: bytes, path: Path) -> None:
    """An animated PNG of few colours: files of this project are small. Who cannot play it is shown `still`, which is not played.

    Of each frame only what has changed is there: the rest of it is of the colour that lets the one before be seen.
    """
    palette = Image.open(io.BytesIO(still)).convert("RGB").quantize(COLOURS - 1)
    hidden = COLOURS - 1
    colours = ((palette.getpalette() or [])[: 3 * hidden] + [0] * 3 * COLOURS)[: 3 * COLOURS]

    def indices(shot: bytes) -> NDArray[np.uint8]:
        whole = Image.open(io.BytesIO(shot)).convert("RGB")
        return np.asarray(whole.quantize(palette=palette, dither=Image.Dither.NONE))

    def picture(values: NDArray[np.uint8]) -> Image.Image:
        made = Image.fromarray(values)
        made.putpalette(colours)
        return made

    seen = [indices(shot) for shot in shots]
    changes = [np.where(one == other, hidden, other).astype(np.uint8) for one, other in pairwise(seen)]
    moving = {
        "save_all": True,
        "append_images": [picture(each) for each in (seen[0], *changes)],
        "duration": [int(1000 * FRAME_S)] * (len(shots) - 1) + [LAST_FRAME_MS],
        "loop": 0,
        "default_image": True,
        "transparency": hidden,
        "blend": PngImagePlugin.Blend.OP_OVER,
    }
    written = io.BytesIO()
    picture(indices(still)).save(written, "PNG", optimize=True, **moving)
    _write(written.getvalue(), path)


def _save_still(shot: bytes, path: Path) -> None:
    written = io.BytesIO()
    Image.open(io.BytesIO(shot)).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(
        written, "PNG", optimize=True
    )
    _write(written.getvalue(), path)


def _write(data: bytes, path: Path) -> None:
    assert len(data) <= MOST_BYTES, f"{path.name} would have {len(data)} bytes"
    save(data, path)
    sys.stdout.write(f"{path}: {len(data) // 1000} kB\n")


if __name__ == "__main__":
    sys.exit(main())
