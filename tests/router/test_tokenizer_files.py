"""Whichever of its files a model's directory says it in, a prompt has the token ids that transformers gives it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from router.chat_template import ModelDirectoryError
from router.text import ModelText
from tests.router.live_router import MODEL_NAME, live_router
from tests.router.tiny_model import VOCAB_SIZE, write_model_text

TEXTS: Final = ("hi <turn> there", "<s>x</s>", " <think> a", "é<turn>\n", "a[PAD]b")
TEMPLATE: Final = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
TOOL: Final = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CHAT: Final = [{"role": "user", "content": "hi"}]


def added(content: str, **flags: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized", "special"), False)
    return {"content": content} | plain | flags


def settings(directory: Path, **changes: Any) -> None:
    """Change keys of tokenizer_config.json; None removes one."""
    path = directory / "tokenizer_config.json"
    told = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"} | changes
    path.write_text(json.dumps({key: value for key, value in told.items() if value is not None}))


def write(directory: Path, **files: Any) -> None:
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))


def several_templates(directory: Path) -> None:
    settings(directory, chat_template="not this one")
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | length }} tools: " + TEMPLATE)


def named_by_the_map(directory: Path) -> None:
    settings(directory, bos_token="x", eos_token=None)
    write(directory, special_tokens_map={"bos_token": "<s>", "eos_token": added("</s>")})


def named_in_both(directory: Path) -> None:
    settings(directory, added_tokens_decoder={"256": added("<s>", special=True)})
    write(directory, special_tokens_map={"bos_token": "</s>"})


def named(directory: Path, **names: Any) -> None:
    """Its tokenizer.json has ids for special tokens, and adds none."""
    tokenizer = json.loads((directory / "tokenizer.json").read_text()) | {"added_tokens": []}
    write(directory, tokenizer=tokenizer)
    settings(directory, **names)


def named_by_the_map_alone(directory: Path) -> None:
    named(directory, bos_token=None, eos_token=None)
    told = {"bos_token": "<s>", "eos_token": added("</s>"), "additional_special_tokens": ["<turn>"]}
    write(directory, special_tokens_map=told)


def named_in_two_lists(directory: Path) -> None:
    named(directory, additional_special_tokens=["<turn>"])
    write(directory, special_tokens_map={"additional_special_tokens": ["<think>"]})


def named_long_ago(directory: Path) -> None:
    """What is special is cut out before a text is normalized: `<think>` is none of these."""
    tokenizer = json.loads((directory / "tokenizer.json").read_text()) | {"normalizer": {"type": "Lowercase"}}
    write(directory, tokenizer=tokenizer, added_tokens={"<THINK>": 261, "<Turn>": 262})
    settings(directory, pad_token="<THINK>")


def named_but_not_special(directory: Path) -> None:
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        token["special"] = False
    write(directory, tokenizer=tokenizer, config={"vocab_size": VOCAB_SIZE, "model_type": "qwen2"})
    settings(directory, additional_special_tokens=["<turn>"])


WAYS: Final[dict[str, Callable[[Path], None]]] = {
    "as it is": settings,
    "split": lambda directory: settings(directory, split_special_tokens=True),
    "named by the map": named_by_the_map,
    "named in both": named_in_both,
    "blanks": lambda directory: settings(
        directory, added_tokens_decoder={"258": added("<turn>", lstrip=True, rstrip=True)}
    ),
    "shown": lambda directory: settings(directory, added_tokens_decoder={"258": added("<turn>")}),
    "one more": lambda directory: settings(directory, added_tokens_decoder={"261": added("<think>")}),
    "one more, long ago": lambda directory: write(directory, added_tokens={"<think>": 261}),
    "named": lambda directory: named(directory, additional_special_tokens=["<turn>"]),
    "named with blanks": lambda directory: named(
        directory, bos_token=added("<s>", lstrip=True, rstrip=True) | {"__type": "AddedToken"}
    ),
    "named by keys of its own": lambda directory: named(
        directory, turn_token="<turn>", extra_special_tokens={"cot_token": "th"}
    ),
    "named by the map alone": named_by_the_map_alone,
    "named in two lists": named_in_two_lists,
    "named, and without an id": lambda directory: settings(
        directory, additional_special_tokens=["a"], pad_token="[PAD]", sep_token="<think>"
    ),
    "named long ago": named_long_ago,
    "named, but not special": named_but_not_special,
    "begins none": lambda directory: settings(directory, add_bos_token=False),
    "templates in files": several_templates,
    "templates by name": lambda directory: settings(
        directory, chat_template={"default": TEMPLATE, "tool_use": "tools " + TEMPLATE}
    ),
}


@pytest.mark.covers("M03")
@pytest.mark.parametrize("way", WAYS)
def test_prompts_have_the_ids_that_transformers_gives_them(tmp_path: Path, way: str) -> None:
    from transformers import AutoTokenizer

    directory = write_model_text(tmp_path)
    write(directory, config={"vocab_size": VOCAB_SIZE, "model_type": "llama"})
    settings(directory)
    WAYS[way](directory)
    ours, theirs = ModelText(directory), AutoTokenizer.from_pretrained(directory)
    for text in TEXTS:
        token_ids = ours.encode_prompt(text)
        assert token_ids == theirs.encode(text)
        assert ours.decode(token_ids) == theirs.decode(token_ids, skip_special_tokens=True)
        detokenizer = ours.detokenizer()
        assert detokenizer.push(token_ids) + detokenizer.finish() == ours.decode(token_ids)
    for tools in ([], [TOOL]):
        chat = theirs.apply_chat_template(CHAT, tools=tools or None, return_dict=False)
        assert ours.encode_chat(CHAT, tools, add_generation_prompt=False) == chat


@pytest.mark.parametrize("legacy", [None, False, True])
def test_the_tokenizers_file_is_taken_as_it_is_though_transformers_builds_llama_2s_anew(
    tmp_path: Path, legacy: bool | None
) -> None:
    from transformers import AutoTokenizer

    blanks = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    tokens = ("<unk>", "<s>", "</s>", "▁", "a", "▁a")
    tokenizer = {
        "added_tokens": [added(token, special=True) | {"id": index} for index, token in enumerate(tokens[:3])],
        "normalizer": {"type": "Sequence", "normalizers": blanks},
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [["▁", "a"]],
            "unk_token": "<unk>",
        },
    }
    directory = write_model_text(tmp_path)
    write(directory, tokenizer=tokenizer, config={"vocab_size": 6, "model_type": "llama"}, generation_config={})
    settings(directory, tokenizer_class="LlamaTokenizer", legacy=legacy)
    text = "<s> a</s> a"
    assert ModelText(directory).encode_prompt(text) == [1, 3, 5, 2, 3, 5]
    assert AutoTokenizer.from_pretrained(directory).encode(text, add_special_tokens=False) != [1, 3, 5, 2, 3, 5]
    settings(directory, tokenizer_class="PreTrainedTokenizerFast")
    assert AutoTokenizer.from_pretrained(directory).encode(text) == [1, 3, 5, 2, 3, 5]


@pytest.mark.covers("M03")
def test_a_token_that_the_model_cannot_embed_is_text(tmp_path: Path) -> None:
    directory = write_model_text(tmp_path)
    as_text = ModelText(directory).encode_prompt("a[PAD]b")
    write(directory, added_tokens={"[PAD]": VOCAB_SIZE})
    assert ModelText(directory).encode_prompt("a[PAD]b") == as_text
    settings(directory, pad_token="[PAD]")
    assert ModelText(directory).encode_prompt("a[PAD]b") == as_text


@pytest.mark.covers("M03")
def test_a_named_token_behind_the_last_that_the_model_knows_ends_no_completion(tmp_path: Path) -> None:
    directory = write_model_text(tmp_path)
    write(directory, config={"vocab_size": 261}, generation_config={"eos_token_id": 257})
    settings(directory, eos_token="<end>")
    text = ModelText(directory)
    assert (text.encode_prompt("<end>"), text.stop_token_ids) == ([256, 261], (257,))


@pytest.mark.covers("M03")
@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ({"eos_token": 5}, "eos_token is neither a token's text nor an object with its content and flags"),
        (
            {"additional_special_tokens": ["<s>", ["</s>"]]},
            "extra_special_tokens.1 is neither a token's text nor an object with its content and flags",
        ),
        ({"extra_special_tokens": "<s>"}, "extra_special_tokens is neither a list nor an object of tokens"),
    ],
    ids=str,
)
def test_a_name_of_no_token_is_one_sentence(tmp_path: Path, names: Any, sentence: str) -> None:
    directory = write_model_text(tmp_path)
    settings(directory, **names)
    with pytest.raises(ModelDirectoryError) as failure:
        ModelText(directory)
    assert str(failure.value) == f"{directory}: {sentence}"


@pytest.mark.covers("M03")
@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        ({"300": added("<think>")}, "token '<think>' is to be 300, and would be 261 behind those of tokenizer.json"),
        (["<think>"], "added_tokens_decoder is not an object of tokens by id"),
        ({"261": "<think>"}, "added token '261' is not an id with its content and flags"),
        ({"261": added("<think>") | {"special": "yes"}}, "added token '261' is not an id with its content and flags"),
        ({"last": added("<think>")}, "added token 'last' is not an id with its content and flags"),
        ({"261": {"content": 5}}, "added token '261' is not an id with its content and flags"),
    ],
    ids=str,
)
def test_added_tokens_that_cannot_be_are_one_sentence(tmp_path: Path, told: Any, sentence: str) -> None:
    directory = write_model_text(tmp_path)
    settings(directory, added_tokens_decoder=told)
    with pytest.raises(ModelDirectoryError) as failure:
        ModelText(directory)
    assert str(failure.value) == f"{directory}: {sentence}"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", b"\xff\xfe{}"),
        ("additional_chat_templates/tool_use.jinja", b"\xff"),
        ("tokenizer_config.json", b'{"chat_template": [5]}'),
        ("tokenizer_config.json", b'{"chat_template": 5}'),
        ("tokenizer_config.json", b'{"chat_template": {"default": 5}}'),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default", "template": ["a"]}]}'),
        ("special_tokens_map.json", b"[]"),
        ("tokenizer_config.json", b"[" * 100_000),
        ("chat_template.jinja", b"{{ " + b"(" * 10_000 + b")" * 10_000 + b" }}"),
        ("added_tokens.json", b'{"<think>": "last"}'),
        ("added_tokens.json", b'{"<think>": [1]}'),
        ("added_tokens.json", b'{"<think>": ' + b"9" * 4000 + b"}"),
    ],
)
def test_a_file_that_holds_something_else_is_one_line(tmp_path: Path, name: str, content: bytes) -> None:
    directory = write_model_text(tmp_path)
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / name).write_bytes(content)
    with pytest.raises(ModelDirectoryError) as failure:
        ModelText(directory)
    assert str(directory) in str(failure.value)
    assert "\n" not in str(failure.value)


@pytest.mark.covers("A11")
def test_a_text_with_a_token_that_the_model_does_not_know_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """Padding tokens often are none of the model's: a node would say no more of it than that it cannot be."""
    model = write_model_text(tmp_path)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(added("[PAD]", special=True) | {"id": 261})
    write(model, config={"vocab_size": 261})
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))

    async def run() -> None:
        async with live_router(model) as router:
            for path, fields, name in (
                ("completions", {"prompt": "a[PAD]b"}, "prompt"),
                ("completions", {"prompt": ["a", "[PAD]"]}, "prompt.1"),
                ("chat/completions", {"messages": [{"role": "user", "content": "[PAD]"}]}, "messages"),
            ):
                response = await router.client.post(f"/v1/{path}", json={"model": MODEL_NAME} | fields)
                error = response.json()["error"]
                assert (response.status_code, error["param"]) == (400, name)
                assert error["message"] == f"{name}: has the token '[PAD]', which this model does not know"

    asyncio.run(run())
