"""Training the demo model: loss falls, the written directory is what was trained, and an exam's word is what the engine says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer

from engine.demo.examine import share_right
from engine.demo.network import Network
from engine.demo.split import Part
from engine.demo.talk import Turn, question, recall
from engine.demo.train import PHASES, SIZE, Trainer, phase_of, rate_of, write_directory
from engine.demo.vocabulary import MESSAGE_END, VOCAB_SIZE, conversation_ids, learn_tokenizer
from engine.model_sizes import ModelSize
from engine.plan import SamplingParams
from engine.sequence import SequenceSpec
from tests.e2e.engine_alone import engine_alone
from tests.engine_torch.conftest import restored_threads

__all__ = ["restored_threads"]  # of tests here, too: a second thread would more than double their work

_SMALL = ModelSize(
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    max_position_embeddings=512,
    ties_embeddings=True,
    architecture="Qwen2ForCausalLM",
    vocab_size=VOCAB_SIZE,
    stored_dtype="bf16",
)


_WITH_CIRCUIT = replace(SIZE, hidden_size=192, num_layers=2, num_kv_heads=2, intermediate_size=64)


def test_phases_follow_each_other_and_the_rate_rises_once_and_falls_to_nothing() -> None:
    assert [phase_of(step / 100) for step in range(100)] == sorted(
        (phase_of(step / 100) for step in range(100)), key=PHASES.index
    )
    assert {phase_of(step / 100) for step in range(100)} == set(PHASES)
    rates = [rate_of(step / 1000) for step in range(1001)]
    assert rates[0] == 0
    assert rates[-1] < 1e-9
    assert rates.index(max(rates)) < 50


def test_what_a_network_learned_is_what_the_engine_says(tmp_path: Path) -> None:
    """Eight questions learned by heart: right by the exam, and token for token by the engine from the directory."""
    rng = Random(0)
    turns = [question(rng, Part.LEARNED) for _ in range(8)]
    tokenizer = learn_tokenizer(text for turn in turns for text in (turn.asked, turn.answer))
    torch.manual_seed(0)
    network = Network(_SMALL)
    assert share_right(network, tokenizer, iter(turns)) == 0
    losses = _learn_by_heart(network, tokenizer, turns, num_steps=250)
    assert losses[0] > 3
    assert losses[-1] < 0.2
    assert share_right(network, tokenizer, iter(turns)) == 1
    write_directory(network, tokenizer, tmp_path)
    for turn in turns:
        assert _greedy(tmp_path, tokenizer, turn) == turn.answer


def test_a_network_that_has_learned_nothing_looks_codes_up_and_learns_to_tell_them_in_seconds() -> None:
    """The last three digits, given those before, hardly ever by chance; without the circuit nothing but chance is left."""
    texts = [recall(Random(seed), 5, 3) for seed in range(200)]
    tokenizer = learn_tokenizer(text for turn in texts for text in (turn.asked, turn.answer))
    torch.manual_seed(0)
    network = Network(_WITH_CIRCUIT)
    exam = texts[:40]
    assert _share_of_digits(network, tokenizer, exam) > 0.9
    assert share_right(network, tokenizer, iter(exam)) == 0
    _learn(network, tokenizer, texts[40:], num_steps=60, num_rows=8)
    assert share_right(network, tokenizer, iter(exam)) > 0.8
    for layer in (0, 1):
        for linear in (network.model.attention(layer).q_proj, network.model.attention(layer).k_proj):
            torch.nn.init.normal_(linear.weight, std=0.02)
    assert _share_of_digits(network, tokenizer, exam) < 0.4


@torch.no_grad()
def _share_of_digits(network: Network, tokenizer: Tokenizer, turns: list[Turn]) -> float:
    """Of the last three of each code."""
    right: list[bool] = []
    for turn in turns:
        ids, targets = (torch.tensor([each]) for each in conversation_ids(tokenizer, [turn]))
        said = network.logits(ids, targets >= 0).argmax(-1)
        right += (said == targets[targets >= 0]).tolist()[-5:-2]
    return sum(right) / len(right)


def test_a_training_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    batches = torch.randint(4, VOCAB_SIZE, (6, 2, 2, 24))
    whole, first, second = (_fresh() for _ in range(3))
    trainer = Trainer(whole, num_steps=6)
    losses = [trainer.step(index, *batches[index]) for index in range(6)]
    trainer = Trainer(first, num_steps=6)
    assert [trainer.step(index, *batches[index]) for index in range(3)] == losses[:3]
    trainer.save(3, tmp_path / "state")
    trainer = Trainer(second, num_steps=6)
    assert trainer.load(tmp_path / "state") == 3
    assert [trainer.step(index, *batches[index]) for index in range(3, 6)] == losses[3:]
    for one, other in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def _fresh() -> Network:
    torch.manual_seed(1)
    return Network(_SMALL)


def _learn_by_heart(network: Network, tokenizer: Tokenizer, turns: list[Turn], num_steps: int) -> list[float]:
    return _learn(network, tokenizer, turns, num_steps, len(turns))


def _learn(network: Network, tokenizer: Tokenizer, turns: list[Turn], num_steps: int, num_rows: int) -> list[float]:
    """Losses; so many turns a step, one a row, again and again."""
    rows = [conversation_ids(tokenizer, [turn]) for turn in turns]
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + [0] * (longest - len(row)) for row, _ in rows])
    targets = torch.tensor([row + [-100] * (longest - len(row)) for _, row in rows])
    trainer = Trainer(network, num_steps)
    losses = []
    for index in range(num_steps):
        which = torch.arange(index * num_rows, (index + 1) * num_rows) % len(rows)
        losses.append(trainer.step(index, ids[which], targets[which]))
    return losses


def _greedy(directory: Path, tokenizer: Tokenizer, turn: Turn) -> str:
    ids, targets = conversation_ids(tokenizer, [turn])
    prompt = tuple(ids[: 1 + next(index for index, target in enumerate(targets) if target >= 0)])
    engine = engine_alone(directory, "bf16", num_blocks=64, max_model_len=512)
    spec = SequenceSpec("a", prompt, 0, SamplingParams(0.0, seed=0), 100, frozenset({MESSAGE_END}), ())
    said = engine.generate([spec])["a"]
    text: str = tokenizer.decode(said)
    return text
