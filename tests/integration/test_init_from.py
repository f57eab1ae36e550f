"""Weights from another run: what is loaded, what is made, and what is refused (field cases 1.15, 1.16, 2.1, 2.4)."""

from pathlib import Path

import pytest
import torch

from msa_pretrain.model.gpt import build_model, routers
from msa_pretrain.training.checkpoint import CheckpointError
from msa_pretrain.training.config import InitOptimizer
from msa_pretrain.training.init_from import find_source, init_weights
from msa_pretrain.training.optim import build_optimizer, wrap_with_ddp

DENSE = ["attention.kind=dense", "training.warmup_tokens=0"]
FROM_ATTENTION = ["attention.indexer_init=from_attention", "attention.index_dim=8", "training.init_from=somewhere"]


def scramble(one) -> None:
    """Weights and biases that no seed gives."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in one.model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        for _, router in routers(one.chunks):
            router.expert_bias.copy_(torch.randn(router.expert_bias.shape, generator=generator))


def loaded_from(path: Path, config):
    """A model of `config` whose weights come from `path`."""
    chunks = wrap_with_ddp(build_model(config.spec, config.training.seq_length))
    init_weights(find_source(path, InitOptimizer.reset), chunks, config.spec)
    return chunks


def parameters(chunks):
    return dict(chunks[0].module.named_parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_dense_checkpoint_gives_every_weight_but_the_index_branch(rig, tiny_config, tmp_path, precision):
    """T2.2 too: the expert bias is fp32 and bit-equal after build, wrap, save and load of a bf16 model."""
    dense = rig(tiny_config(*DENSE, f"training.precision={precision}"))
    scramble(dense)
    dense.save(tmp_path, step=3)
    config = tiny_config(f"training.precision={precision}")
    chunks = loaded_from(tmp_path, config)
    fresh = dict(build_model(config.spec, 20)[0].named_parameters())
    weights, source = parameters(chunks), dense.weights()
    assert {name for name in weights if name not in source} == {name for name in weights if ".indexer." in name}
    for name, weight in weights.items():
        assert torch.equal(weight, source.get(name, fresh[name])), name
    for (_, ours), (_, theirs) in zip(routers(chunks), routers(dense.chunks), strict=True):
        assert ours.expert_bias.dtype == torch.float32 and torch.equal(ours.expert_bias, theirs.expert_bias)
        assert ours.expert_bias.bfloat16().float().ne(ours.expert_bias).any()
    # an optimizer built afterwards starts from them
    optimizer = build_optimizer(chunks, config.spec, config.optim)
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    optimizer.reload_model_params()
    for part in optimizer.chained_optimizers:
        for parameter, (group, order) in part.model_param_group_index_map.items():
            main = part.optimizer.param_groups[group]["params"][order]
            assert torch.equal(main.flatten(), parameter.detach().flatten().float())
    assert all(torch.equal(weight, before[name]) for name, weight in weights.items())


@pytest.mark.parametrize("norm", ["per_head", "full_vector", "none"])
def test_an_index_branch_from_attention_is_the_mean_of_its_heads(rig, tiny_config, tmp_path, norm):
    dense = rig(tiny_config(*DENSE, f"model.qk_norm={norm}"))
    scramble(dense)
    dense.save(tmp_path, step=3)
    weights = parameters(loaded_from(tmp_path, tiny_config(*FROM_ATTENTION, f"model.qk_norm={norm}")))
    source, place = dense.weights(), "decoder.layers.1.self_attention."
    qkv = source[f"{place}linear_qkv.weight"]  # of each of 3 groups: 2 query heads, key, value; 8 rows each
    query = [(qkv[32 * group : 32 * group + 8] + qkv[32 * group + 8 : 32 * group + 16]) / 2 for group in range(3)]
    key = sum(qkv[32 * group + 16 : 32 * group + 24] for group in range(3)) / 3
    torch.testing.assert_close(weights[f"{place}indexer.query_proj.weight"], torch.cat(query))
    torch.testing.assert_close(weights[f"{place}indexer.key_proj.weight"], key)
    for kind, heads in (("query", 6), ("key", 3)):
        ours = weights[f"{place}indexer.{kind}_norm.weight"]
        wanted = torch.ones(8)
        if norm != "none":
            main = source[f"{place}{kind}_norm.weight"]
            wanted = main.view(-1, 8).mean(dim=0)
            assert len(main) == (8 if norm == "per_head" else 8 * heads)
        torch.testing.assert_close(ours, wanted)


def test_an_index_branch_that_is_there_is_loaded_and_never_made_anew(rig, tiny_config, tmp_path):
    """T1.13 / case 1.16."""
    sparse = rig(tiny_config("attention.index_dim=8"))
    scramble(sparse)
    path = sparse.save(tmp_path, step=3)
    weights = parameters(loaded_from(path, tiny_config("attention.index_dim=8")))
    assert all(torch.equal(weight, sparse.weights()[name]) for name, weight in weights.items())
    with pytest.raises(CheckpointError, match=r"step_3 has an index branch, which attention\.indexer_init=from"):
        loaded_from(path, tiny_config(*FROM_ATTENTION))


REFUSED = {
    "a layer more": (DENSE, ["model.num_layers=3"], r"It lacks model\.decoder\.layers\.2\.input_layernorm\.weight, "),
    "a layer less": (
        [*DENSE, "model.num_layers=3"],
        [],
        r"it has model\.decoder\.layers\.2\.input_layernorm\.weight, .* besides",
    ),
    "other experts": (DENSE, ["moe.num_experts=4"], r"of other shape: .*experts\.down_proj is \(5, 24, 16\) and not"),
    "index weights left over": ([], DENSE, r"it has model\.decoder\.layers\.0\.self_attention\.indexer\.key_norm"),
    "half an index branch": (
        ["attention.index_norm=false"],
        [],
        r"It lacks model\.decoder\.layers\.0\.self_attention\.indexer\.key_norm\.weight",
    ),
}


@pytest.mark.parametrize("saved, wanted, message", REFUSED.values(), ids=REFUSED)
def test_anything_else_that_differs_is_refused_by_name(rig, tiny_config, tmp_path, saved, wanted, message):
    rig(tiny_config(*saved)).save(tmp_path, step=3)
    with pytest.raises(CheckpointError, match=message):
        loaded_from(tmp_path, tiny_config(*wanted))


def test_a_folder_without_a_checkpoint_is_refused(rig, tiny_config, tmp_path):
    rig(tiny_config())
    with pytest.raises(CheckpointError, match=r"holds no complete checkpoint\. Correct training\.init_from"):
        loaded_from(tmp_path, tiny_config())
