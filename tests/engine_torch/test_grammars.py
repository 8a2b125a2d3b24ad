"""Grammars through scheduler, runner and model: what comes out fits, and is the same however often it was interrupted."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from engine.binding import Binder, Binding
from engine.block_pool import BlockPool
from engine.byte_tokenizer import BEGIN_OF_TEXT, END_OF_TEXT, MESSAGE_END, NUM_BYTES
from engine.grammars import Constraint, GrammarError, Grammars
from engine.kv_memory import KvMemory
from engine.local_engine import LocalEngine
from engine.model import Model, load_model
from engine.plan import Grammar, Plan, PrefillChunk, SamplingParams, SlotMark, SlotStart
from engine.reserve import ReserveConfig
from engine.runner import TorchRunner
from engine.scheduler import Scheduler, SchedulerConfig
from engine.sequence import SequenceSpec
from node.grammar_processes import GrammarProcesses
from proto.block_key import block_keys, seed_key
from tests.architecture.source_tree import DEMO_MODEL
from tests.engine_torch.conftest import VOCAB_SIZE, ModelDirs
from tests.kernels_choice import KERNELS

BLOCK_SIZE = 16
KEY_SEED = seed_key(b"grammars")
PROMPT = tuple(range(30, 71))
ENDS = frozenset({END_OF_TEXT, MESSAGE_END})


@pytest.fixture(scope="module")
def grammars(model_dirs: ModelDirs) -> Grammars:
    return Grammars(model_dirs(), VOCAB_SIZE)


@pytest.fixture(scope="module")
def model(model_dirs: ModelDirs) -> Model:
    return load_model(model_dirs(), "fp32", KERNELS)


def json_grammar(schema: object) -> Grammar:
    return Grammar("json_schema", json.dumps(schema), True, tuple(sorted(ENDS)))


def drawn_schema(draw: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose texts are short."""
    kinds = ["string", "integer", "boolean", "enum", "null", "number"] + (
        ["object", "array", "any"] * 2 if depth else []
    )
    match draw.choice(kinds):
        case "string":
            return {"type": "string", "maxLength": draw.randint(1, 6)}
        case "integer":
            low = draw.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 90)}
        case "number":
            return {"type": "integer", "exclusiveMinimum": 0, "maximum": draw.randint(1, 5)}
        case "enum":
            return {"enum": draw.sample(["red", "green", 7, None, True, 'a"b\n€'], 3)}
        case "object":
            names = draw.sample(["a", "b c", "é", "name"], draw.randint(1, 3))
            properties = {name: drawn_schema(draw, depth - 1) for name in names}
            required = [name for name in names if draw.random() < 0.7]
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "array":
            most = draw.randint(1, 3)
            return {"type": "array", "items": drawn_schema(draw, depth - 1), "minItems": most - 1, "maxItems": most}
        case "any":
            return {"anyOf": [drawn_schema(draw, depth - 1), drawn_schema(draw, depth - 1)]}
        case kind:
            return {"type": kind}


def spec_of(
    name: str, sampling: SamplingParams, generated: tuple[int, ...] = (), max_tokens: int = 200
) -> SequenceSpec:
    token_ids = (*PROMPT, *generated)
    return SequenceSpec(
        sequence_id=name,
        token_ids=token_ids,
        num_generated=len(generated),
        sampling=sampling,
        max_new_tokens=max_tokens - len(generated),
        stop_token_ids=ENDS,
        block_keys=tuple(block_keys(KEY_SEED, token_ids, BLOCK_SIZE)),
    )


