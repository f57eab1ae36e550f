"""Bytes of messages, worked out by hand for single layouts."""

import pytest

from msa_pretrain.model.config import Phase
from msa_pretrain.training.planner.activations import Activations
from msa_pretrain.training.planner.communication import Message, micro_batch_messages, step_messages
from msa_pretrain.training.planner.stages import held_by_chunk, together

T, H = 8192, 3072


@pytest.fixture
def messages_of(config_of, layout_of):
    """kind -> message of a middle stage (8 layers of the mission)."""

    def build(*overrides, world_size=512, **parallel):
        spec, layout, load = layout_of(config_of(*overrides), world_size, **parallel)
        held = together(held_by_chunk(spec)[min(3, spec.parallel.pipeline - 1)])
        a = Activations(spec, layout, load.tokens(spec), Phase.sparse)
        messages = [*micro_batch_messages(a, held), *step_messages(spec, layout, held, a.itemsize)]
        return {message.kind: message for message in messages}

    return build


def test_the_missions_own_layout(messages_of):
    messages = messages_of("training.recompute=none")
    assert set(messages) == {"expert", "pipeline", "data", "data, experts"}
    # 8 layers, dispatch and combine, forward and backward, 31 of 32 rows leave
    assert messages["expert"] == Message("expert", 8 * 4 * 31 / 32 * 2 * 8 * T * H, 32, 1)
    assert messages["pipeline"] == Message("pipeline", 2 * 2 * T * H, 8, 64)
    experts = 8 * 8 * 3 * H * 1536
    assert messages["data, experts"] == Message("data, experts", 1 / 2 * 6 * experts, 2, 32)
    dense = 8 * (H * 112 * 128 + 56 * 128 + 2 * H + H * 9 * 128 + 256 + 256 * H)
    assert messages["data"] == Message("data", pytest.approx(63 / 64 * 6 * dense), 64, 1)


def test_recompute_sends_tokens_to_experts_again(messages_of):
    once, again = (messages_of(f"training.recompute={r}")["expert"].size for r in ("none", "full"))
    assert again == 1.5 * once


def test_the_allgather_dispatcher(messages_of):
    message = messages_of("training.recompute=none", "parallel.dispatcher=allgather")["expert"]
    assert message.size == 8 * 2 * 31 * (2 + 4) * T * H


def test_tensor_and_sequence_parallelism(messages_of):
    # an MoE layer has one block (attention) whose sums cross ranks: 2 all-reduces of 2 x 3/4, two bytes an element
    block = 8 * 2 * 2 * 3 / 4 * 2 * T * H
    assert messages_of("training.recompute=none", tensor=4)["tensor"].size == block
    # sequence parallelism: the same in two halves, and the backward pass gathers the input once more
    with_sequence = messages_of("training.recompute=none", tensor=4, sequence=True)["tensor"]
    assert with_sequence.size == block + 8 * 3 / 4 * 2 * T * H
    shared = messages_of("training.recompute=none", "moe.shared_hidden_size=512", tensor=4)["tensor"]
    assert shared.size == 2 * block


def test_context_parallelism_gathers_keys_values_and_the_index_key(messages_of):
    message = messages_of("training.recompute=none", context=4)["context"]
    assert message == Message("context", 8 * 2 * 3 * 2 * T / 4 * (2 * 8 * 128 + 128), 4, 1)


@pytest.mark.parametrize("ranks, stride, crosses", [(8, 1, False), (16, 1, True), (2, 8, True), (4, 2, False)])
def test_which_groups_leave_a_node(ranks, stride, crosses):
    assert Message("any", 1.0, ranks, stride).crosses_nodes is crosses


def test_one_gpu_sends_nothing(messages_of):
    assert messages_of("parallel=single", world_size=1) == {}
