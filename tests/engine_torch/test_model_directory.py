"""What is read from a model directory, and the one sentence for each thing that is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models
from torch import Tensor

from engine.batch import Segment, build_batch
from engine.config_values import ModelError
from engine.grammars import Grammars
from engine.kv_memory import KvMemory
from engine.model import load_model
from engine.model_config import MAX_HEAD_DIM, read_model_config
from engine.plan import Grammar
from engine.rope import Angles
from kernels import cpu_library
from tests.engine_torch.conftest import ModelDirs


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys; None removes one."""
    value = json.loads(path.read_text()) if path.exists() else {}
    value.update(changes)
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not None}))


def edit_tensors(model_dir: Path, **changes: Tensor | None) -> None:
    tensors = load_file(model_dir / "model.safetensors")
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, model_dir / "model.safetensors")


def shard(model_dir: Path) -> Path:
    """Split model.safetensors in two, as large models come. Returns the index."""
    tensors = load_file(model_dir / "model.safetensors")
    (model_dir / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file_name, members in files.items():
        save_file({name: tensors[name] for name in members}, model_dir / file_name)
    weight_map = {name: file_name for file_name, members in files.items() for name in members}
    index = model_dir / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def logits(model_dir: Path, dtype: str = "auto") -> Tensor:
    model = load_model(model_dir, dtype)
    kv = KvMemory(model.config, 16, 2, model.dtype)
    return model.forward(build_batch([Segment(range(20), 0, (0, 1), 20)], 16), kv.tensor)


@pytest.mark.covers("M02")
def test_sharded_and_single_files_give_the_same_model(own_model_dir: Path) -> None:
    single = logits(own_model_dir)
    shard(own_model_dir)
    assert torch.equal(logits(own_model_dir), single)


@pytest.mark.covers("M02")
def test_a_tied_head_is_the_embedding_whether_stored_again_or_not(own_model_dir: Path) -> None:
    embedding = load_file(own_model_dir / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(own_model_dir, **{"lm_head.weight": embedding.clone()})
    untied = logits(own_model_dir)
    edit_json(own_model_dir / "config.json", tie_word_embeddings=True)
    assert torch.equal(logits(own_model_dir), untied)
    edit_tensors(own_model_dir, **{"lm_head.weight": None})
    assert torch.equal(logits(own_model_dir), untied)


@pytest.mark.covers("M02")
@pytest.mark.parametrize(
    ("head", "sentence"),
    [
        (
            lambda embedding: embedding.index_fill(0, torch.tensor([259]), 1.0),
            "is not model.embed_tokens.weight, as tie_",
        ),
        (lambda embedding: embedding[:-1].clone(), r"has shape \[259, 32\], config.json asks for \[260, 32\]"),
        (lambda embedding: embedding.to(torch.float8_e4m3fn), "has dtype F8_E4M3"),
    ],
    ids=["other numbers", "fewer rows", "eight bits"],
)
def test_a_head_that_is_stored_and_is_not_what_it_is_tied_to_is_refused(
    own_model_dir: Path, head: Callable[[Tensor], Tensor], sentence: str
) -> None:
    """transformers 5 does not tie it then, 4 did: whoever ignores it says other tokens than one of them."""
    embedding = load_file(own_model_dir / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(own_model_dir, **{"lm_head.weight": head(embedding)})
    edit_json(own_model_dir / "config.json", tie_word_embeddings=True)
    with pytest.raises(ModelError, match=rf"^tensor lm_head.weight {sentence}"):
        load_model(own_model_dir, "fp32")


@pytest.mark.covers("M02")
@pytest.mark.parametrize(
    ("stored", "auto"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.float16, "fp32")], ids=str
)
def test_weights_stored_in_any_of_three_dtypes_load_as_asked(
    own_model_dir: Path, stored: torch.dtype, auto: str
) -> None:
    tensors = load_file(own_model_dir / "model.safetensors")
    edit_tensors(own_model_dir, **{name: tensor.to(stored) for name, tensor in tensors.items()})
    edit_json(own_model_dir / "config.json", torch_dtype=str(stored).removeprefix("torch."))
    assert load_model(own_model_dir, "auto").dtype == auto
    assert logits(own_model_dir, "fp32").dtype == torch.float32
    assert logits(own_model_dir, "bf16").dtype == torch.bfloat16


Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.covers("M02")
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({Q_PROJ: None}, f"tensor {Q_PROJ} is missing"),
        ({Q_PROJ: torch.zeros(32, 31)}, rf"tensor {Q_PROJ} has shape \[32, 31\], config.json asks for \[32, 32\]"),
        (
            {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)},
            "tensor model.layers.0.self_attn.q_proj.bias is extra",
        ),
        ({Q_PROJ: torch.zeros(32, 32, dtype=torch.int8)}, f"tensor {Q_PROJ} has dtype I8"),
    ],
    ids=["missing", "misshapen", "extra", "integer"],
)
def test_a_tensor_that_does_not_fit_is_named(
    own_model_dir: Path, changes: dict[str, Tensor | None], sentence: str
) -> None:
    edit_tensors(own_model_dir, **changes)
    with pytest.raises(ModelError, match=sentence):
        load_model(own_model_dir, "fp32")