def completions(
    model: Model,
    grammars: Binder | None,
    *specs: SequenceSpec,
    num_blocks: int = 128,
    ends: dict[object, str] | None = None,
    is_asynchronous: bool | None = None,
) -> list[list[int]]:
    """What each sequence says, all computed together; those that give way for want of blocks go on later. `ends`: is told how."""
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    config = SchedulerConfig(len(specs), 64, 256, reserve=ReserveConfig(policy="none"), resumes_preempted=True)
    scheduler = Scheduler(config, pool, KEY_SEED)
    memory = KvMemory(model.config, BLOCK_SIZE, num_blocks, model.dtype)
    runner = TorchRunner(model, memory, len(specs), 256, grammars=grammars, is_asynchronous=is_asynchronous)
    engine = LocalEngine(scheduler, runner)
    said: dict[object, list[int]] = {spec.sequence_id: [] for spec in specs}
    for progress in engine.run(specs):
        if progress.token_id is not None:
            said[progress.sequence_id].append(progress.token_id)
        if ends is not None and progress.finish is not None:
            ends[progress.sequence_id] = progress.finish
    if num_blocks < 128:
        assert scheduler.num_preempted
    return list(said.values())


def text_of(token_ids: list[int]) -> str:
    assert token_ids[-1] in ENDS, "did not end"
    return bytes(token_ids[:-1]).decode()


@pytest.mark.covers("A14")
@pytest.mark.parametrize("seed", range(40))
def test_what_is_said_fits_the_schema_and_is_the_same_from_any_token_on(
    model: Model, grammars: Grammars, seed: int
) -> None:
    """An attempt that goes on elsewhere knows the tokens so far and nothing else."""
    draw = random.Random(seed)
    schema = drawn_schema(draw)
    temperature = draw.choice([0.0, 1.0, 3.0])
    sampling = SamplingParams(
        temperature,
        seed,
        top_k=draw.choice([0, 0, 3]),
        top_p=draw.choice([1.0, 0.7]),
        frequency_penalty=draw.choice([0.0, 0.5]),
        stop_token_ids=ENDS,
        min_tokens=draw.choice([0, 0, 2]),
        grammar=json_grammar(schema),
    )
    (whole,) = completions(model, grammars, spec_of("whole", sampling))
    jsonschema_rs.validate(schema, json.loads(text_of(whole)))
    if len(whole) > 1:
        cut = draw.randrange(1, len(whole))
        fresh = Grammars(grammars.directory, VOCAB_SIZE)
        (rest,) = completions(model, fresh, spec_of("rest", sampling, tuple(whole[:cut])))
        assert whole[:cut] + rest == whole


@pytest.mark.covers("A14")
def test_a_preempted_completion_goes_on_as_if_nothing_had_happened(model: Model, grammars: Grammars) -> None:
    schema = {
        "type": "array",
        "items": {"type": "string", "minLength": 5, "maxLength": 9},
        "minItems": 5,
        "maxItems": 6,
    }
    specs = [
        spec_of(f"s{seed}", SamplingParams(1.0, seed, stop_token_ids=ENDS, grammar=json_grammar(schema)))
        for seed in range(4)
    ]
    alone = [completions(model, grammars, spec)[0] for spec in specs]
    assert completions(model, grammars, *specs, num_blocks=17) == alone
    for each in alone:
        jsonschema_rs.validate(schema, json.loads(text_of(each)))
    with closing(GrammarProcesses(grammars.directory, VOCAB_SIZE)) as processes:
        processes.open()
        for is_asynchronous in (False, True):
            in_processes = completions(model, processes, *specs, num_blocks=17, is_asynchronous=is_asynchronous)
            assert in_processes == alone


@pytest.mark.covers("A14")
def test_a_row_with_a_grammar_changes_no_other(model: Model, grammars: Grammars) -> None:
    free = [
        spec_of(f"f{seed}", SamplingParams(temperature, seed), max_tokens=30)
        for seed, temperature in enumerate((0.0, 1.0, 2.0))
    ]
    bound = spec_of("bound", SamplingParams(1.0, 9, grammar=Grammar("regex", "[a-f]{20}", False, tuple(ENDS))))
    *beside, said = completions(model, grammars, *free, bound)
    assert beside == completions(model, None, *free)
    assert len(said) == 21
    assert set(text_of(said)) <= set("abcdef")


