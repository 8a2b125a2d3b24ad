"""Which tokens a grammar allows next: compiled once by xgrammar, kept for the next request, and followed by one matcher a slot.

What is allowed is a function of the grammar and of the completion's tokens. So a sequence that goes on elsewhere, or again, is
allowed there what it would have been allowed here: its matcher is made anew by giving it the tokens that there are.

xgrammar takes milliseconds for most grammars, and a second for some; it does so without the interpreter's lock, and any thread
may call `check`. A runner that finds its grammar compiled waits for nothing. Not here: how long a client may keep a node
compiling (node/grammar_threads.py), and what a client may write (router/structured.py).

Source: Dong et al., "XGrammar: Flexible and Efficient Structured Generation Engine for Large Language Models", 2024.
"""

from __future__ import annotations

import codecs
import importlib.util
import json
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from engine.grammar_parts import parts_of
from engine.plan import Grammar

if TYPE_CHECKING:
    import xgrammar

CACHE_BYTES: Final = 128 << 20  # of compiled grammars; a small one has a megabyte with a vocabulary of 50,000
# Texts that a new grammar is tried on, and the processor's time for all of them: a hundred times what an ordinary one takes.
_WALKS, _WALK_TOKENS, _WALKS_S = 2, 64, 1.0
# And how long it may take over a token that is taken, which mostly is a hundredth of it: a completion that goes on elsewhere is
# followed anew from its beginning, and a step waits for that.
ADD_S: Final = 0.0005
_MAX_BLANKS: Final = 16  # between two tokens of JSON: a line break and what a few levels are indented by
_BITS: Final = 32  # of a word of xgrammar's masks
# In JSON no control character stands for itself but as white space. xgrammar 0.2 lets strings of a bounded length have all but
# these two (its issue 800), so that tokens with any other, the tab too, are left out of JSON.
_JSON_CONTROLS: Final = frozenset(b"\n\r")
# Behind the first byte of a character; elsewhere any continuing byte may be.
_SECOND_BYTES: Final = {0xE0: (0xA0, 0xBF), 0xED: (0x80, 0x9F), 0xF0: (0x90, 0xBF), 0xF4: (0x80, 0x8F)}
# The byte 0xff, as vocabularies write it.
_NO_TEXT: Final[dict[str, str | bytes]] = {"RAW": b"\xff", "BYTE_LEVEL": "ÿ", "BYTE_FALLBACK": "<0xFF>"}
_CONTINUING: Final = bytes(range(0x80, 0xC0))
_MOST_CONTINUING: Final = 3  # of one character
# What xgrammar raises of a grammar that it cannot take, or gets lost in: none of it is a bug of ours, and none may end a node.
_FAULTS: Final = (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, MemoryError)
_FURTHER: Final = ("extra_special_tokens", "additional_special_tokens")  # the second before transformers 5


class GrammarError(ValueError):
    """Nothing can be said by this grammar, here or at all: one sentence."""


class Vocabulary:
    """What of a model's tokens can be text: xgrammar takes any bytes for a character that begin and go on like one.

    `of_text` and `of_json`, a bit for each token: those whose own bytes can be, so no special ones.
    `behind`: of the first bytes of characters that not every byte may follow (RFC 3629, section 4), the tokens that may.
    """

    def __init__(self, spelled: Sequence[bytes], special: Collection[int] = ()) -> None:
        self.spelled = spelled
        is_text = np.array([_is_utf8_piece(each) for each in spelled], np.bool_)
        self._special = frozenset(special)
        controls = [any(byte < 0x20 and byte not in _JSON_CONTROLS for byte in each) for each in spelled]
        self.of_text, self.of_json = _packed(is_text), _packed(is_text & ~np.array(controls, np.bool_))
        firsts = np.array([each[0] if each else 0 for each in spelled], np.int64)
        self._num_bytes = len(self.of_text)
        self.behind = {lead: _packed((firsts >= low) & (firsts <= high)) for lead, (low, high) in _SECOND_BYTES.items()}

    def named(self, token_ids: Collection[int]) -> NDArray[np.uint8]:
        """Bits as those, of these tokens where they are special: a grammar has named them."""
        bits = np.zeros(self._num_bytes, np.uint8)
        for token_id in self._special.intersection(token_ids):
            bits[token_id >> 3] |= 1 << (token_id & 7)
        return bits