@pytest.mark.covers("M02")
def test_a_missing_shard_and_a_shard_elsewhere_are_named(own_model_dir: Path) -> None:
    index = shard(own_model_dir)
    (own_model_dir / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"names model-00002-of-00002.safetensors, which does not exist"):
        load_model(own_model_dir, "fp32")
    edit_json(index, weight_map={"lm_head.weight": "../other/model.safetensors"})
    with pytest.raises(ModelError, match=r"puts tensor lm_head.weight into '../other/model.safetensors'"):
        load_model(own_model_dir, "fp32")


@pytest.mark.covers("M02")
def test_an_index_that_puts_a_tensor_where_it_is_not_is_refused(own_model_dir: Path) -> None:
    index = shard(own_model_dir)
    weight_map = json.loads(index.read_text())["weight_map"]
    name = min(weight_map)
    edit_json(index, weight_map={**weight_map, name: "model-00002-of-00002.safetensors"})
    with pytest.raises(
        ModelError, match=rf"tensor {name} is in model-00001-of-00002.safetensors, .* puts it into model-00002"
    ):
        load_model(own_model_dir, "fp32")
    edit_json(index, weight_map={**weight_map, "more.weight": "model-00002-of-00002.safetensors"})
    with pytest.raises(ModelError, match=r"tensor more.weight is not in model-00002-of-00002.safetensors"):
        load_model(own_model_dir, "fp32")


@pytest.mark.covers("M02")
def test_one_file_beside_an_index_of_others_is_one_too_many(own_model_dir: Path) -> None:
    """Left behind by a model that was here before: transformers would read the one file, vLLM the others."""
    before = (own_model_dir / "model.safetensors").read_bytes()
    shard(own_model_dir)
    (own_model_dir / "model.safetensors").write_bytes(before)
    with pytest.raises(ModelError, match=r"has model.safetensors, and model.safetensors.index.json, which names other"):
        load_model(own_model_dir, "fp32")


