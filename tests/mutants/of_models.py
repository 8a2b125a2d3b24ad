"""Bugs of what is read of a model directory: settings, tensors, what tells two models apart."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_DIRECTORY: Final = ("tests/engine_torch/test_model_directory.py",)
_TOKENIZER: Final = ("tests/router/test_tokenizer_files.py",)
_TEXT: Final = ("tests/router/test_text.py",)
_FINGERPRINT: Final = ("tests/engine_torch/test_fingerprint.py",)

_TOKENIZERS: Final = ("tests/router/test_tokenizers_alike.py",)

MUTANTS: Final = (
    Mutant(
        "another-tokenizer-dialed",
        "A node whose ids mean something else gets work: its text is wrong in silence.",
        "router/nodes.py",
        '        node.is_left_out = "" != node.entry.tokenizer != self._tokenizer != ""\n',
        "        node.is_left_out = False\n",
        _TOKENIZERS,
    ),
    Mutant(
        "unknown-tokenizer-differs",
        "A node that tells no digest, as those of before, is left out by every router.",
        "router/nodes.py",
        '        node.is_left_out = "" != node.entry.tokenizer != self._tokenizer != ""\n',
        "        node.is_left_out = node.entry.tokenizer != self._tokenizer\n",
        _TOKENIZERS,
    ),
    Mutant(
        "tensors-between-samples",
        "Two models whose changed matrices lie between the samples of a file have one fingerprint, and mix their KV.",
        "engine/fingerprint.py",
        "        parts += [\n",
        "        parts = parts or [\n",
        _FINGERPRINT,
    ),
    Mutant(
        "another-head-ignored",
        "A stored head that is not the embedding it is tied to is dropped in silence.",
        "engine/weights.py",
        "            if not torch.equal(rows[part].float(), others[part].float()):\n",
        "            if rows[part].shape != others[part].shape:\n",
        _DIRECTORY,
    ),
    Mutant(
        "rows-that-see-what-follows",
        "A model whose rows see all of a text is computed as if they saw what is before them.",
        "engine/model_config.py",
        '    if not source.flag("is_causal", True):\n',
        '    if source.flag("is_causal", True) is None:\n',
        _DIRECTORY,
    ),
    Mutant(
        "blanks-stay-with-their-token",
        "What tokenizer_config.json says of a token that tokenizer.json has, too, is not heard.",
        "router/added_tokens.py",
        "            told_tokens.append(token)\n",
        "            continue\n",
        _TOKENIZER,
    ),
    Mutant(
        "tools-without-their-template",
        "Tools are written by the template that is for conversations without any.",
        "router/chat_template.py",
        """named.get("tool_use") or source""",
        "source",
        _TOKENIZER,
    ),
    Mutant(
        "older-directories-begin-nowhere",
        "Where only special_tokens_map.json names the token that a conversation begins with, it has none.",
        "router/text.py",
        """        if "added_tokens_decoder" not in settings:""",
        """        if "added_tokens_decoder" in settings:""",
        _TOKENIZER,
    ),
    Mutant(
        "a-model-changed-while-read",
        "A model that is replaced while a node reads it lends the node its name, under which the old one's KV is then found.",
        "node/assembly.py",
        "        if files_state(config.model) == state:",
        "        if files_state(config.model):",
        _FINGERPRINT,
    ),
    Mutant(
        "run-cut-within-a-character",
        "Of replacement characters in a row the first bytes of what follows are given out as some more.",
        "router/detokenizer.py",
        "        for num_behind in range(1, _CHARACTER_TAIL + 1):\n            #",
        "        for num_behind in range(1, _CHARACTER_TAIL):\n            #",
        _TEXT,
    ),
    Mutant(
        "texts-of-unknown-tokens",
        "A text whose tokenizer has a token that the model has not is sent to a node, and ends as an error of the server.",
        "router/intake.py",
        """return _Prompt("messages", self._known("messages", token_ids), None)""",
        """return _Prompt("messages", token_ids, None)""",
        _TOKENIZER,
    ),
    Mutant(
        "hidden-tokens-asked-for",
        "A grammar asks for a token that tokenizer_config.json hides, and the text lacks it.",
        "engine/grammars.py",
        "    special |= _made_special(directory, tokenizer)\n",
        "",
        _DIRECTORY,
    ),
    Mutant(
        "the-tokenizers-end-is-none",
        "A chat model whose tokenizer alone knows the end of a turn goes on behind it.",
        "router/text.py",
        "return tuple(dict.fromkeys([*ids, *([own] if own is not None and own < self.vocab_size else [])]))",
        "return tuple(ids)",
        _TEXT,
    ),
    Mutant(
        "angles-of-another-torch-pass",
        "Nodes whose rotations differ in the last bit hand KV to each other.",
        "engine/model.py",
        'return f"{self.kernels.name}-{self.angles.digest}"',
        "return self.kernels.name",
        ("tests/engine_torch/test_angles.py",),
    ),
)
