"""Benchmarks of others that measure us: what they say they got is counted and compared, not what they measured."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, Final

import httpx

from tests.clients.environments import quiet_environment

_BOUND_S: Final = 600
NUM_TOKENS: Final = 16
PROMPTS: Final = ("Once upon a time", "The baton is handed over", "Never dropped", "a", "one two three four", "END")


def problems_of_vllm(programs: Path, url: str, model: str, model_folder: Path, scratch: Path) -> list[str]:
    """`vllm bench serve` with prompts of ours: its texts and counts are those of plain HTTP, and its streams streamed."""
    data = scratch / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    flags = f"--backend openai --base-url {url} --model {model} --tokenizer {model_folder} --dataset-name custom"
    flags += f" --dataset-path {data} --custom-output-len {NUM_TOKENS} --skip-chat-template --disable-shuffle"
    flags += f" --num-prompts {len(PROMPTS)} --temperature 0 --ignore-eos --disable-tqdm"
    flags += f" --save-result --save-detailed --result-dir {scratch} --result-filename result.json"
    failed = _run([str(programs / "vllm"), "bench", "serve", *flags.split()], scratch)
    if failed:
        return [failed]
    result: dict[str, Any] = json.loads((scratch / "result.json").read_text())
    found = []
    with httpx.Client(base_url=url, trust_env=False) as client:
        plain = [_plainly(client, model, prompt) for prompt in PROMPTS]
    expected = {
        "completed": len(PROMPTS),
        "failed": 0,
        "total_output_tokens": NUM_TOKENS * len(PROMPTS),
        "output_lens": [NUM_TOKENS] * len(PROMPTS),
        "generated_texts": [text for text, _ in plain],
        "total_input_tokens": sum(num for _, num in plain),
    }
    found += [
        f"{name}: {result.get(name)!r}, not {value!r}" for name, value in expected.items() if result.get(name) != value
    ]
    for ttft, gaps in zip(result["ttfts"], result["itls"], strict=True):
        if not 0 < ttft < _BOUND_S or len(gaps) < NUM_TOKENS // 4:
            found.append(f"it was no stream: first token after {ttft} s, then {len(gaps)} gaps")
    return found


def problems_of_guidellm(programs: Path, url: str, model: str, model_folder: Path, scratch: Path) -> list[str]:
    """guidellm with prompts that it makes up: each request has its tokens, and a first one before the last."""
    num_requests, report_at = 6, scratch / "report.json"
    flags = f"--backend kind=openai_http,target={url},model={model} --profile kind=synchronous"
    flags += f" --constraint kind=max_requests,count={num_requests} --tokenizer kind=hf_auto,model={model_folder}"
    flags += f" --data kind=synthetic_text,prompt_tokens=32,output_tokens={NUM_TOKENS}"
    flags += f" --output kind=json,path={report_at} --disable-console-interactive"
    failed = _run([str(programs / "guidellm"), "run", *flags.split()], scratch)
    if failed:
        return [failed]
    report = json.loads(report_at.read_text())
    (benchmark,) = report["benchmarks"]
    requests = benchmark["requests"]
    found = []
    counts = {kind: len(requests[kind]) for kind in ("successful", "errored")}
    if counts != {"successful": num_requests, "errored": 0}:
        found.append(f"requests: {counts}, not {num_requests} successful ones")
    for request in requests["successful"]:
        if request["output_tokens"] != NUM_TOKENS or not request["time_to_first_token_ms"] > 0:
            found.append(
                f"a request had {request['output_tokens']} tokens, the first after {request['time_to_first_token_ms']} ms"
            )
    return found


def _run(command: list[str], scratch: Path) -> str:
    """What went wrong, in one line; nothing."""
    home = quiet_environment() | {"HF_HOME": str(scratch / "hf"), "VLLM_TARGET_DEVICE": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=_BOUND_S, env=home, cwd=scratch, check=False)
    said = (done.stderr + done.stdout).strip().splitlines() or ["nothing said"]
    return "" if done.returncode == 0 else f"it ended with {done.returncode}: {said[-1]}"


def _plainly(client: httpx.Client, model: str, prompt: str) -> tuple[str, int]:
    body = {"model": model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    answer = client.post("/v1/completions", json=body, timeout=120)
    answer.raise_for_status()
    told = answer.json()
    return told["choices"][0]["text"], told["usage"]["prompt_tokens"]
