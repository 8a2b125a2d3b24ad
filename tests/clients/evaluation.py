"""lm-eval's `local-completions`: the log-likelihoods that it scores by are those of our own prompts' logprobs."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any, Final

import httpx

from tests.clients.environments import quiet_environment

_BOUND_S: Final = 600
_ROUNDING: Final = 1e-3  # it prints what it has, and sums in its own order
QUESTIONS: Final = (
    {"question": "The baton is", "choices": ["handed over", "dropped", "eaten by a dog"], "answer": 0},
    {"question": "Two and two are", "choices": ["four", "five"], "answer": 0},
    {"question": "Once upon a time there was a", "choices": ["king", "queen", "router"], "answer": 1},
)
_TASK: Final = """task: baton_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: " "
metric_list: [{{metric: acc}}]
"""


def problems_of_lm_eval(programs: Path, url: str, model: str, model_folder: Path, scratch: Path) -> list[str]:
    """What is wrong with what it found."""
    data = scratch / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    (scratch / "tasks").mkdir()
    (scratch / "tasks" / "baton_choice.yaml").write_text(_TASK.format(data=data))
    served = f"model={model},base_url={url}/v1/completions,num_concurrent=2,max_retries=1,add_bos_token=True"
    command = [str(programs / "lm_eval"), "run", "--model", "local-completions", "--tasks", "baton_choice"]
    command += ["--model_args", f"{served},tokenizer_backend=huggingface,tokenizer={model_folder}"]
    command += ["--include_path", str(scratch / "tasks"), "--output_path", str(scratch / "out"), "--log_samples"]
    home = quiet_environment() | {"HF_HOME": str(scratch / "hf")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=_BOUND_S, env=home, cwd=scratch, check=False)
    samples = sorted((scratch / "out").rglob("samples_baton_choice_*.jsonl"))
    if done.returncode != 0 or not samples:
        return [f"it ended with {done.returncode}: {(done.stderr.strip().splitlines() or ['nothing said'])[-1]}"]
    found: list[str] = []
    lines = samples[-1].read_text().splitlines()
    if len(lines) != len(QUESTIONS):
        found.append(f"{len(lines)} questions were scored, not {len(QUESTIONS)}")
    with httpx.Client(base_url=url, trust_env=False) as client:
        for line in lines:
            found += _differences(client, model, json.loads(line))
    return found


def _differences(client: httpx.Client, model: str, sample: dict[str, Any]) -> list[str]:
    found = []
    ours = []
    question = sample["doc"]["question"]
    for choice, told in zip(sample["doc"]["choices"], sample["filtered_resps"], strict=True):
        ours.append(loglikelihood(client, model, question, f" {choice}"))
        logprob, is_greedy = float(told[0]), str(told[1]) == "True"
        if not math.isclose(logprob, ours[-1][0], abs_tol=_ROUNDING) or is_greedy != ours[-1][1]:
            found.append(f"{question!r} {choice!r}: it has {logprob}, greedy {is_greedy}; echo says {ours[-1]}")
    best = max(range(len(ours)), key=lambda index: ours[index][0])
    if sample["acc"] != float(best == sample["doc"]["answer"]):
        found.append(f"{question!r}: it scored {sample['acc']}, and the likeliest is {best}")
    return found


def loglikelihood(client: httpx.Client, model: str, context: str, continuation: str) -> tuple[float, bool]:
    """Of the continuation, by plain HTTP; and whether each of its tokens is the likeliest."""
    body = {
        "model": model,
        "prompt": context + continuation,
        "max_tokens": 1,
        "echo": True,
        "logprobs": 1,
        "temperature": 0,
    }
    answer = client.post("/v1/completions", json=body, timeout=120)
    answer.raise_for_status()
    told = answer.json()["choices"][0]["logprobs"]
    of_context = {"model": model, "prompt": context, "max_tokens": 1}
    begin = client.post("/v1/completions", json=of_context, timeout=120).json()["usage"]["prompt_tokens"]
    rows = list(zip(told["token_logprobs"], told["top_logprobs"], strict=True))[begin:-1]  # the last is generated
    return sum(logprob for logprob, _ in rows), all(math.isclose(logprob, max(top.values())) for logprob, top in rows)
