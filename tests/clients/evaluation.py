"""lm-eval's `local-completions`: the log-likelihoods that it scores by are those of our own prompts' logprobs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

from tests.clients.programs import Programs
from tests.clients.served import Served

_BOUND_S: Final = 600.0
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


def problems_of_lm_eval(programs: Programs, served: Served) -> list[str]:
    """What is wrong with what it found."""
    scratch = programs.scratch
    data = scratch / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    (scratch / "tasks").mkdir()
    (scratch / "tasks" / "baton_choice.yaml").write_text(_TASK.format(data=data))
    api = f"model={served.model},base_url={served.url}/v1/completions,num_concurrent=2,max_retries=1,add_bos_token=True"
    flags: list[str | Path] = [
        "--model",
        "local-completions",
        "--tasks",
        "baton_choice",
        "--include_path",
        scratch / "tasks",
    ]
    flags += ["--model_args", f"{api},tokenizer_backend=huggingface,tokenizer={served.folder}"]
    flags += ["--output_path", scratch / "out", "--log_samples"]
    programs.run("lm_eval", "run", *flags, bound_s=_BOUND_S)
    samples = sorted((scratch / "out").rglob("samples_baton_choice_*.jsonl"))
    if not samples:
        return ["it wrote no file of samples"]
    found: list[str] = []
    lines = samples[-1].read_text().splitlines()
    if len(lines) != len(QUESTIONS):
        found.append(f"{len(lines)} questions were scored, not {len(QUESTIONS)}")
    for line in lines:
        found += _differences(served, json.loads(line))
    return found


def _differences(served: Served, sample: dict[str, Any]) -> list[str]:
    found = []
    ours = []
    question = sample["doc"]["question"]
    for choice, told in zip(sample["doc"]["choices"], sample["filtered_resps"], strict=True):
        ours.append(loglikelihood(served, question, f" {choice}"))
        logprob, is_greedy = float(told[0]), str(told[1]) == "True"
        if not math.isclose(logprob, ours[-1][0], abs_tol=_ROUNDING) or is_greedy != ours[-1][1]:
            found.append(f"{question!r} {choice!r}: it has {logprob}, greedy {is_greedy}; echo says {ours[-1]}")
    best = max(range(len(ours)), key=lambda index: ours[index][0])
    if sample["acc"] != float(best == sample["doc"]["answer"]):
        found.append(f"{question!r}: it scored {sample['acc']}, and the likeliest is {best}")
    return found


def loglikelihood(served: Served, context: str, continuation: str) -> tuple[float, bool]:
    """Of the continuation, by plain HTTP; and whether each of its tokens is the likeliest."""
    body = {"prompt": context + continuation, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
    told = served.plainly("/v1/completions", body)["choices"][0]["logprobs"]
    of_context = served.plainly("/v1/completions", {"prompt": context, "max_tokens": 1})
    begin = of_context["usage"]["prompt_tokens"]
    rows = list(zip(told["token_logprobs"], told["top_logprobs"], strict=True))[begin:-1]  # the last is generated
    return sum(logprob for logprob, _ in rows), all(math.isclose(logprob, max(top.values())) for logprob, top in rows)
