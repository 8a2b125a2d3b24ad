"""Every family from the directory that transformers wrote: logits equal to its own, bits that hold, tokens that agree."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.batch import Segment, build_batch
from engine.config_values import ModelError
from engine.kv_memory import KvMemory
from engine.model import Model, load_model
from engine.model_config import read_model_config
from engine.probe import find_inexactness
from tests.engine_torch.hugging_face import VARIANTS, VOCAB_SIZE, make_directory, write_like_transformers_4

# Of the row's largest logit: M01's bounds, and for fp16, which no row names, four bits below bf16's three fewer.
BOUNDS = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 3e-3}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NUM_TOKENS = 150  # past every window and three attention tiles
CUTS = {
    "prefill": [0, NUM_TOKENS],
    "chunked prefill": [0, 50, 64, 65, 130, NUM_TOKENS],
    "decode": [0, 60, *range(61, NUM_TOKENS + 1)],
}
BLOCK_SIZE = 16
BLOCKS = [7, 2, 9, 0, 4, 1, 3, 8, 6, 5]

Directories = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    """Give the directory of (variant, dtype), made at first use. Read only."""

    @cache
    def find(name: str, dtype: str) -> Path:
        return make_directory(VARIANTS[name], DTYPES[dtype], tmp_path_factory.mktemp("families") / f"{name}-{dtype}")

    return find


@cache
def oracle(model_dir: Path) -> Any:
    """Load by transformers, in the directory's own dtype."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto")


def random_prompt() -> list[int]:
    seed = torch.seed()
    print(f"prompt seed {seed}")  # noqa: T201 - pytest shows it with a failure
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,), generator=generator).tolist()


def our_logits(model: Model, prompt: list[int], cuts: list[int]) -> Tensor:
    kv = KvMemory(model.config, BLOCK_SIZE, len(BLOCKS), model.dtype)
    segments = [Segment(prompt[start:end], start, BLOCKS, end - start) for start, end in pairwise(cuts)]
    return torch.cat([model.forward(build_batch([segment], BLOCK_SIZE), kv.tensor) for segment in segments])


def distance(model_dir: Path, prompt: list[int], ours: Tensor) -> float:
    """The largest difference from transformers, of its row's largest logit."""
    with torch.no_grad():
        theirs = oracle(model_dir)(torch.tensor([prompt])).logits[0].float()
    return float(((ours.float() - theirs).abs().amax(-1) / theirs.abs().amax(-1)).max())


@pytest.mark.covers("M01", "M02")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers_in_prefill_chunks_and_decode(
    directories: Directories, name: str, dtype: str
) -> None:
    model_dir = directories(name, dtype)
    model = load_model(model_dir, "auto")
    assert model.dtype == dtype
    prompt = random_prompt()
    for how, cuts in CUTS.items():
        found = distance(model_dir, prompt, our_logits(model, prompt, cuts))
        assert found <= BOUNDS[dtype], how


@pytest.mark.covers("M01", "M02")
@pytest.mark.parametrize("kernels", ["cpu", "torch"])
@pytest.mark.parametrize("name", ["llama-3.2", "qwen2", "qwen3", "mistral-v0.1"])
def test_fp16_logits_equal_transformers_and_their_bits_are_a_rows_own(
    directories: Directories, name: str, kernels: str
) -> None:
    model_dir = directories(name, "fp16")
    model = load_model(model_dir, "fp16", kernels)
    prompt = random_prompt()
    for how, cuts in CUTS.items():
        found = distance(model_dir, prompt, our_logits(model, prompt, cuts))
        assert found <= BOUNDS["fp16"], how
    assert load_model(model_dir, "auto").dtype == "fp32"
    assert find_inexactness(model) is None


@pytest.mark.covers("M01")
@pytest.mark.parametrize("name", VARIANTS)
def test_the_keys_of_transformers_4_mean_the_same_model(directories: Directories, tmp_path: Path, name: str) -> None:
    made = make_directory(VARIANTS[name], torch.float32, tmp_path / "model")
    new_config = load_model(made, "auto").config
    write_like_transformers_4(made)
    assert load_model(made, "auto").config == new_config


@pytest.mark.covers("M06")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", VARIANTS)
def test_bits_hold_for_chunks_and_batch_mates_and_threads(directories: Directories, name: str, dtype: str) -> None:
    model = load_model(directories(name, dtype), "auto")
    prompt, mate = random_prompt(), random_prompt()
    whole = our_logits(model, prompt, CUTS["prefill"])
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        assert torch.equal(our_logits(model, prompt, CUTS["chunked prefill"]), whole)
        if num_threads == 1:  # many small steps: on a busy machine two threads wait for each other in each
            assert torch.equal(our_logits(model, prompt, CUTS["decode"]), whole)
        kv = KvMemory(model.config, BLOCK_SIZE, 2 * len(BLOCKS), model.dtype)
        kv.tensor.fill_(float("nan"))
        mates_blocks = [block + len(BLOCKS) for block in BLOCKS]
        done = mates_done = 0
        for count, mates_count in ((1, 40), (63, 1), (1, 1), (84, 107), (1, 1)):
            segments = [
                Segment(mate[mates_done : mates_done + mates_count], mates_done, mates_blocks, 1),
                Segment(prompt[done : done + count], done, BLOCKS, count),
            ]
            rows = model.forward(build_batch(segments, BLOCK_SIZE), kv.tensor)
            assert torch.equal(rows[1:], whole[done : done + count])
            done, mates_done = done + count, mates_done + mates_count
        assert (done, mates_done) == (NUM_TOKENS, NUM_TOKENS)
        assert find_inexactness(model) is None


