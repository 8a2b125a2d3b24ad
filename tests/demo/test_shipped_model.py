"""The demo model that ships: what it promises to answer, through a cluster of `baton up`, and that KV out of place shows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from bench.accuracy import LEAST_RIGHT, chance_of
from deploy.up_config import DEMO_MODEL, DEMO_NAME
from engine.demo.examine import EXAMS, draw_exam
from engine.demo.talk import Turn
from engine.demo.vocabulary import MESSAGE_END, conversation_ids
from engine.kv_memory import KvMemory
from engine.model_config import read_model_config
from engine.plan import SamplingParams
from engine.sequence import SequenceSpec
from tests.architecture.source_tree import ROOT
from tests.e2e.cluster import Cluster, started_cluster
from tests.e2e.engine_alone import engine_alone
from tests.thorough import IS_THOROUGH

_PROMISED = [name for name in EXAMS if name.split(",")[0] in LEAST_RIGHT]
_NUM_ASKED = 24 if IS_THOROUGH else 12
_MOST_BYTES = 8_000_000
_PROMPT_BLOCKS = 32


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("demo")
    with started_cluster(DEMO_MODEL, folder, "--num-blocks", "1024", "--max-model-len", "2048") as running:
        yield running


def test_held_out_questions_are_answered_through_prefill_and_decode(cluster: Cluster) -> None:
    """As often as promised, but for chance, for every kind and length of which anything is; prompts were handed over."""
    for exam in _PROMISED:
        turns = list(draw_exam(exam, _NUM_ASKED, seed=7))
        with ThreadPoolExecutor(8) as clients:
            said = list(clients.map(lambda turn: _ask(cluster, turn.asked, temperature=0), turns))
        right = [turn.answer == each for turn, each in zip(turns, said, strict=True)]
        assert chance_of(sum(right), len(right), LEAST_RIGHT[exam.split(",")[0]]) >= 0.01, exam
    (decode,) = cluster.nodes_of("decode")
    assert cluster.metrics(decode)["transfer_bytes_total{received}{prefill-0}"] > 0


def test_a_few_wrong_answers_are_chance_and_many_are_not() -> None:
    assert chance_of(50, 50, 0.99) == pytest.approx(1)
    assert chance_of(49, 50, 0.99) == pytest.approx(1 - 0.99**50)
    assert chance_of(45, 50, 0.99) < 0.001 < chance_of(48, 50, 0.99)


def test_the_launcher_asks_what_the_model_can_answer(cluster: Cluster) -> None:
    """Its curl line has the demo model's name; the answer comes at the temperature that the model's directory says, too."""
    (line, _) = [each for each in cluster.lines if each.strip().startswith("curl ")]
    assert f'"model": "{DEMO_NAME}"' in line
    assert "What does a prefill node do?" in line
    answer = "A prefill node computes the KV cache of a prompt and pushes it to a decode node."
    assert {_ask(cluster, "What does a prefill node do?") for _ in range(3)} == {answer}


def test_the_page_and_the_quickstart_suggest_what_it_can_answer_and_the_story_is_long_enough_to_kill_its_node(
    cluster: Cluster,
) -> None:
    page = ROOT / "router" / "page"
    story, *others = re.findall(r'class="suggestion">(.*?)</button>', (page / "index.html").read_text())
    assert f'const FALLBACK = "{story}";' in (page / "chat.js").read_text()
    assert f"*{story}*" in (ROOT / "docs" / "quickstart.md").read_text()
    told = _ask(cluster, story, temperature=0, max_tokens=256)
    assert told.startswith("Once upon a time") and len(told.split()) > 40
    answers = [_ask(cluster, each, temperature=0) for each in others]
    assert ["Baton is an inference cluster" in answers[0], "7312" in answers[1]] == [True, True]


def _ask(cluster: Cluster, question: str, **settings: float) -> str:
    body = {"model": DEMO_NAME, "messages": [{"role": "user", "content": question}], "max_tokens": 64} | settings
    with cluster.client() as client:
        answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    said: str = answer.json()["choices"][0]["message"]["content"]
    return said


def test_the_shipped_directory_is_small() -> None:
    assert sum(path.stat().st_size for path in DEMO_MODEL.glob("*.safetensors")) <= _MOST_BYTES


def _one_byte_further(block: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.roll(block, 1)


def _emptied(block: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.zeros_like(block)


@pytest.mark.parametrize("harm", [_one_byte_further, _emptied])
def test_one_block_of_kv_out_of_place_is_another_answer(harm: Callable[[NDArray[np.uint8]], NDArray[np.uint8]]) -> None:
    """The block with the code, harmed between prefill and decode; without harm every one of these answers is right."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    for turn in draw_exam("recall, 128 tokens", 3 if IS_THOROUGH else 1, seed=7):
        assert _generate(tokenizer, turn, None, harm) == turn.answer
        said = {_generate(tokenizer, turn, block, harm) for block in range(_num_blocks(tokenizer, turn))}
        assert said - {turn.answer}


def _num_blocks(tokenizer: Tokenizer, turn: Turn) -> int:
    return len(_prompt(tokenizer, turn)) // _memory().block_size


def _memory() -> KvMemory:
    return KvMemory(read_model_config(DEMO_MODEL), block_size=16, num_blocks=_PROMPT_BLOCKS, dtype="bf16")


def _prompt(tokenizer: Tokenizer, turn: Turn) -> tuple[int, ...]:
    ids, targets = conversation_ids(tokenizer, [turn])
    return tuple(ids[: 1 + next(index for index, target in enumerate(targets) if target >= 0)])


def _generate(
    tokenizer: Tokenizer,
    turn: Turn,
    harmed: int | None,
    harm: Callable[[NDArray[np.uint8]], NDArray[np.uint8]],
) -> str:
    """The answer of one engine, whose used block number `harmed` is changed as soon as the prompt is computed."""
    memory = _memory()
    engine = engine_alone(DEMO_MODEL, "bf16", num_blocks=_PROMPT_BLOCKS, max_model_len=512, memory=memory)
    stop = frozenset({MESSAGE_END})
    spec = SequenceSpec("a", _prompt(tokenizer, turn), 0, SamplingParams(0.0, seed=0), 32, stop, ())
    said: list[int] = []
    for progress in engine.run([spec]):
        if progress.token_id is not None:
            said.append(progress.token_id)
            if len(said) == 1 and harmed is not None:
                (used,) = np.nonzero(memory.bytes.any(axis=1))
                memory.bytes[used[harmed]] = harm(memory.bytes[used[harmed]])
    text: str = tokenizer.decode(said)
    return text
