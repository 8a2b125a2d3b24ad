"""`python -m bench.page RESULT.json …`: writes the page of a benchmark's result beside it, each figure and verdict from the JSON.

Knows the results of bench.transport, exposed, interference, crossover, grammar_step, start, int8, peers, variants,
sampler and kernels. Pure but for the files.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.machine import in_words
from bench.peers_report import markdown
from bench.result_files import bench_of, parse_result

Result = Mapping[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """0; 2 for what is no result that has a page."""
    parser = argparse.ArgumentParser(
        "python -m bench.page", description="Writes the page of a benchmark's result beside it."
    )
    known = ", ".join(f"bench.{each}" for each in PAGES)
    parser.add_argument(
        "results", type=Path, nargs="+", metavar="RESULT.json", help=f"what one of these has written: {known}"
    )
    for path in parser.parse_args(argv).results:
        try:
            written = write_page(path)
        except (OSError, ValueError) as error:
            sys.stderr.write(f"python -m bench.page: {path}: {error}\n")
            return 2
        sys.stdout.write(f"written: {written}\n")
    return 0


def write_page(path: Path) -> Path:
    """Write the page of a result's file beside it; ValueError for one that has none, OSError."""
    text = page(parse_result(path.read_text(encoding="utf-8"), path, "bench.page"))
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    return path.with_suffix(".md")


def page(result: Result) -> str:
    """The page of a result; ValueError for one that has none."""
    if (name := bench_of(result)) not in PAGES:
        raise ValueError(f"a result of {name or 'nothing known'}, of which there is no page")
    title, write = PAGES[name]
    machine = result["machine"]
    where = in_words(machine)
    head = [
        f"# {title}",
        "",
        f"`{result['command']}`, {result['date'][:10]}, {where}. All figures: the JSON beside.",
        "",
    ]
    return "\n".join([*head, *write(result)]) + "\n"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *(f"| {' | '.join(row)} |" for row in rows)]


