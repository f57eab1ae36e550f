"""What is refused, before anything is written: names, shapes and configs (field cases T6.5, T6.6, T6.9)."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from msa_pretrain.model.hf import FAMILIES, ConversionError, family_of
from msa_pretrain.training.conversion.importing import plan_import, run_import

LAYER = "model.layers.1."


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, value):
    return lambda tensors: tensors.__setitem__(name, value)


def to_fp8(tensors):
    name = LAYER + "self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)


TENSORS = {
    "missing": (drop(LAYER + "self_attn.k_proj.weight"), r"model\.layers\.1\.self_attn\.k_proj\.weight is missing"),
    "left over": (put(LAYER + "self_attn.sinks", torch.ones(6)), r"model\.layers\.1\.self_attn\.sinks is left over"),
    "other shape": (
        put(LAYER + "mlp.up_proj.weight", torch.ones(41, 48)),
        r"mlp\.gate_proj\.weight \(40, 48\), .*up_proj\.weight \(41, 48\): together \(81, 48\), which does not make "
        r"our decoder\.layers\.1\.mlp\.linear_fc1\.weight \(80, 48\)",
    ),
    "too few rows": (
        put("model.embed_tokens.weight", torch.ones(100, 48)),
        r"model\.embed_tokens\.weight \(100, 48\): together nothing, which does not make our embedding",
    ),
    "FP8 without scales": (
        to_fp8,
        r"q_proj\.weight is torch\.float8_e4m3fn and has no .*q_proj\.weight_scale_inv: its",
    ),
    "scales without FP8": (
        put(LAYER + "self_attn.q_proj.weight_scale_inv", torch.ones(1, 1)),
        r"q_proj\.weight_scale_inv scales .*q_proj\.weight, which is torch\.float32 and not FP8",
    ),
    "wider than the rest": (
        lambda tensors: tensors.update(
            {name: value.bfloat16() for name, value in tensors.items() if name != "model.norm.weight"}
        ),
        r"model\.norm\.weight and 0 more are wider than torch\.bfloat16.*Choose --dtype fp32",
    ),
    "half precision": (
        lambda tensors: tensors.update({name: value.half() for name, value in tensors.items()}),
        r"has weights of torch\.float16\. Choose --dtype bf16 or --dtype fp32",
    ),
}


@pytest.mark.parametrize("change, message", TENSORS.values(), ids=TENSORS)
def test_tensors_that_the_config_does_not_describe(copy_of, change_tensors, change, message):
    folder = copy_of("qwen3")
    change_tensors(folder, change)
    with pytest.raises(ConversionError, match=message):
        plan_import(folder)


def test_a_head_that_is_no_copy_of_a_tied_embedding(copy_of, change_tensors):
    folder = copy_of("qwen3 tied")
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change_tensors(folder, put("lm_head.weight", embedding.clone()))
    assert plan_import(folder).ignored == ["lm_head.weight"]
    change_tensors(folder, put("lm_head.weight", embedding + 1))
    with pytest.raises(
        ConversionError, match=r"lm_head\.weight is not the embedding, though config\.json says tie_word"
    ):
        plan_import(folder)


M3_SPARSE = {"sparse_local_block": 2, "sparse_score_type": "lse", "sparse_num_index_heads": 4}
CONFIGS = [
    ("llama", "rope_parameters", None, r"rope_theta neither in rope_parameters nor at the top"),
    (
        "llama",
        "rope_parameters",
        {"rope_type": "yarn", "rope_theta": 1e4},
        r"rope_type is 'yarn'; the model here knows",
    ),
    (
        "llama",
        "rope_parameters",
        {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8},
        r"scaling lacks low_freq_factor",
    ),
    ("llama", "attention_bias", True, r"attention_bias is True; the model here can only be False"),
    ("llama", "rms_norm_eps", None, r"config\.json has no rms_norm_eps\. Add it: no default is assumed"),
    ("llama", "num_attention_heads", 8, r"q_proj\.weight \(96, 48\), .*: together"),
    ("llama", "num_key_value_heads", 3, r"k_proj\.weight \(32, 48\), .*: together .* does not make our"),
    ("qwen3", "hidden_act", "gelu", r"hidden_act is 'gelu'; the model here can only be 'silu'"),
    ("qwen3_moe", "norm_topk_prob", False, r"norm_topk_prob is false; the router here renormalises"),
    ("minimax_m2", "rotary_dim", 16, r"rotary_dim \(16\) and partial_rotary_factor \(0\.5\) of 16 channels differ"),
    ("minimax_m2", "scoring_func", "softmax", r"scoring_func is 'softmax'; the model here can only be 'sigmoid'"),
    ("minimax_m2", "attn_type_list", [1, 0, 1], r"attn_type_list is \[1, 0, 1\]; the model here has full attention"),
    ("minimax_m3", "partial_rotary_factor", None, r"no partial_rotary_factor: transformers would rotate whole heads"),
    ("minimax_m3", "shared_intermediate_size", 24, r"shared_intermediate_size \(24\) is not intermediate_size \(40\)"),
    ("minimax_m3", "moe_layer_freq", [0, 1], r"moe_layer_freq is \[0, 1\]; it must be a list of 3 flags"),
    ("minimax_m3", "layer_types", ["full_attention"], r"rewritten by transformers' text class"),
]


@pytest.mark.parametrize("name, key, value, message", CONFIGS)
def test_configs_that_the_model_here_cannot_be(copy_of, change_config, name, key, value, message):
    """T6.9 first: a theta that stands nowhere is an error, and no default."""
    folder = copy_of(name)
    change_config(folder, **{key: value})
    if key == "layer_types":
        change_config(folder, sparse_attention_config=None)
    with pytest.raises(ConversionError, match=message):
        plan_import(folder)


@pytest.mark.parametrize("key, value", M3_SPARSE.items())
def test_selections_that_msa_here_does_not_make(copy_of, change_config, key, value):
    folder = copy_of("minimax_m3")
    sparse = json.loads((folder / "config.json").read_text())["sparse_attention_config"]
    change_config(folder, sparse_attention_config={**sparse, key: value})
    with pytest.raises(ConversionError, match=rf"{key} is {value!r}; the model here can only be"):
        plan_import(folder)


def test_a_local_block_that_is_not_named(copy_of, change_config):
    folder = copy_of("minimax_m3")
    sparse = json.loads((folder / "config.json").read_text())["sparse_attention_config"]
    del sparse["sparse_local_block"]
    change_config(folder, sparse_attention_config=sparse)
    with pytest.raises(ConversionError, match=r"no sparse_local_block\. Add it: no default is assumed"):
        plan_import(folder)


def test_rope_theta_is_read_where_it_stands(copy_of, change_config):
    """T6.9: in the nested dict as transformers 5 writes it, or at the top as older versions did."""
    folder = copy_of("qwen3")
    assert plan_import(folder).spec.model.rope_theta == 1e6
    change_config(folder, rope_parameters=None, rope_theta=2e6)
    assert plan_import(folder).spec.model.rope_theta == 2e6


def test_a_family_that_is_not_known():
    with pytest.raises(
        ConversionError, match=r"model_type 'gpt2' and architectures \['GPT2LMHeadModel'\].*Known: llama, q"
    ):
        family_of({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]})
    assert {name: family_of({"model_type": name}).name for name in ("llama", "qwen3", "qwen3_moe", "minimax_m2")} == {
        name: name for name in FAMILIES if name != "minimax_m3"
    }


def test_an_index_that_lists_what_no_file_has(copy_of):
    """T6.6, and a shard that is missing or cut short."""
    folder = copy_of("qwen3")
    tensors = load_file(folder / "model.safetensors")
    index = {
        "metadata": {},
        "weight_map": {**dict.fromkeys(tensors, "model.safetensors"), "ghost": "model.safetensors"},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConversionError, match=r"differ:\n  - ghost should be in model\.safetensors and is not"):
        plan_import(folder)
    del index["weight_map"]["ghost"], index["weight_map"]["lm_head.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConversionError, match=r"lm_head\.weight is in model\.safetensors only"):
        plan_import(folder)
    (folder / "model.safetensors.index.json").unlink()
    save_file({"more": torch.ones(1)}, folder / "another.safetensors")
    with pytest.raises(ConversionError, match=r"2 files and no model\.safetensors\.index\.json: some may be missing"):
        plan_import(folder)
    (folder / "another.safetensors").unlink()
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-4])
    with pytest.raises(ConversionError, match=r"model\.safetensors is cut short: .* ends at byte \d+ of \d+"):
        plan_import(folder)


def test_formats_that_run_code_and_folders_without_a_model(copy_of, tmp_path):
    folder = copy_of("qwen3")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConversionError, match=r"has no \*\.safetensors file\. Formats that are pickle inside run code"):
        plan_import(folder)
    with pytest.raises(ConversionError, match=r"has no config\.json\. Name the folder of a Hugging Face model"):
        plan_import(tmp_path)


def test_a_place_that_is_taken(saved, tmp_path):
    plan = plan_import(saved("qwen3"))
    run_import(plan, tmp_path / "checkpoint")
    with pytest.raises(
        ConversionError, match=r"checkpoint is a checkpoint already\. Choose another --to, or remove it"
    ):
        run_import(plan, tmp_path / "checkpoint")
    (tmp_path / "other").mkdir()
    with pytest.raises(ConversionError, match=r"--vocab-multiple \(0\) must be at least 1"):
        plan_import(saved("qwen3"), vocab_multiple=0)
    with pytest.raises(ConversionError, match=r"other exists and is no checkpoint"):
        run_import(plan, tmp_path / "other")
