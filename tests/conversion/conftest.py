"""Tiny random models of every family, made and saved by transformers."""

import json
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers", reason="needs transformers, of the extra `data`")

# All sizes differ; 1 < groups < heads. M3: blocks of 8 tokens, 2 kept, so attention is sparse from 17 tokens on.
COMMON = dict(
    vocab_size=101,
    hidden_size=48,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=5e5,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
SPARSE = dict(
    use_sparse_attention=True,
    sparse_index_dim=12,
    sparse_num_index_heads=2,
    sparse_topk_blocks=2,
    sparse_block_size=8,
    sparse_score_type="max",
    sparse_init_block=0,
    sparse_local_block=1,
    sparse_attention_freq=[0, 1, 1],
    sparse_disable_index_value=[0, 1, 1],
)
M3 = dict(
    **COMMON,
    intermediate_size=40,
    dense_intermediate_size=56,
    shared_intermediate_size=40,
    num_local_experts=4,
    num_experts_per_tok=2,
    rotary_dim=8,
    partial_rotary_factor=0.5,
    rope_theta=5e6,
    hidden_act="swigluoai",
    moe_layer_freq=[0, 1, 1],
    routed_scaling_factor=2.0,
)


def _llama(tie: bool = False):
    config = transformers.LlamaConfig(
        **COMMON, intermediate_size=40, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=tie
    )
    return transformers.LlamaForCausalLM(config)


def _qwen3(tie: bool = False):
    config = transformers.Qwen3Config(**COMMON, intermediate_size=40, rope_theta=1e6, tie_word_embeddings=tie)
    return transformers.Qwen3ForCausalLM(config)


def _qwen3_moe():
    config = transformers.Qwen3MoeConfig(
        **COMMON,
        intermediate_size=56,
        moe_intermediate_size=40,
        num_experts=5,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        rope_theta=1e6,
    )
    return transformers.Qwen3MoeForCausalLM(config)


def _minimax_m2():
    config = transformers.MiniMaxM2Config(
        **COMMON, intermediate_size=40, num_local_experts=4, num_experts_per_tok=2, rotary_dim=8, rope_theta=5e6
    )
    return transformers.MiniMaxM2ForCausalLM(config)


def _minimax_m3():
    from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig

    return transformers.MiniMaxM3VLForCausalLM(MiniMaxM3VLTextConfig(**M3, sparse_attention_config=SPARSE))


MODELS = {
    "llama": _llama,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "minimax_m2": _minimax_m2,
    "minimax_m3": _minimax_m3,
    "llama tied": lambda: _llama(tie=True),
    "qwen3 tied": lambda: _qwen3(tie=True),
}


def scramble(model) -> None:
    """Weights large enough to reach the clamps and to spread the router, by name; norms and biases off their start."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.ndim >= 2:
                tensor.copy_(0.2 * noise)
            else:
                tensor.add_(0.2 * noise)


def released_m3_names(state: dict[str, torch.Tensor], prefix: str = "") -> dict[str, torch.Tensor]:
    """transformers' in-memory names of the text model to the released ones, by hand (not by the map under test)."""
    released = {}
    for name, value in state.items():
        block = name.split(".mlp.")[0] + ".block_sparse_moe"
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(value):
                gate, up = both.chunk(2)
                released[f"{block}.experts.{expert}.w1.weight"], released[f"{block}.experts.{expert}.w3.weight"] = (
                    gate,
                    up,
                )
        elif name.endswith("experts.down_proj"):
            released |= {f"{block}.experts.{expert}.w2.weight": down for expert, down in enumerate(value)}
        else:
            name = name.replace(".mlp.shared_experts.", ".block_sparse_moe.shared_experts.")
            name = name.replace(".mlp.gate.", ".block_sparse_moe.gate.").replace("gate.e_score", "e_score")
            name = name.replace(".indexer.", ".index_")
            if name.endswith("gate_up_proj.weight"):
                gate, up = value.chunk(2)
                released[name.replace("gate_up_proj", "gate_proj")] = gate
                released[name.replace("gate_up_proj", "up_proj")] = up
            else:
                released[name] = value
    return {prefix + name: value.clone().contiguous() for name, value in released.items()}


def save_model(name: str, model, folder: Path) -> None:
    """As the family is released: M3's text model by hand, since transformers' own config drops keys."""
    if name != "minimax_m3":
        model.save_pretrained(folder)
        return
    folder.mkdir()
    save_file(released_m3_names(model.state_dict()), folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        **M3,
        "sparse_attention_config": SPARSE,
        "rms_norm_eps": 1e-6,
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "model_type": "minimax_m3_vl_text",
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="session")
def saved(tmp_path_factory) -> Callable[..., Path]:
    """saved(name, dtype): the folder of a tiny model (not to be changed)."""
    made: dict[tuple[str, torch.dtype], Path] = {}

    def get(name: str, dtype: torch.dtype = torch.float32) -> Path:
        if (name, dtype) not in made:
            torch.manual_seed(0)
            model = MODELS[name]().eval()
            scramble(model)
            folder = tmp_path_factory.mktemp("hf") / "model"
            save_model(name, model.to(dtype), folder)
            if dtype is torch.bfloat16:
                edit_tensors(folder, _fp32_routers)
            made[name, dtype] = folder
        return made[name, dtype]

    return get


def _fp32_routers(tensors: dict[str, torch.Tensor]) -> None:
    """The MiniMax releases keep them so, in values that bf16 has not."""
    for name, value in tensors.items():
        if "block_sparse_moe.gate.weight" in name or "e_score" in name:
            tensors[name] = value.float() + 1e-4


@pytest.fixture
def copy_of(saved, tmp_path) -> Callable[..., Path]:
    """copy_of(name): the same, to be changed."""

    def get(name: str, dtype: torch.dtype = torch.float32) -> Path:
        return Path(shutil.copytree(saved(name, dtype), tmp_path / "copy"))

    return get


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Rewrite the folder's only file after `edit` of its tensors."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **values) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture
def change_tensors():
    return edit_tensors


@pytest.fixture
def change_config():
    return edit_config


@pytest.fixture
def tokens() -> Iterator[Callable[[int], torch.Tensor]]:
    text = torch.randint(3, 101, (64,), generator=torch.Generator().manual_seed(1))
    return lambda length: text[:length]
