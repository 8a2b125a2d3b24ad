"""Benchmarks of others that measure us: what they say they got is counted and compared, not what they measured."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from tests.clients.programs import Programs
from tests.clients.served import Served

_BOUND_S: Final = 600.0
_NUM_REQUESTS: Final = 6  # of guidellm
_PROMPT_TOKENS: Final = 32
_MIN_SHARE: Final = 0.3  # of the time of all streams, from their first pieces to their last ones: 0.8 of ours
NUM_TOKENS: Final = 64
PROMPTS: Final = ("Once upon a time", "The baton is handed over", "Never dropped", "a", "one two three four", "END")


def problems_of_vllm(programs: Programs, served: Served) -> list[str]:
    """`vllm bench serve` with prompts of ours: its texts and counts are those of plain HTTP, and its streams streamed."""
    data = programs.scratch / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    flags = f"--backend openai --base-url {served.url} --model {served.model} --dataset-name custom"
    flags += f" --custom-output-len {NUM_TOKENS} --skip-chat-template --disable-shuffle --disable-tqdm"
    flags += f" --num-prompts {len(PROMPTS)} --temperature 0 --ignore-eos --save-result --save-detailed"
    files: list[str | Path] = ["--dataset-path", data, "--tokenizer", served.folder]
    files += ["--result-dir", programs.scratch, "--result-filename", "result.json"]
    programs.run("vllm", "bench", "serve", *flags.split(), *files, bound_s=_BOUND_S, VLLM_TARGET_DEVICE="cpu")
    result: dict[str, Any] = json.loads((programs.scratch / "result.json").read_text())
    asked = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    plain = [served.plainly("/v1/completions", asked | {"prompt": prompt}) for prompt in PROMPTS]
    expected = {
        "completed": len(PROMPTS),
        "failed": 0,
        "total_output_tokens": NUM_TOKENS * len(PROMPTS),
        "output_lens": [NUM_TOKENS] * len(PROMPTS),
        "generated_texts": [each["choices"][0]["text"] for each in plain],
        "total_input_tokens": sum(each["usage"]["prompt_tokens"] for each in plain),
    }
    found = [
        f"{name}: {result.get(name)!r}, not {value!r}" for name, value in expected.items() if result.get(name) != value
    ]
    streams = zip(PROMPTS, result["ttfts"], result["itls"], strict=True)
    return found + problems_of_streams(
        (repr(prompt), first_s, first_s + sum(gaps_s)) for prompt, first_s, gaps_s in streams
    )


def problems_of_guidellm(programs: Programs, served: Served) -> list[str]:
    """guidellm with prompts that it makes up: each request has its tokens, and its stream streamed."""
    report_at = programs.scratch / "report.json"
    flags = [f"--backend=kind=openai_http,target={served.url},model={served.model}", "--profile=kind=synchronous"]
    flags += [f"--constraint=kind=max_requests,count={_NUM_REQUESTS}"]
    flags += [f"--tokenizer=kind=hf_auto,model={served.folder}"]
    flags += [f"--data=kind=synthetic_text,prompt_tokens={_PROMPT_TOKENS},output_tokens={NUM_TOKENS}"]
    flags += [f"--output=kind=json,path={report_at}", "--disable-console-interactive"]
    programs.run("guidellm", "run", *flags, bound_s=_BOUND_S)
    (benchmark,) = json.loads(report_at.read_text())["benchmarks"]
    requests = benchmark["requests"]
    counts = {kind: len(each) for kind, each in requests.items() if each}
    found = (
        [] if counts == {"successful": _NUM_REQUESTS} else [f"requests: {counts}, not {_NUM_REQUESTS} successful ones"]
    )
    streams = []
    for number, request in enumerate(requests["successful"]):
        first_s, last_s = request["time_to_first_token_ms"] / 1e3, request["request_latency"]
        streams.append((f"request {number}", first_s, last_s))
        if request["output_tokens"] != NUM_TOKENS:
            found.append(f"request {number} had {request['output_tokens']} tokens, not {NUM_TOKENS}")
    return found + problems_of_streams(streams)


def problems_of_streams(streams: Iterable[tuple[str, float, float]]) -> list[str]:
    """Of name, seconds from the request to its first token and to its last one.

    One alone proves little on a busy machine: who is held up finds everything there. All together do: from a server that keeps
    its tokens back until the last one they have nothing but the time that it takes to read them.
    """
    found, span_s, whole_s = [], 0.0, 0.0
    for name, first_s, last_s in streams:
        span_s, whole_s = span_s + last_s - first_s, whole_s + last_s
        if not 0 < first_s < last_s:
            found.append(f"{name}: it was no stream: first token at {first_s:.3f} s, last one at {last_s:.3f} s")
    if span_s < _MIN_SHARE * whole_s or whole_s == 0:
        found.append(f"streams: of {whole_s:.3f} s only {span_s:.3f} s lie between first and last tokens")
    return found