@pytest.mark.covers("A14")
def test_further_branches_begin_within_the_grammar(model: Model, grammars: Grammars) -> None:
    grammar = Grammar("ebnf", 'root ::= "left" | "right" | "up"', False, tuple(ENDS))
    sampling = SamplingParams(3.0, 1, grammar=grammar)
    pool = BlockPool(32, BLOCK_SIZE)
    scheduler = Scheduler(SchedulerConfig(1, 64, 256), pool, KEY_SEED)
    memory = KvMemory(model.config, BLOCK_SIZE, 32, model.dtype)
    seeds = tuple(range(2, 14))
    engine = LocalEngine(scheduler, TorchRunner(model, memory, 1, 256, grammars=grammars))
    first = next(iter(engine.run([replace(spec_of("n", sampling), branch_seeds=seeds)])))
    drawn = [each.token_id for each in first.branch_tokens]
    assert len(drawn) == len(seeds)
    assert {*drawn} <= {*b"lru"}
    assert len({*drawn}) > 1
    for seed, token_id in zip(seeds, drawn, strict=True):
        (own,) = completions(model, grammars, spec_of("own", SamplingParams(3.0, seed, grammar=grammar)))
        assert own[0] == token_id
        assert text_of(own) in ("left", "right", "up")


@pytest.mark.covers("A14", "A08")
def test_whatever_bytes_the_model_likes_the_text_is_unicode(model: Model, grammars: Grammars) -> None:
    """A model that says bytes at random: xgrammar alone would let it say halves of surrogate pairs, and more than U+10FFFF."""
    said = []
    for seed in range(30):
        sampling = SamplingParams(50.0, seed, grammar=Grammar("regex", "[^a-z\\x00-\\x7f]{12}", False, tuple(ENDS)))
        said.append(text_of(completions(model, grammars, spec_of("u", sampling))[0]))
    assert all(len(text) == 12 for text in said)
    assert {len(character.encode()) for text in said for character in text} == {2, 3, 4}


def characters(constraint: Constraint) -> set[int]:
    allowed = constraint.allowed()
    assert allowed is not None
    return {*np.flatnonzero(allowed).tolist()}


@pytest.mark.covers("A14")
def test_once_the_text_is_whole_only_an_end_may_follow_and_special_tokens_never_stand_for_text(
    grammars: Grammars,
) -> None:
    grammar = Grammar("regex", "<?ab", False, (END_OF_TEXT,))
    constraint = grammars.constraint(grammar)
    assert characters(constraint) == {*b"<a"}
    for token_id in b"ab":
        constraint.add(token_id)
    assert characters(constraint) == {END_OF_TEXT}
    constraint.add(END_OF_TEXT)
    assert constraint.allowed() is None
    anything = characters(grammars.constraint(Grammar("regex", ".*", False, (END_OF_TEXT,))))
    assert anything & {*range(NUM_BYTES, VOCAB_SIZE)} == {END_OF_TEXT}
    assert BEGIN_OF_TEXT not in anything


@pytest.mark.covers("A14")
def test_a_completion_that_is_none_of_the_grammar_breaks_its_row_and_no_other(model: Model, grammars: Grammars) -> None:
    grammar = Grammar("regex", "ab", False, (END_OF_TEXT,))
    wrong = spec_of("wrong", SamplingParams(0.0, 0, grammar=grammar), (7,))
    free = spec_of("free", SamplingParams(0.0, 0), max_tokens=5)
    assert completions(model, grammars, wrong, free) == [[], completions(model, None, free)[0]]
    with pytest.raises(GrammarError, match="not the beginning"):
        grammars.check(grammar, (7,))