@pytest.mark.covers("M01")
@pytest.mark.parametrize("name", ["qwen2-window", "qwen3-layer-types", "mistral-v0.1"])
def test_rows_past_the_window_do_not_see_what_lies_before_it(
    directories: Directories, tmp_path: Path, name: str
) -> None:
    """Else equal logits would prove nothing about windows."""
    model_dir = directories(name, "fp32")
    wide = tmp_path / "wide"
    wide.mkdir()
    for path in model_dir.iterdir():
        (wide / path.name).symlink_to(path)
    config = json.loads((model_dir / "config.json").read_text())
    (wide / "config.json").unlink()
    (wide / "config.json").write_text(json.dumps(config | {"sliding_window": 10_000}))
    prompt = random_prompt()
    narrow_rows, wide_rows = (
        our_logits(load_model(path, "auto"), prompt, CUTS["prefill"]) for path in (model_dir, wide)
    )
    window = config["sliding_window"]
    assert torch.equal(narrow_rows[:window], wide_rows[:window])
    assert not torch.isclose(narrow_rows[window:], wide_rows[window:]).all(-1).any()


@pytest.mark.covers("M02")
def test_variants_come_in_one_file_and_in_shards(directories: Directories) -> None:
    """What save_pretrained makes of the sizes above."""
    num_files = {name: len(list(directories(name, "fp32").glob("*.safetensors"))) for name in VARIANTS}
    assert num_files["llama"] == num_files["qwen2"] == num_files["mistral-v0.3"] == 1
    assert all(num_files[name] > 2 for name in ("llama-biases", "qwen2-window", "qwen3", "mistral-v0.1"))


LAYER = "model.layers.1.self_attn"


@pytest.mark.covers("M02")
@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("qwen2", {f"{LAYER}.k_proj.bias": None}, rf"tensor {LAYER}.k_proj.bias is missing"),
        ("qwen2", {f"{LAYER}.o_proj.bias": torch.zeros(64)}, rf"tensor {LAYER}.o_proj.bias is extra"),
        ("qwen3", {f"{LAYER}.q_norm.weight": torch.ones(16)}, rf"tensor {LAYER}.q_norm.weight has shape \[16\]"),
        ("qwen3", {f"{LAYER}.k_norm.weight": None}, rf"tensor {LAYER}.k_norm.weight is missing"),
        ("mistral-v0.3", {f"{LAYER}.q_proj.bias": torch.zeros(128)}, rf"tensor {LAYER}.q_proj.bias is extra"),
        ("llama", {f"{LAYER}.q_norm.weight": torch.ones(16)}, rf"tensor {LAYER}.q_norm.weight is extra"),
        ("llama", {f"{LAYER}.rotary_emb.inv_freq": torch.ones(8), "model.rotary_emb.inv_freq": torch.ones(8)}, ""),
    ],
    ids=str,
)
def test_a_tensor_that_a_family_lacks_or_does_not_know_is_named(
    directories: Directories, tmp_path: Path, name: str, changes: dict[str, Tensor | None], sentence: str
) -> None:
    source = directories(name, "fp32")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    tensors = {key: tensor for path in source.glob("*.safetensors") for key, tensor in load_file(path).items()}
    kept = {key: tensor for key, tensor in (tensors | changes).items() if tensor is not None}
    save_file(kept, tmp_path / "model.safetensors")
    if sentence:
        with pytest.raises(ModelError, match=sentence):
            load_model(tmp_path, "fp32")
    else:
        assert load_model(tmp_path, "fp32").config == load_model(source, "fp32").config


@pytest.mark.covers("M03")
def test_settings_of_a_family_that_are_left_out_are_those_of_transformers(tmp_path: Path) -> None:
    """Its configuration classes fill in what an exporter did not write."""
    from transformers import AutoConfig

    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 2, "vocab_size": 260}
    for model_type in ("llama", "qwen2", "qwen3", "mistral"):
        names = {"model_type": model_type, "architectures": [f"{model_type.capitalize()}ForCausalLM"]}
        (tmp_path / "config.json").write_text(json.dumps(sizes | names | {"intermediate_size": 64}))
        ours, theirs = read_model_config(tmp_path), AutoConfig.from_pretrained(tmp_path)
        assert ours.num_kv_heads == theirs.num_key_value_heads
        assert ours.head_dim == getattr(theirs, "head_dim", 128)
        assert ours.max_position_embeddings == theirs.max_position_embeddings
        assert (ours.rms_norm_eps, ours.ties_embeddings) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
        assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
        assert ours.windows == (getattr(theirs, "sliding_window", None),) * 2


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        (None, 4096),
        ({"type": "linear", "factor": 4.0}, 16384),
        ({"type": "linear", "factor": 0.5}, 4096),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 1024,
            },
            4096,
        ),
    ],
)
def test_a_model_may_be_as_long_as_its_scaling_was_made_for(
    own_model_dir: Path, rope: dict[str, Any] | None, longest: int
) -> None:
    path = own_model_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 4096, "rope_scaling": rope}))
    assert read_model_config(own_model_dir).max_position_embeddings == longest