def _packed(flags: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """As xgrammar has its masks: whole words, the first token in the lowest bit."""
    bits = np.packbits(flags, bitorder="little")
    return np.pad(bits, (0, -len(bits) % (_BITS // 8)))


def _is_utf8_piece(spelled: bytes) -> bool:
    """Whether it can be within a text: characters, the end of one before them, and the beginning of one behind."""
    rest = spelled.lstrip(_CONTINUING)
    if len(spelled) - len(rest) > _MOST_CONTINUING:
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(rest)
    except UnicodeDecodeError:
        return False
    return True


class Constraint:
    """What one completion may go on with. A grammar that could not be had, or a completion that is none of it, allows nothing."""

    def __init__(
        self,
        matcher: xgrammar.GrammarMatcher | None,
        vocabulary: Vocabulary,
        vocab_size: int,
        usable: NDArray[np.uint8],
    ) -> None:
        """usable: a bit for each token that its kind of text can have."""
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._usable = usable
        self._last_byte = 0
        self._words = np.empty((1, -(-vocab_size // _BITS)), np.int32)
        self._bits: NDArray[np.uint8] = self._words.view(np.uint8)[0]
        self._vocab_size = vocab_size

    @property
    def is_stalled(self) -> bool:
        """Never: whoever asks waits for as long as it takes."""
        return False

    def close(self) -> None:
        """Nothing is left elsewhere."""

    @property
    def is_broken(self) -> bool:
        """Whether no token can follow."""
        return self._matcher is None

    def allowed(self) -> NDArray[np.bool_] | None:
        """What may come next, [vocab_size]; None: anything, since the completion has ended and whatever is drawn is dropped."""
        bits = self.allowed_bits()
        if bits is None:
            return None
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

    def allowed_bits(self) -> NDArray[np.uint8] | None:
        """The same, a bit for each token; no bit behind the last token's is set. Until it is called again."""
        if self._matcher is None:
            return np.zeros_like(self._bits)
        if self._matcher.is_terminated():
            return None
        try:
            self._matcher.fill_next_token_bitmask(self._words)
        except _FAULTS:
            self._matcher = None
            return np.zeros_like(self._bits)
        self._bits &= self._usable
        behind = self._vocabulary.behind.get(self._last_byte)
        return self._bits if behind is None else self._bits & behind

    def add(self, token_id: int) -> None:
        """The completion's next token."""
        if self._matcher is None or self._matcher.is_terminated():
            return
        try:
            is_taken = self._matcher.accept_token(token_id)
        except _FAULTS:
            is_taken = False
        if not is_taken:
            self._matcher = None
        elif spelled := self._vocabulary.spelled[token_id]:
            self._last_byte = spelled[-1]


class Grammars:
    """The compiled grammars of one model's vocabulary, the last used kept. Any thread may call any method."""

    def __init__(self, directory: Path, vocab_size: int, cache_bytes: int = CACHE_BYTES) -> None:
        """`directory`: the model's; nothing is read before the first grammar. `vocab_size`: of the logits."""
        self.directory = directory
        self._vocab_size = vocab_size
        self._cache_bytes = cache_bytes
        self._compiler: xgrammar.GrammarCompiler | None = None
        self._vocabulary = Vocabulary(())
        self._compiled: OrderedDict[tuple[str, str, bool], xgrammar.CompiledGrammar] = OrderedDict()
        self._compiled_bytes = 0
        self._lock = threading.Lock()  # of the cache
        self._opening = threading.Lock()

    def open(self) -> None:
        """Read the vocabulary, which takes a second the first time; raises GrammarError if that, or xgrammar, is not there."""
        if self._compiler is not None:
            return
        if importlib.util.find_spec("xgrammar") is None:
            raise GrammarError("this node has no xgrammar (pip install -c constraints.txt -e '.[structured]')")
        import xgrammar

        with self._opening:
            if self._compiler is None:
                info, special = _vocabulary(self.directory, self._vocab_size)
                self._vocabulary = Vocabulary(info.decoded_vocab, special)
                self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def has(self, grammar: Grammar) -> bool:
        """Whether it is compiled."""
        with self._lock:
            return _key(grammar) in self._compiled

    def check(self, grammar: Grammar, generated_token_ids: Iterable[int] = ()) -> None:
        """Compile it, try it, and follow it along a completion; raises GrammarError if nothing can follow, or too slowly.

        What a structural tag is made of is tried by itself: no text at random gets as far as each of its parts.
        """
        if grammar.kind == "structural_tag":
            for kind, text in parts_of(grammar.text).grammars:
                self._find(replace(grammar, kind=kind, text=text), tries=True)
        self._find(grammar, tries=True)
        constraint = self.constraint(grammar, generated_token_ids)
        allowed = constraint.allowed()
        if constraint.is_broken:
            raise GrammarError("the tokens given are not the beginning of a text that it allows")
        if allowed is not None and not allowed.any():
            raise GrammarError("no text fits it that this model's tokens can write")

    def constraint(self, grammar: Grammar, generated_token_ids: Iterable[int] = ()) -> Constraint:
        """What a completion that begins with these tokens may go on with. Compiles, in this thread, what has been forgotten."""
        try:
            compiled = self._find(grammar)
        except GrammarError:
            return Constraint(None, self._vocabulary, self._vocab_size, self._vocabulary.of_text)
        constraint = self._constraint(compiled, grammar)
        for token_id in generated_token_ids:
            constraint.add(token_id)
        return constraint

    def _constraint(self, compiled: xgrammar.CompiledGrammar, grammar: Grammar) -> Constraint:
        from xgrammar import GrammarMatcher

        matcher = GrammarMatcher(compiled, override_stop_tokens=[*grammar.end_token_ids])
        parts = parts_of(grammar.text if grammar.kind == "structural_tag" else "")
        is_json = parts.has_json or grammar.kind == "json_schema"
        usable = self._vocabulary.of_json if is_json else self._vocabulary.of_text
        named = self._vocabulary.named(parts.token_ids.union(grammar.end_token_ids))
        return Constraint(matcher, self._vocabulary, self._vocab_size, usable | named)

    def _try(self, compiled: xgrammar.CompiledGrammar, grammar: Grammar) -> None:
        """Follow a few texts; raises GrammarError where that takes so long that a step would wait for it.

        One that can read a text in many ways may take twice as long for each token as for the one before.
        """
        began_s, adds_s = time.thread_time(), [0.0] * _WALKS
        for walk in range(_WALKS):
            rng, constraint = random.Random(walk), self._constraint(compiled, grammar)
            for num_tokens in range(_WALK_TOKENS):
                allowed = constraint.allowed()
                if time.thread_time() - began_s > _WALKS_S:
                    raise GrammarError(
                        f"it can be read in too many ways: {num_tokens} tokens took {_WALKS_S:g} s to follow"
                    )
                if allowed is None:
                    break
                allowed[[*grammar.end_token_ids]] = False  # so that it becomes long
                ids = np.flatnonzero(allowed)
                if not len(ids):
                    break
                token_id, adding_s = int(ids[rng.randrange(len(ids))]), time.thread_time()
                constraint.add(token_id)
                adds_s[walk] += time.thread_time() - adding_s
        if (add_s := min(adds_s) / _WALK_TOKENS) > ADD_S:
            raise GrammarError(
                f"it can be read in too many ways: a token took {1000 * add_s:.1f} ms to follow, more than {1000 * ADD_S:g}"
            )

    def _find(self, grammar: Grammar, *, tries: bool = False) -> xgrammar.CompiledGrammar:
        key = _key(grammar)
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return self._compiled[key]
        self.open()
        assert self._compiler is not None
        compiled = _compile(self._compiler, grammar)
        if tries:
            self._try(compiled, grammar)
        with self._lock:
            if key not in self._compiled:  # another thread may have been sooner
                self._compiled[key] = compiled
                self._compiled_bytes += compiled.memory_size_bytes
            while self._compiled_bytes > self._cache_bytes and len(self._compiled) > 1:
                _, oldest = self._compiled.popitem(last=False)
                self._compiled_bytes -= oldest.memory_size_bytes
        return compiled


def _key(grammar: Grammar) -> tuple[str, str, bool]:
    return grammar.kind, grammar.text, grammar.is_compact


def _compile(compiler: xgrammar.GrammarCompiler, grammar: Grammar) -> xgrammar.CompiledGrammar:
    try:
        match grammar.kind:
            case "json_schema":
                blanks = None if grammar.is_compact else _MAX_BLANKS
                return compiler.compile_json_schema(
                    grammar.text, any_whitespace=not grammar.is_compact, max_whitespace_cnt=blanks
                )
            case "regex":
                return compiler.compile_regex(grammar.text)
            case "ebnf":
                return compiler.compile_grammar(grammar.text)
            case "structural_tag":
                return compiler.compile_structural_tag(grammar.text)
    except _FAULTS as error:  # of its C++: behind a time and a line of its source
        first = next((line for line in str(error).split("\n") if line), "")
        told = first.split(": ", 1)[-1] if first.startswith("[") else first
        raise GrammarError(told.rstrip(".") or "it cannot be compiled") from error


def _vocabulary(directory: Path, vocab_size: int) -> tuple[xgrammar.TokenizerInfo, set[int]]:
    """What tokenizer.json has, and which of it is special; raises GrammarError where there is none."""
    import xgrammar

    try:
        tokenizer = Tokenizer.from_buffer((directory / "tokenizer.json").read_bytes())
    except (OSError, ValueError) as error:
        raise GrammarError("this node's model directory has no tokenizer.json that can be read") from error
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    special |= _made_special(directory, tokenizer)
    # Special tokens are not shown, so they must not stand for what they spell; but a grammar may name them, which xgrammar lets
    # nobody do who has no text. So they are a byte that is in no text. What has none is never allowed.
    kind = _vocab_type(tokenizer)
    vocab = [
        _NO_TEXT[kind.name] if token_id in special else tokenizer.id_to_token(token_id) or ""
        for token_id in range(vocab_size)
    ]
    return xgrammar.TokenizerInfo(vocab, kind, vocab_size=vocab_size, stop_token_ids=[]), special


def _made_special(directory: Path, tokenizer: Tokenizer) -> set[int]:
    """By files whose word is the last with routers (router/added_tokens.py), which refuse what is no such file."""
    try:
        settings = _told(directory / "tokenizer_config.json")
        if "added_tokens_decoder" not in settings:
            lists = {name: settings[name] for name in _FURTHER if settings.get(name)}
            settings |= _told(directory / "special_tokens_map.json") | lists
        told = settings.get("added_tokens_decoder") or {}
        ids = {int(token_id) for token_id, token in told.items() if token.get("special") is True}
        named = [tokenizer.token_to_id(content) for content in _named(settings)]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return set()
    return ids.union(token_id for token_id in named if token_id is not None)


def _told(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_bytes())) if path.exists() else {}


def _named(settings: Mapping[str, Any]) -> set[str]:
    further = settings.get(_FURTHER[0]) or settings.get(_FURTHER[1]) or []
    values = [told for name, told in settings.items() if name.endswith("_token")]
    values += further.values() if isinstance(further, dict) else further
    tokens = [told.get("content") if isinstance(told, dict) else told for told in values]
    return {token for token in tokens if isinstance(token, str)}


def _vocab_type(tokenizer: Tokenizer) -> xgrammar.VocabType:
    """How the vocabulary writes bytes, found out by asking it for a letter."""
    from xgrammar import VocabType

    if _decodes(tokenizer, "Ġ", " "):
        return VocabType.BYTE_LEVEL
    if _decodes(tokenizer, "<0x41>", "A") or _marks_blanks(tokenizer):
        return VocabType.BYTE_FALLBACK
    return VocabType.RAW


def _marks_blanks(tokenizer: Tokenizer) -> bool:
    """Whether `▁` stands for a blank, also where no token is a byte."""
    marked = next((token_id for token, token_id in tokenizer.get_vocab().items() if token.startswith("▁")), None)
    return marked is not None and "▁" not in tokenizer.decode([marked, marked])


def _decodes(tokenizer: Tokenizer, token: str, text: str) -> bool:
    token_id = tokenizer.token_to_id(token)
    return token_id is not None and tokenizer.decode([token_id]) == text