class Counted:
    """Follows grammars, and counts the rows that are asked about no more."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self.num_closed = 0

    def constraint(self, grammar: Grammar, generated_token_ids: Iterable[int] = ()) -> Binding:
        constraint = self._grammars.constraint(grammar, generated_token_ids)
        constraint.close = self._closed  # type: ignore[method-assign]
        return constraint

    def _closed(self) -> None:
        self.num_closed += 1


@pytest.mark.covers("A14")
def test_a_row_that_gave_way_is_asked_about_no_more_from_then_on(model: Model, grammars: Grammars) -> None:
    counted = Counted(grammars)
    memory = KvMemory(model.config, BLOCK_SIZE, 4, model.dtype)
    runner = TorchRunner(model, memory, 1, 64, grammars=counted)
    sampling = SamplingParams(1.0, 9, grammar=Grammar("regex", "[a-f]{20}", False, tuple(ENDS)))
    for generation, num_closed in ((1, 0), (2, 1)):
        start = SlotStart(0, generation, sampling, 0, PROMPT[-1])
        chunk = PrefillChunk(0, generation, 0, PROMPT, (0, 1, 2), samples=True)
        runner.run(Plan(0, (start,), chunks=(chunk,)))
        assert counted.num_closed == num_closed
        runner.run(Plan(1, marks=(SlotMark(0, generation),)))
        assert counted.num_closed == num_closed + 1


@pytest.mark.covers("A14")
@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("regex", "[a-z", "Unclosed"),
        ("ebnf", "root ::= foo", '"foo" is not defined'),
        ("json_schema", '{"type": "colour"}', "colour"),
        ("json_schema", "{", "Failed to parse"),
    ],
)
def test_what_cannot_be_compiled_is_told_in_one_sentence(grammars: Grammars, kind: Any, text: str, words: str) -> None:
    with pytest.raises(GrammarError, match=words) as told:
        grammars.check(Grammar(kind, text, False, (END_OF_TEXT,)))
    assert "\n" not in str(told.value)
    assert "project/cpp" not in str(told.value)


@pytest.mark.covers("A14")
@pytest.mark.parametrize("text", ["([a-z]{1,99}){1,99}", "(([a-z]{1,99}){1,99}){1,99}"])
def test_what_can_be_read_in_too_many_ways_is_refused_each_time(text: str) -> None:
    """At every token it would hold up the step, and everybody in it; the more, the longer tokens are, so not with bytes."""
    words = Grammars(DEMO_MODEL, 1536)
    for _ in range(2):
        with pytest.raises(GrammarError, match="in too many ways"):
            words.check(Grammar("regex", text, True, tuple(sorted(ENDS))))


@pytest.mark.covers("A14")
def test_what_would_take_too_long_to_be_followed_from_its_beginning_is_refused(grammars: Grammars) -> None:
    """A completion could be said by it token by token, and not go on elsewhere: there all tokens are taken at once."""
    with pytest.raises(GrammarError, match="in too many ways"):
        grammars.check(Grammar("regex", "([a-z]{1,40}){1,120}", True, tuple(sorted(ENDS))))


@pytest.mark.covers("A14")
@pytest.mark.parametrize("text", ["[a-z ]*", "([0-9]{1,3},){1,50}", "([a-z]{1,20} ){1,30}", "([a-z]+ ?){1,20}x"])
def test_ordinary_repeats_are_taken(grammars: Grammars, text: str) -> None:
    grammars.check(Grammar("regex", text, True, tuple(sorted(ENDS))))


@pytest.mark.covers("A14")
def test_blanks_in_json_are_few(grammars: Grammars) -> None:
    """A model that likes them would say nothing else up to max_tokens."""
    constraint = grammars.constraint(replace(json_grammar({"type": "object"}), is_compact=False))
    num_blanks = 0
    constraint.add(ord("{"))
    while (allowed := constraint.allowed()) is not None and allowed[ord("\n")] and num_blanks < 100:
        constraint.add(ord("\n"))
        num_blanks += 1
    assert num_blanks == 16


@pytest.mark.covers("A14")
def test_the_last_used_stay_compiled_and_no_more_bytes_than_given(model_dirs: ModelDirs) -> None:
    grammars = Grammars(model_dirs(), VOCAB_SIZE, cache_bytes=1)
    first, second = (Grammar("regex", text, False, (END_OF_TEXT,)) for text in ("ab", "cd"))
    grammars.check(first)
    assert grammars.has(first)
    grammars.check(second)
    assert (grammars.has(first), grammars.has(second)) == (False, True)
    assert characters(grammars.constraint(first)) == {ord("a")}


def test_a_directory_without_tokenizer_says_so(tmp_path: Any) -> None:
    with pytest.raises(GrammarError, match=r"no tokenizer\.json"):
        Grammars(tmp_path, VOCAB_SIZE).check(Grammar("regex", "a", False, (END_OF_TEXT,)))