def _mib(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes % (1 << 20) == 0 else f"{num_bytes >> 10} KiB"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"


def transport_target(result: Result, case: Result, way: Result) -> float | None:
    """What is asked of a way at this size, if anything is."""
    if case["transfer_bytes"] < result["target_from_bytes"]:
        return None
    asked: float | None = result["targets"].get(way["way"])
    return asked


def _transport(result: Result) -> Iterator[str]:
    yield "Median over rounds; ratios are taken within a round (in brackets where eight of ten lie), CPU is of both processes."
    yield ""
    rows = []
    verdicts: dict[str, list[str]] = {}
    for case in result["cases"]:
        size = f"{_mib(case['block_bytes'])}, {_mib(case['transfer_bytes'])}"
        for way in case["ways"]:
            ratio, target = way["ratio"], transport_target(result, case, way)
            shown = verdict = ""
            if ratio is not None:
                shown = f"{ratio['p50']:.2f} of {way['baseline']} ({ratio['p10']:.2f}–{ratio['p90']:.2f})"
                if target is not None:
                    verdict = f"≥ {target:.2f} {'met' if ratio['p50'] >= target else 'missed'}"
                    verdicts.setdefault(way["way"], []).append(f"{ratio['p50']:.2f} at {size}")
            cpu = f"{way['cpu_s_per_gb']['p50']:.3f}"
            rows.append((size, way["way"], f"{way['gb_per_s']['p50']:.1f}", shown, verdict, cpu))
    yield from _table(("blocks, transfer", "way", "GB/s", "ratio", "target", "CPU s/GB"), rows)
    yield ""
    for way, said in verdicts.items():
        yield f"- `{way}`, of which {result['targets'][way]:.2f} is asked: {'; '.join(said)}."
    yield ""
    yield (
        "`tcp`: the receiver says a byte when it has all. `memcpy`: within one process, nobody is asked, nobody says so. "
        "`asked memcpy` is that copy by another process, from the sender's memory, asked for by a byte over a unix "
        "socket and answered by one: what `tcp` is to `zmq`, and the most that two processes can have with such a copy; shm's and "
        "zmq's own are compiled and write past the caches. "
        "`libzmq` is the library with nothing copied by us and nothing put in place, `NIXL` one request for all blocks between "
        "the same processes, `Mooncake` its transfer engine over TCP between two processes of its own; `+checksum` is how nodes "
        "run unless told otherwise."
    )


def _exposed(result: Result) -> Iterator[str]:
    yield "Behind the last chunk: the wait for the lease, the last blocks and the Commit on their way, and its admission."
    yield ""
    rows = []
    for each in sorted(result["figures"], key=lambda each: (each["transport"], each["prompt_tokens"])):
        is_asked = each["prompt_tokens"] >= 1024
        verdict = (
            f"≤ {result['target']:.0%} {'met' if each['share'] <= result['target'] else 'missed'}" if is_asked else ""
        )
        share = f"{each['share']:.2%} ({each['share_p90']:.2%})"
        times = (_ms(each["prefill_s"]), _ms(each["exposed_s"]))
        rows.append((each["transport"], str(each["prompt_tokens"]), share, verdict, *times))
    heads = ("transport", "prompt", "share of prefill (p90)", "target", "prefill, ms", "exposed, ms")
    yield from _table(heads, rows)


def _interference(result: Result) -> Iterator[str]:
    rows = []
    for each in result["sides"]:
        times = [_ms(each[name]) for name in ("quiet_p50", "quiet_p99", "loud_p50", "loud_p99", "loud_max")]
        rows.append((each["side"], *times, f"{each['own_ratio']:.2f}", f"{1000 * each['first_token_p50']:.0f}"))
    yield "Milliseconds between two tokens of a stream, as its client gets them."
    yield ""
    heads = (
        "",
        "quiet p50",
        "p99",
        "beside long prompts p50",
        "p99",
        "worst",
        "p99 ÷ quiet p99",
        "prompt's first token",
    )
    yield from _table(heads, rows)
    yield ""
    for each in result["sides"]:
        if each["ratio"] is None:
            continue
        said = f"p99 beside long prompts, apart ÷ {each['side']}: **{each['ratio']:.2f}**"
        if each["side"] == "mixed":
            said += f" (asked: ≤ {result['target']:.2f}, {'met' if each['ratio'] <= result['target'] else 'missed'})"
        yield f"- {said}."


def _crossover(result: Result) -> Iterator[str]:
    names = {
        "ttft": "first token",
        "tpot": "time per token",
        "gap_p99": "p99 between tokens",
        "seconds": "whole request",
    }
    yield "apart ÷ mixed on the same cores, and milliseconds of both; **bold: apart loses**."
    yield ""
    rows = []
    for cell in result["cells"]:
        shown = []
        for name in names:
            mark = "**" if cell["ratios"][name] > 1 else ""
            both = " ÷ ".join(_ms(cell["by_side"][side][name]) for side in ("apart", "mixed"))
            shown.append(f"{mark}{cell['ratios'][name]:.2f}{mark} ({both})")
        rows.append((str(cell["prompt_tokens"]), str(cell["load"]), *shown))
    yield from _table(("prompt", "under way", *names.values()), rows)
    yield ""
    yield "Where prefill and decode apart lose, by these figures:"
    yield ""
    for name, said in names.items():
        lost = [f"{cell['prompt_tokens']}/{cell['load']}" for cell in result["cells"] if cell["ratios"][name] > 1]
        share = f"{len(lost)} of {len(result['cells'])}"
        won = [
            f"{load} under way {'at no length' if at is None else f'from {at} tokens'}"
            for load, at in result["crossovers"][name].items()
        ]
        where = f"in {share} (prompt/under way: {', '.join(lost) or 'none'})"
        yield f"- *{said}*: {where}. Ahead from some length on: {'; '.join(won)}."
    yield ""
    yield (
        "Who has such a load runs mixed nodes (`baton up --prefill 0 --decode 0 --mixed 1`), or leaves short prompts to decode "
        "nodes (`--local-prefill-max-tokens`). Here every prompt was handed over, however short."
    )


def _grammar_step(result: Result) -> Iterator[str]:
    ways = {"free": "nothing", "one": "one schema, all of them", "each": "a schema each"}
    rows = []
    for each in result["cases"]:
        cells = (_ms(each["step_s"]), f"{each['ratio']:.2f}", f"{1e6 * each['beside_s']:.0f}")
        rows.append((str(each["batch"]), ways[each["way"]], *cells))
    model = Path(result["settings"]["model"]).name
    yield (
        f"`{model}`, {result['settings']['threads']} compute thread(s). Ratio: to the same rows bound by nothing, median over "
        "rounds; beside: what the processes of grammars compute for a row, on other cores where there are any."
    )
    yield ""
    yield from _table(("rows", "bound by", "ms of a step", "ratio", "beside, µs a row"), rows)


def _variants(result: Result) -> Iterator[str]:
    settings, cases = result["settings"], result["cases"]
    first, *others = cases[0]["step_s"]
    weights = ", weights in 8 bits" if settings["weight_dtype"] == "int8" else ""
    yield (
        f"`{settings['shape']}`, {result['dtype']}{weights}, {settings['threads']} compute thread(s), by turns; milliseconds of a "
        f"step, medians over rounds. A node takes `{first}` here; ratios are to it, in the same round."
    )
    yield ""
    heads = ("step", first, *(head for other in others for head in (other, "ratio")))
    rows = []
    for each in cases:
        cells = [cell for other in others for cell in (_ms(each["step_s"][other]), f"{each['ratio'][other]:.2f}")]
        rows.append((each["case"], _ms(each["step_s"][first]), *cells))
    yield from _table(heads, rows)


def _peers(result: Result) -> Iterator[str]:
    settings = result["settings"]
    weights = "bf16" if settings["weights"] == "bf16" else "in 8 bits, of Baton and llama.cpp (`q8_0`)"
    yield (
        f"`{Path(settings['model']).name}`, weights {weights}; {settings['threads']} compute threads of each, one server after "
        f"the other, the rest stopped. `decode 8 x 128`: {settings['output_tokens']} tokens each of 8 streams at once behind "
        "prompts of 128 tokens; `prefill 512`: one prompt of 512 tokens. Tokens a second: the median of "
        f"{_rounds(result)}, in brackets the least and the most; last the median of the rounds' own ratios."
    )
    yield ""
    yield markdown(result["tokens_per_s"])


def _rounds(result: Result) -> str:
    wanted = result["settings"]["rounds"]
    if not result.get("interrupted"):
        return f"{wanted} rounds"
    done = [len(rates) for by_peer in result["tokens_per_s"].values() for rates in by_peer.values()]
    return f"{min(done)} to {max(done)} rounds of {wanted} (the run was interrupted)"


def _start(result: Result) -> Iterator[str]:
    verdict = "met" if result["ready_s"] <= result["target_s"] else "missed"
    yield (
        f"`baton up` with a prefill and a decode node: ready after {result['ready_s']:.2f} s "
        f"({result['target_s']:.0f} s asked for, {verdict}), {result['ratio']:.2f} times what a process takes to import torch, "
        "which a node needs; the first token of a request sent at once is there after "
        f"{result['token_s']:.2f} s. Medians; a ratio is its round's own."
    )
    yield ""
    rows = []
    for number, each in enumerate(result["rounds"]):
        times = (f"{each[name]:.2f}" for name in ("import_s", "ready_s", "token_s"))
        rows.append((str(number + 1), *times, f"{each['ready_s'] / each['import_s']:.2f}"))
    yield from _table(("round", "import torch, s", "ready, s", "first token, s", "ready ÷ import"), rows)


def _sampler(result: Result) -> Iterator[str]:
    settings = result["settings"]
    yield (
        f"{settings['rows']} rows of {settings['vocab']} tokens at once, threads: {settings['threads']}; times are of a row, "
        "ratios medians over rounds. `plain`: at a temperature, and nothing else asked for. `transformers`: its processors and "
        "warpers, softmax and `torch.multinomial`, on the same rows."
    )
    yield ""
    rows = [
        (
            each["asked"],
            f"{1e6 * each['row_s']:.0f}",
            f"{each['ratio_to_plain']:.2f}",
            f"{1e6 * each['peer_row_s']:.0f}",
            f"{each['ratio_to_peer']:.2f}",
        )
        for each in result["ways"]
    ]
    yield from _table(("asked for", "µs a row", "÷ plain", "transformers, µs", "÷ transformers"), rows)


def _int8(result: Result) -> Iterator[str]:
    settings = result["settings"]
    said = f"what it says itself at temperature 1, {settings['sequences']} times {settings['length']} tokens"
    source = f"`{settings['text']}`" if settings["text"] else said
    name = Path(settings["model"]).name
    yield f"`{name}` on {source}; `int8`: bf16, the weights of all linears in 8 bits (`--weight-dtype int8`)."
    yield ""
    rows = []
    for each in result["losses"]:
        cells = (f"{each['perplexity']:.4f}", f"{each['top1_share']:.1%}", f"{each['kl_nats']:.1e}")
        rows.append((each["way"], *cells))
    yield from _table(("against fp32", "perplexity", "likeliest token equal", "KL, nats"), rows)
    if not result["exams"]:
        return
    yield ""
    said = f"{settings['exams']} of each kind, answered without one wrong token:"
    yield f"Held-out questions (`docs/demo_model.md`), {said}"
    yield ""
    ways = [each["way"] for each in result["losses"]]
    yield from _table(
        ("", *ways), ((name, *(f"{right[way]:.1%}" for way in ways)) for name, right in result["exams"].items())
    )


def _kernels(result: Result) -> Iterator[str]:
    on_gpu = result["settings"]["device"] == "cuda"
    versions = f"torch {result['torch']}" + (f", Triton {result['triton']}" if on_gpu else "")
    graphs = (
        "Microseconds of a call within a CUDA graph, of calls over so many copies of the weights or the KV (last column) "
        "that no cache holds one until its next turn"
        if on_gpu
        else "Microseconds of a call"
    )
    rates = (result["bytes_per_s"] / 1e9, result["operations_per_s"] / 1e12)
    yield (
        f"{result['device']}, {versions}, {result['settings']['dtype']}, kernels `{result['kernels']}`. {graphs}; both sides in "
        f"turns, medians of {result['settings']['rounds']} rounds, ÷ torch of the rounds' own ratios: **bold where torch is "
        f"faster**. The limit is max(bytes / R, operations / F), R {rates[0]:.0f} GB/s (torch's sum over 1 GiB: read, so what "
        f"writes as much as it reads stays away from it), F {rates[1]:.1f} T operations/s (torch's product of two large squares)."
    )
    yield ""
    rows = []
    for each in result["cases"]:
        times = [f"{1e6 * each[name]:.1f}" for name in ("ours_s", "torch_s", "limit_s")]
        mark = "**" if each["ours_by_torch"] > 1 else ""
        ratios = (f"{mark}{each['ours_by_torch']:.2f}{mark}", f"{each['ours_by_limit']:.2f}")
        rows.append((each["case"], *times, each["limit_is"], *ratios, each["torch_way"], str(each["copies"])))
    heads = ("case", "ours", "torch", "limit", "by", "÷ torch", "÷ limit", "torch's way", "copies")
    yield from _table(heads, rows)
    yield ""
    yield (
        "`decode S x P`: one row of each of S sequences behind P positions; `chunk R of P`: the last R rows of one sequence; 32 "
        "query and 8 KV heads of 128 numbers unless told, blocks of 16 positions. Torch: scaled_dot_product_attention over "
        "KV that lies together, by the kernel that it chooses. `linear` and `gated`: rows x depth x width; gated by torch are "
        "three kernels (linear over both weights, silu, a product), ours is one. `gather`: `index_select`."
        if on_gpu
        else "`decode S x P`: one row of each of S sequences behind P positions; `chunk R of P`: the last R rows of one sequence. "
        "Torch: scaled_dot_product_attention over KV that lies together. `linear`: rows x depth x width."
    )
    if result["broken"]:
        yield ""
        yield from (f"- Not measured: {said}." for said in result["broken"])


PAGES: Final[Mapping[str, tuple[str, Callable[[Result], Iterator[str]]]]] = {
    "transport": ("Transports: how fast blocks get from node to node", _transport),
    "exposed": ("What of a handoff is not hidden behind the prefill", _exposed),
    "interference": ("What long prompts cost the streams beside them", _interference),
    "crossover": ("Where prefill and decode apart lose", _crossover),
    "grammar_step": ("What grammars cost a step", _grammar_step),
    "sampler": ("What drawing a token costs", _sampler),
    "start": ("How long a cluster takes to start", _start),
    "int8": ("What weights in 8 bits lose", _int8),
    "kernels": ("Kernels beside torch's own", _kernels),
    "peers": ("Served tokens beside vLLM, llama.cpp and transformers", _peers),
    "variants": ("Compiled variants of the kernels on one CPU", _variants),
}


if __name__ == "__main__":
    sys.exit(main())