@pytest.mark.covers("M03")
def test_an_adapter_beside_the_model_is_refused(own_model_dir: Path) -> None:
    (own_model_dir / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(ModelError, match=r"has an adapter_config.json: LoRA is not supported"):
        load_model(own_model_dir, "fp32")


def test_an_index_that_cannot_be_read_is_named(own_model_dir: Path) -> None:
    (index := shard(own_model_dir)).unlink()
    index.mkdir()
    with pytest.raises(ModelError, match=r"index.json cannot be read: Is a directory"):
        load_model(own_model_dir, "fp32")
    index.rmdir()
    index.write_text("[" * 100_000)
    with pytest.raises(ModelError, match=r"index.json is not JSON: maximum recursion depth"):
        load_model(own_model_dir, "fp32")


def test_other_formats_and_broken_files_are_refused(own_model_dir: Path) -> None:
    weights = own_model_dir / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelError, match="is not a readable safetensors file"):
        load_model(own_model_dir, "fp32")
    weights.rename(own_model_dir / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model.bin is not read, only safetensors"):
        load_model(own_model_dir, "fp32")
    (own_model_dir / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match=r"no model.safetensors and no model.safetensors.index.json"):
        load_model(own_model_dir, "fp32")


@pytest.mark.covers("M03")
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture 'GPT2LMHeadModel' is not supported"),
        ({"architectures": None}, "architectures is None, not a list of one name"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "rope_scaling: low_freq_factor is None, not a positive",
        ),
        ({"rope_scaling": {"type": "linear"}}, "config.json: rope_scaling: factor is None, not a positive number"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_scaling of type 'dynamic' is not supported, only def",
        ),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters of type 'longrope' is not supported"),
        ({"rope_parameters": {"full_attention": {}}}, r"rope_parameters per layer \(full_attention\) is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"is_causal": False}, "is_causal false is not supported"),
        ({"model_type": "mistral"}, "model_type 'mistral' is not that of LlamaForCausalLM"),
        ({"transformers_weights": "other.safetensors"}, "transformers_weights 'other.safetensors' is not supported"),
        ({"attention_bias": 1}, "attention_bias is 1, not true or false"),
        ({"layer_types": ["sliding_attention"]}, "layer_types 'sliding_attention' is not supported for this LlamaForC"),
        ({"layer_types": ["chunked_attention"]}, "layer_types 'chunked_attention' is not supported"),
        ({"layer_types": []}, "layer_types is not a list of 1 names"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization 'awq' is not supported"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide num_attention_heads 2"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None, not a positive integer"),
        ({"vocab_size": "260"}, "vocab_size is '260', not a positive integer"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1, not a positive number"),
        ({"rope_theta": 10**400}, "rope_theta is 1000+, not a positive number from 1e-30 to 1e[+]15"),
        ({"hidden_size": 1 << 40}, "hidden_size is 1099511627776, more than 2147483647"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, more than 10000"),
        ({"head_dim": 1026}, "head_dim is 1026, more than 1024"),
        ({"num_attention_heads": 512, "num_key_value_heads": 1}, "512 heads share 1 of KV, more than 256 each"),
        ({"layer_types": [["full_attention"]]}, "layer_types .'full_attention'. is not supported"),
        ({"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2}}, "rope_theta 1 is not above 1"),
    ],
    ids=str,
)
def test_what_cannot_be_run_is_refused_by_name(own_model_dir: Path, changes: dict[str, Any], sentence: str) -> None:
    edit_json(own_model_dir / "config.json", **changes)
    with pytest.raises(ModelError, match=sentence):
        read_model_config(own_model_dir)


@pytest.mark.parametrize(
    "rope",
    [
        {"type": "yarn", "factor": 1e15, "original_max_position_embeddings": (1 << 31) - 1},
        {
            "type": "yarn",
            "factor": 1e-30,
            "beta_fast": 1e15,
            "beta_slow": 1e-30,
            "mscale": 1e15,
            "mscale_all_dim": 1e-9,
        },
        {"type": "llama3", "factor": 1e15, "low_freq_factor": 1e-9, "high_freq_factor": 1e15},
    ],
    ids=lambda rope: rope["type"],
)
def test_whatever_numbers_a_rope_has_it_is_computed_or_refused(own_model_dir: Path, rope: dict[str, Any]) -> None:
    edit_json(own_model_dir / "config.json", rope_scaling=rope, rope_theta=1e15)
    config = read_model_config(own_model_dir)
    assert config.rope.kind == rope["type"]
    Angles.of(config.rope, config.head_dim, torch.device("cpu"))


def test_the_bounds_of_a_head_are_the_compiled_kernels() -> None:
    assert MAX_HEAD_DIM == cpu_library.MAX_HEAD_DIM


@pytest.mark.covers("M03")
def test_a_directory_without_a_readable_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config.json does not exist"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config.json is not JSON"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match=r"config.json is not JSON: maximum recursion depth"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"config.json is not a JSON object"):
        read_model_config(tmp_path)


@pytest.mark.covers("M03")
def test_end_tokens_come_from_generation_config_first(own_model_dir: Path) -> None:
    generation = own_model_dir / "generation_config.json"
    edit_json(generation, eos_token_id=[7, 8])
    assert read_model_config(own_model_dir).eos_token_ids == (7, 8)
    edit_json(generation, eos_token_id=0)
    assert read_model_config(own_model_dir).eos_token_ids == (0,)
    generation.unlink()
    edit_json(own_model_dir / "config.json", eos_token_id=9)
    assert read_model_config(own_model_dir).eos_token_ids == (9,)
    edit_json(own_model_dir / "config.json", eos_token_id=None)
    assert read_model_config(own_model_dir).eos_token_ids == ()


def test_sizes_that_config_leaves_out_have_transformers_defaults(own_model_dir: Path) -> None:
    absent = dict.fromkeys(
        ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "torch_dtype")
    )
    edit_json(own_model_dir / "config.json", **absent)
    config = read_model_config(own_model_dir)
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps, config.rope.theta) == (2, 16, 1e-6, 10_000.0)
    assert (config.ties_embeddings, config.stored_dtype) == (False, "fp32")


def test_rope_theta_is_read_where_either_transformers_generation_puts_it(own_model_dir: Path) -> None:
    config = own_model_dir / "config.json"
    edit_json(config, rope_theta=5e5)
    assert read_model_config(own_model_dir).rope.theta == 5e5
    edit_json(config, rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert read_model_config(own_model_dir).rope.theta == 1e6


def test_an_unknown_dtype_is_refused_by_name(model_dirs: ModelDirs) -> None:
    with pytest.raises(ModelError, match="dtype 'int4' is unknown"):
        load_model(model_dirs(), "int4")


@pytest.mark.covers("A14")
@pytest.mark.parametrize(
    "told",
    [
        {"97": {"content": "a", "special": True}},
        {"97": {"content": "a", "special": False}},
        {"97": {"content": "a", "special": True}, "98": {"content": "b"}},
        [5],
    ],
)
def test_a_token_that_the_tokenizers_settings_hide_never_stands_for_text(own_model_dir: Path, told: Any) -> None:
    """A router goes by them: what a grammar asks for would be missing in the text."""
    edit_json(own_model_dir / "tokenizer_config.json", added_tokens_decoder=told)
    allowed = Grammars(own_model_dir, 260).constraint(Grammar("regex", "[ab]", False, (257,))).allowed()
    assert allowed is not None
    is_hidden = isinstance(told, dict) and told["97"]["special"]
    assert set(allowed.nonzero()[0]) == ({ord("b")} if is_hidden else {ord("a"), ord("b")})


@pytest.mark.covers("A14")
@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("tokenizer_config", {"pad_token": "a"}),
        ("tokenizer_config", {"cot_token": {"__type": "AddedToken", "content": "a"}, "add_eos_token": True}),
        ("tokenizer_config", {"extra_special_tokens": ["a", "none of them"]}),
        ("tokenizer_config", {"extra_special_tokens": {"cot": "a"}}),
        ("special_tokens_map", {"additional_special_tokens": [{"content": "a"}]}),
        ("tokenizer_config", {"additional_special_tokens": ["a"], "map": ["b"]}),  # of two lists this one counts
    ],
)
def test_a_token_that_is_named_as_special_never_stands_for_text(own_model_dir: Path, file: str, told: Any) -> None:
    edit_json(own_model_dir / "tokenizer_config.json", added_tokens_decoder=None)
    edit_json(own_model_dir / "special_tokens_map.json", additional_special_tokens=told.get("map"))
    edit_json(own_model_dir / f"{file}.json", **told)
    allowed = Grammars(own_model_dir, 260).constraint(Grammar("regex", "[ab]", False, (257,))).allowed()
    assert allowed is not None
    assert set(allowed.nonzero()[0]) == {ord("b")}


@pytest.mark.covers("A14")
@pytest.mark.parametrize(
    ("regex", "text"),
    [("a b", ["a", "▁b"]), ("a b", ["a", "▁", "b"]), ("[^ ]b", ["▁b"]), ("[^ ]b", ["a", "▁b"])],
    ids=str,
)
def test_a_mark_that_is_a_blank_is_one_to_a_grammar_also_where_no_token_is_a_byte(
    own_model_dir: Path, regex: str, text: list[str]
) -> None:
    words = ["<unk>", "</s>", "▁", "▁b", "a", "b"]
    tokenizer = Tokenizer(models.Unigram([(word, -1.0) for word in words], 0))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    tokenizer.save(str(own_model_dir / "tokenizer.json"))
    constraint = Grammars(own_model_dir, len(words)).constraint(Grammar("regex", regex, False, (1,)))
    for word in text:
        constraint.add(words.index(word))
    assert constraint.is_broken == (regex != "a b")
