"""`python -m bench.prefix_report FILE.json > FILE.md`: what bench.prefix, .prefix_model or .block_index found, as text."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from bench.distribution import summarize
from bench.result_files import results_of

_Facts = Mapping[str, Any]

_OF_CLUSTERS: Final = (
    "Real clusters: a router, {prefill} prefill nodes of {num_blocks:,} blocks of 16 tokens, a decode node, all on this machine."
    " *chat*: {talks} conversations of {turns} turns behind one system prompt, {rate:g} turns a second. *trace*: the first"
    " {requests:,} requests of the trace, lengths divided by {scale}, times by {speed:g}. Requests are sent at given instants,"
    " whether or not answers keep up. Hit rate: of prompt tokens those that were not computed; recomputed: those that were"
    " though some node had computed them before. Rounds of each way: {rounds}, turn about; medians over them, and"
    " times to the first token of all their requests, in ms, with each percentile's least and most of a round."
    " + pool: the prefill nodes share a KV pool"
    " (a directory) and save what they compute."
)
_OF_MODEL: Final = (
    "Placement, index, news of caches, block pools and prefix caches are the product's; computing takes modelled time"
    " ({tokens_per_s:,.0f} tokens a second and node), all else none, so the figures do not depend on the machine. {nodes} nodes,"
    " blocks of 16 tokens. *chat*: {talks} conversations of {turns} turns behind one system prompt. *trace*: the first"
    " {requests:,} requests of the Mooncake paper's conversation trace (FAST'25), lengths divided by {scale}, sharing of prefixes"
    " as it was. *use*: the share of all nodes' time that computing every prompt from its beginning would take. *recomputed*: of"
    " all prompt tokens those that were computed though some node had computed them before. Times to the first token in ms."
    " `cache_aware 8192`: --cache-imbalance-tokens; `1/16`: so many of the blocks are in the index, as at its bound."
)
_OF_INDEX: Final = (
    "Nodes with a million blocks each, conversations of 128 blocks behind 64 that all of them share. *apart*: each conversation is"
    " on one node. *shared*: a quarter of a node's are on all nodes, half on about half of its group of 16, a quarter on it alone."
    " All of it is told to the index in messages of 4,096 blocks, then 2,000 prompts of 192 blocks are looked up. Times are of the"
    " process's own CPU, but for the time until all was told. Too short by: of the 192 blocks of a prompt that a node holds whole,"
    " how many the index does not count, where it has only a sample. Wrong: answers that name a node that does not hold"
    " what it is named for or, where nothing is left out, that lack one that does. Grown: the process's resident memory."
)


def markdown(facts: _Facts) -> str:
    """Of one of the three benchmarks' JSON: command, machine, a table."""
    if "runs" in facts:
        return _page(
            "Where prompts go, on real clusters", facts, _OF_CLUSTERS.format(**facts["settings"]), _runs(facts)
        )
    if "figures" in facts:
        title = "What placement by cache buys, in a model of prefill nodes"
        return _page(title, facts, _OF_MODEL.format(**facts["settings"]), _figures(facts))
    return _page("The router's index of nodes' caches", facts, _OF_INDEX, _cases(facts))


def _page(title: str, facts: _Facts, text: str, table: Iterable[str]) -> str:
    machine = ", ".join(f"{name} {value}" for name, value in facts.get("machine", {}).items())
    picture = ["![times to the first token](prefix.svg)", ""] if "runs" in facts else []
    when = f"{facts['date']}; {machine}." if machine else f"{facts['date']}."
    return "\n".join([f"# {title}", "", f"    {facts['command']}", "", when, "", text, "", *picture, *table]) + "\n"


def _table(headings: str, rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {headings} |", "|" + "---|" * (headings.count("|") + 1), *(f"| {' | '.join(row)} |" for row in rows)]


def _runs(facts: _Facts) -> list[str]:
    rows = []
    for load, way in dict.fromkeys((run["load"], run["way"]) for run in facts["runs"]):
        mine = [run for run in facts["runs"] if (run["load"], run["way"]) == (load, way)]
        again = statistics.median(run["recomputed"] / run["prompt_tokens"] for run in mine)
        row = [load, way, f"{statistics.median(run['hit_rate'] for run in mine):.1%}", f"{again:.1%}"]
        whole = summarize([each for run in mine for each in run["ttft_s"]])
        rounds = [summary for run in mine if (summary := summarize(run["ttft_s"])) is not None]
        for name in ("p50", "p90", "p99"):
            each = [1000 * float(getattr(summary, name)) for summary in rounds]
            extremes = f" ({min(each):.0f} to {max(each):.0f})" if len(each) > 1 else ""
            row.append(f"{1000 * getattr(whole, name):.0f}{extremes}")
        row.append(f"{1000 * max(run['lag_p99_s'] for run in mine):.0f}")
        rows.append([*row, str(sum(run["num_requests"] - run["num_ok"] for run in mine))])
    return _table("load | way | hit rate | recomputed | TTFT p50 | p90 | p99 | lag of the load, p99 | failed", rows)


def _figures(facts: _Facts) -> list[str]:
    rows = []
    for each in facts["figures"]:
        way = each["policy"]
        if each["imbalance"]:
            way += f" {each['imbalance']:,}" + (f", 1/{each['sample']}" if each.get("sample", 1) > 1 else "")
        times = [f"{1000 * each[f'ttft_{name}_s']:.0f}" for name in ("p50", "p90", "p99")]
        shares = [f"{each[name]:.1%}" for name in ("hit_rate", "recomputed")]
        rows.append([each["load"], f"{each['use']:.0f} %", f"{each['blocks']:,}", way, *shares, *times])
    return _table("load | use | blocks | way | hit rate | recomputed | p50 | p90 | p99", rows)


def _cases(facts: _Facts) -> list[str]:
    rows = []
    for each in facts["cases"]:
        rows.append(
            [
                f"{each['nodes']:,} {'shared' if each['are_shared'] else 'apart'}",
                f"{each['blocks'] / 1e6:,.0f} million",
                f"{each['keys'] / 1e6:,.1f} million",
                f"1/{1 / each['share']:.0f}" if each["share"] < 1 else "all",
                f"{each['mib']:,.0f} of {each['max_mib']:,} MiB",
                f"{each['resident_mib']:,.0f} MiB",
                f"{each['bytes_per_key']:.1f}",
                f"{each['stored_ns'] / 1000:.2f} µs",
                f"{each['load_s']:.0f} s",
                f"{each['event_us']:.1f} µs",
                f"{each['decision_us']:.0f} µs ({each['decision_p99_us']:.0f})",
                f"{each['short_by']:.1f}",
                str(each["wrong"]),
            ]
        )
    headings = (
        "nodes | blocks told | in the index | of all | memory | grown | bytes a key | a block told | all told in"
        " | a block in an event of 16 | a decision, median (p99) | too short by, of 192 | wrong"
    )
    return _table(headings, rows)


if __name__ == "__main__":
    about = "What a benchmark of prefix caches found, as text."
    [found] = results_of("bench.prefix_report", about, [("prefix", "prefix_model", "block_index")], sys.argv[1:])
    sys.stdout.write(markdown(found))
