"""The metrics of several workers as one text: each sample with a label that says whose it is. Pure.

Not added up: a gauge that every worker has for itself (a node's session, say) has no meaningful sum, and what has one is a
`sum by` away.
"""

from __future__ import annotations

from collections.abc import Mapping


def merged(texts: Mapping[int, str]) -> str:
    """Texts in Prometheus' format, by worker; a family's help and type stand once, before the samples of all workers."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for index in sorted(texts):
        family = ""
        for line in texts[index].splitlines():
            if line.startswith("# "):
                _, kind, family, *_ = line.split(" ", 3)
                known = heads.setdefault(family, [])
                if kind not in [each.split(" ", 2)[1] for each in known]:
                    known.append(line)
            elif line:
                samples.setdefault(family, []).append(_labelled(line, index))
    lines = [line for family in heads for line in (*heads[family], *samples.get(family, ()))]
    return "\n".join([*lines, *samples.get("", ())]) + "\n"


def _labelled(sample: str, index: int) -> str:
    name, brace, rest = sample.partition("{")
    if brace and " " not in name:
        return f'{name}{{worker="{index}",{rest}'
    name, _, value = sample.partition(" ")
    return f'{name}{{worker="{index}"}} {value}'
