"""Every pair of colours that the page puts on each other can be read: WCAG AA, in light and in dark."""

from __future__ import annotations

from typing import Final

import pytest
from PIL import Image

from tests.architecture.source_tree import ROOT
from tests.dashboard.contrast import colours, contrast

TEXT: Final = 4.5
SHAPE: Final = 3.0  # edges of what can be pressed, bars that mean something
PAIRS: Final = [
    *[(ink, ground, TEXT) for ink in ("text", "muted", "accent", "bad") for ground in ("bg", "surface", "sunken")],
    *[(tone, f"{tone}-soft", TEXT) for tone in ("good", "warn", "bad", "accent")],
    *[("text", f"{tone}-soft", TEXT) for tone in ("bad", "accent")],
    *[("muted", f"{tone}-soft", TEXT) for tone in ("bad", "accent")],
    ("on-accent", "accent-fill", TEXT),
    *[("on-dark-bar", bar, TEXT) for bar in ("prefill", "decode", "quarantined")],
    ("on-light-bar", "wire", TEXT),
    *[("text", bar, TEXT) for bar in ("cached", "wait")],
    *[("edge", ground, SHAPE) for ground in ("surface", "sunken", "bg")],
    *[(bar, "surface", SHAPE) for bar in ("used", "quarantined", "prefill", "decode")],
    *[("used", other, 1.5) for other in ("cached", "free")],  # beside each other, with numbers under them
]


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_what_stands_on_something_can_be_told_from_it(theme: int) -> None:
    known = colours()[theme]
    poor = {
        f"{ink} on {ground}": round(ratio, 2)
        for ink, ground, least in PAIRS
        if (ratio := contrast(known[ink], known[ground])) < least
    }
    assert not poor


def test_contrast_is_what_the_standard_says() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


def test_who_is_shown_only_the_first_picture_of_the_readme_sees_the_mark_in_the_answer() -> None:
    with Image.open(ROOT / "docs" / "pictures" / "killed.png") as picture:
        assert picture.info["default_image"], "it is not played"
        ground = tuple(bytes.fromhex(colours()[0]["bad-soft"][1:]))
        shots = []
        for frame in (0, 1):
            picture.seek(frame)
            shots.append(picture.convert("RGB").getcolors(1 << 20) or [])
    near = [sum(number for number, colour in shot if _is_near(colour, ground)) for shot in shots]
    assert near[0] > 1000 > near[1]


def _is_near(colour: object, ground: tuple[int, ...]) -> bool:
    assert isinstance(colour, tuple)
    return all(abs(one - other) < 6 for one, other in zip(colour, ground, strict=True))
