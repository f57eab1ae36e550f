"""Who holds which parameters and states, against numbers worked out by hand."""

from collections import Counter
from dataclasses import asdict

import pytest

from msa_pretrain.model.parameters import count_parameters
from msa_pretrain.training.planner.stages import chunk_slots, held_by_chunk, together
from msa_pretrain.training.planner.states import rank_parameters, states_of

H, EXPERT = 3072, 3 * 3072 * 1536
VOCABULARY = 200064 * H


def test_chunks_hold_every_layer_once(config_of):
    # 62 layers over 8 stages: the embedding and the head take one slot each
    stages = [chunk for (chunk,) in chunk_slots(config_of().spec)]
    assert [len(stage) for stage in stages] == [8] * 8
    assert stages[0] == ["embedding", *range(7)] and stages[-1] == [*range(55, 62), "head"]
    assert [slot for stage in stages for slot in stage] == ["embedding", *range(62), "head"]
    # two stages of two chunks, dealt out round
    virtual = config_of("parallel.pipeline=2", "parallel.virtual_pipeline=2", experiment="cpu_smoke").spec
    assert chunk_slots(virtual) == [[["embedding", 0], [2]], [[1], [3, "head"]]]
    # layer 0 has a plain MLP, the others experts, of which 1 is the first
    assert held_by_chunk(virtual) == [[Counter(["embedding", 0]), Counter([1])], [Counter([1]), Counter([1, "head"])]]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["parallel.pipeline=2", "parallel.virtual_pipeline=31", "parallel.expert=64"],
        ["moe.shared_hidden_size=512", "attention.full_layers=[0,1]"],
        ["moe.dense_mlp_layers=[0,1,2]", "moe.dense_hidden_size=4096"],
        ["model.qk_norm=per_head", "attention.index_norm=false", "model.tie_embeddings=true", "parallel.pipeline=1"],
    ],
)  # fmt: skip
def test_stages_add_up_to_the_model(config_of, layout_of, overrides):
    spec, _, _ = layout_of(config_of(*overrides), 4096)
    counts, expert = count_parameters(spec), spec.parallel.expert
    total = sum((rank_parameters(spec, together(chunks)) for chunks in held_by_chunk(spec)), Counter())
    assert total["experts"] * expert + total["shared experts"] == counts.experts
    assert total.total() + total["experts"] * (expert - 1) == counts.total
    for part in ("embedding", "head", "attention", "index", "router", "norms"):
        assert total[part] == asdict(counts)[part], part
    assert total["dense MLP"] == counts.dense_mlp


def test_a_middle_stage_of_the_mission(config_of, layout_of):
    spec, layout, _ = layout_of(config_of(), 512)
    held = together(held_by_chunk(spec)[3])
    attention, index, router = H * 112 * 128 + 56 * 128, H * 9 * 128 + 2 * 128, 256 * H
    parts = dict(attention=attention, norms=2 * H, index=index, router=router, experts=8 * EXPERT)
    assert rank_parameters(spec, held) == {part: 8 * size for part, size in parts.items()}
    states = states_of(spec, layout, held)
    # 64 copies of the dense parameters, 2 of each expert; the router is fp32
    bf16 = attention + index + 2 * H
    assert sum(states.weights.values()) == 8 * (2 * (bf16 + 8 * EXPERT) + 4 * router)
    assert sum(states.gradients.values()) == 8 * 4 * (bf16 + 8 * EXPERT + router)
    assert states.optimizer["experts"] == 8 * 12 * 8 * EXPERT / 2
    assert sum(states.optimizer.values()) == pytest.approx(8 * (12 * (bf16 / 64 + 8 * EXPERT / 2) + 8 * router / 64))


def test_tensor_parallelism_halves_what_it_splits(config_of, layout_of):
    config = config_of("moe.shared_hidden_size=512")
    spec, layout, _ = layout_of(config, 512, tensor=2, sequence=True)
    held = together(held_by_chunk(spec)[0])
    parts = rank_parameters(spec, held)
    # 7 layers: heads, groups and their norms halved; one index key and its norms whole; router and layer norms whole
    assert parts["embedding"] == VOCABULARY // 2
    assert parts["attention"] == 7 * (H * 56 * 128 + 28 * 128)
    assert parts["index"] == 7 * (H * (4 + 1) * 128 + 2 * 128)
    assert parts["router"] == 7 * 256 * H and parts["norms"] == 7 * 2 * H
    assert parts["experts"] == 7 * 8 * EXPERT and parts["shared experts"] == 7 * 3 * H * 256
    # 512 / (2 x 8) data-parallel ranks; experts take no part in tensor parallelism
    assert (layout.data_parallel, layout.dense_copies, layout.expert_copies) == (32, 32, 2)
    assert states_of(spec, layout, held).optimizer["attention"] == 12 * parts["attention"] / 32


def test_context_parallel_ranks_hold_copies(config_of, layout_of):
    _, layout, _ = layout_of(config_of(), 512, context=4)
    assert (layout.data_parallel, layout.dense_copies, layout.expert_copies) == (16, 64, 2)


def test_a_tied_head_on_another_stage_is_a_copy(config_of, layout_of):
    spec, _, _ = layout_of(config_of("model.tie_embeddings=true"), 512)
    assert rank_parameters(spec, together(held_by_chunk(spec)[-1]))["head"] == VOCABULARY
    spec, _, _ = layout_of(config_of("model.tie_embeddings=true", "parallel.pipeline=1"), 512)
    assert rank_parameters(spec, together(held_by_chunk(spec)[0]))["head"] == 0


def test_fp32_has_no_main_weights(config_of, layout_of):
    spec, layout, _ = layout_of(config_of("training.precision=fp32"), 512)
    held = together(held_by_chunk(spec)[3])
    size, states = rank_parameters(spec, held), states_of(spec, layout, held)
    assert states.weights == {part: 4 * count for part, count in size.items()}
    assert states.optimizer["attention"] == 8 * size["attention"] / 64
