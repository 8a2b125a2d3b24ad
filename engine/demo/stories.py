"""Short stories out of a grammar: who, where, what is lost, who helps, how it ends."""

from __future__ import annotations

from random import Random
from typing import Final

HEROES: Final = "fox bear rabbit mouse owl hedgehog frog duck cat dog goose badger".split()
_NAMES: Final = "Ada Ben Cleo Dina Emil Fay Gus Hana Ivo Jule Karl Lena Milo Nora Otto Pia".split()
_TRAITS: Final = "curious brave quiet clever gentle proud hungry sleepy".split()
_PLACES: Final = "in a wide forest|by a slow river|on a green hill|near an old mill|at the edge of a village".split("|")
_LOST: Final = "a red ball|a small lamp|a warm scarf|a silver bell|the key of the house|a basket of apples".split("|")
_SEARCHED: Final = "under every stone|behind the mill|along the river|between the roots|in the tall grass".split("|")
_MORALS: Final = (
    "From that day on they were friends.",
    "And they shared it ever after.",
    "That evening they drank tea together.",
    "Since then nobody there searches alone.",
)


def story(rng: Random, hero: str | None = None) -> str:
    """About five sentences; `hero` is an animal of HEROES, drawn where none is named."""
    first, second = (
        rng.sample(HEROES, 2) if hero is None else (hero, rng.choice([each for each in HEROES if each != hero]))
    )
    name, friend = rng.sample(_NAMES, 2)
    lost = rng.choice(_LOST)
    it = lost.split(" ", 1)[1]
    return (
        f"Once upon a time there was a {rng.choice(_TRAITS)} {first} named {name} who lived {rng.choice(_PLACES)}. "
        f"One {rng.choice(('morning', 'evening', 'windy day', 'winter day'))} {name} lost {lost}. "
        f"{name} looked {rng.choice(_SEARCHED)}, but the {it} was not there. "
        f'Then came a {rng.choice(_TRAITS)} {second} named {friend} and said: "I will help you." '
        f"Together they found the {it} {rng.choice(_SEARCHED)}. {rng.choice(_MORALS)}"
    )


def request(rng: Random) -> tuple[str, str]:
    """Somebody asks for one, and gets one."""
    hero = rng.choice(HEROES)
    ask = rng.choice(
        ("Tell me a story about a {}.", "Tell me a short story about a {}.", "A story about a {}, please.")
    )
    return ask.format(hero), story(rng, hero)
