"""The random-weight directory: exact Hugging Face layout, by seed, and never over something else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import engine.random_weights
from engine.batch import Segment, build_batch
from engine.byte_tokenizer import BEGIN_OF_TEXT, END_OF_TEXT, MESSAGE_END
from engine.kv_memory import KvMemory
from engine.make_model import main
from engine.model import Model, load_model
from engine.model_config import ARCHITECTURES
from engine.model_sizes import SIZES
from tests.engine_torch.conftest import ModelDirs

TINY = [name for name in SIZES if name.endswith("-tiny")]


def greedy(model: Model, prompt: bytes, num_tokens: int) -> list[int]:
    """What the model says to a prompt."""
    kv = KvMemory(model.config, 16, 20, model.dtype)
    tokens = [BEGIN_OF_TEXT, *prompt]
    start = 0
    while len(tokens) <= len(prompt) + num_tokens:
        logits = model.forward(build_batch([Segment(tokens[start:], start, range(20), 1)], 16), kv.tensor)
        start = len(tokens)
        tokens.append(int(logits.argmax()))
    return tokens[1 + len(prompt) :]


@pytest.mark.covers("M03")
def test_transformers_loads_the_directory_with_tokenizer_and_chat_template(model_dirs: ModelDirs) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model_dir = model_dirs()
    model, report = AutoModelForCausalLM.from_pretrained(model_dir, output_loading_info=True)
    assert not any(report.values())  # nothing missing, unexpected or mismatched
    assert model.generation_config.eos_token_id == [END_OF_TEXT, MESSAGE_END]
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    assert len(tokenizer) == model.config.vocab_size
    text = "Grüße, 世界 🙂\n\ttabs"
    ids = tokenizer(text).input_ids
    assert ids == [BEGIN_OF_TEXT, *text.encode()]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|begin_of_text|><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(chat, add_special_tokens=False).input_ids.count(BEGIN_OF_TEXT) == 1


def test_every_byte_is_one_token(model_dirs: ModelDirs) -> None:
    tokenizer = Tokenizer.from_file(str(model_dirs() / "tokenizer.json"))
    text = bytes(range(128)).decode() + "".join(map(chr, range(0xA0, 0x800)))
    assert tokenizer.encode(text, add_special_tokens=False).ids == list(text.encode())


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    for name, seed in (("a", "5"), ("b", "5"), ("c", "6")):
        assert main(["--seed", seed, "--out", str(tmp_path / name)]) == 0
    a, b, c = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in "abc")
    assert a == b
    assert [name for name in a if a[name] != c[name]] == ["model.safetensors"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_asked_dtype_is_what_auto_loads(model_dirs: ModelDirs, dtype: str) -> None:
    assert load_model(model_dirs("group4", dtype), "auto").dtype == dtype


def test_a_directory_with_something_in_it_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes").write_text("mine")
    assert main(["--out", str(tmp_path)]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]
    error = capsys.readouterr().err
    assert "is not an empty directory" in error and error.count("\n") == 1


def test_a_directory_that_cannot_be_made_is_one_line_that_names_the_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("")
    out = tmp_path / "taken" / "model"
    assert main(["--out", str(out)]) == 2
    assert capsys.readouterr().err == f"baton model make: --out {out}: cannot be written: Not a directory\n"


@pytest.mark.parametrize(
    "arguments", [[], ["--out", "x", "--dtype", "fp8"], ["--out", "x", "--like", "gpt"], ["--out", "x", "--seed", "-1"]]
)
def test_wrong_arguments_end_in_one_line_and_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_seed_that_is_none_is_told_with_its_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("x", "-1", str(1 << 63), "1.5"):
        with pytest.raises(SystemExit):
            main(["--out", "x", f"--seed={text}"])
        assert f"--seed: must be a whole number from 0 to 2^63 - 1, not {text!r}" in capsys.readouterr().err


def test_who_is_interrupted_leaves_no_half_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"

    def interrupted(*_: object) -> None:
        assert (out / "config.json").exists(), "in the middle"
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(engine.random_weights, "draw_weights", interrupted)
        assert main(["--out", str(out)]) == 130
    assert capsys.readouterr().err == f"baton model make: interrupted; nothing is left in {out}\n"
    assert not [*out.iterdir()]
    assert main(["--out", str(out)]) == 0


def test_making_and_loading_a_model_never_imports_transformers() -> None:
    program = "import engine.make_model, engine.runner, engine.probe, engine.fingerprint, sys; print('transformers' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"


@pytest.mark.covers("M01", "M03")
@pytest.mark.parametrize("like", TINY)
def test_each_family_is_one_that_transformers_loads_and_it_does_not_repeat_itself(tmp_path: Path, like: str) -> None:
    from transformers import AutoModelForCausalLM

    out = tmp_path / like
    assert main(["--like", like, "--out", str(out)]) == 0
    theirs, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values())
    assert theirs.config.architectures == [SIZES[like].architecture]
    assert Tokenizer.from_file(str(out / "tokenizer.json")).get_vocab_size() == theirs.config.vocab_size
    assert sum(path.stat().st_size for path in out.iterdir()) < 4 << 20
    model = load_model(out, "auto")
    completions = [greedy(model, prompt, 100) for prompt in (b"Once upon a time", b"The quick brown fox", b"zz")]
    assert len({token for completion in completions for token in completion}) > 40
    assert len({tuple(completion) for completion in completions}) == 3


def test_every_served_architecture_can_be_made() -> None:
    assert {size.architecture for size in SIZES.values()} == set(ARCHITECTURES)


def test_smollm2_has_its_shape_and_dtype_and_tells_how_far_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "smollm2"
    assert main(["--like", "smollm2-135m", "--out", str(out)]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "baton model make: writing 269 MB" and len(lines) > 5
    model = load_model(out, "auto")
    config = model.config
    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads) == (576, 30, 9, 3)
    assert (config.vocab_size, config.rope.theta, config.ties_embeddings, model.dtype) == (49152, 1e5, True, "bf16")
    completion = greedy(model, b"Once upon a time", 40)
    assert len(set(completion)) > 20
    text = Tokenizer.from_file(str(out / "tokenizer.json")).decode(completion)
    assert len(text) > 100 and text.isprintable()
