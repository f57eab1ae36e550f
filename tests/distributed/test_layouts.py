"""Launching a run differently changes nothing: layouts, restarts and the layout a checkpoint is loaded under.

Seven jobs walk through all runs (walker.py); the tests below read what the ranks saw.
"""

import pytest
import torch
from megatron.core import dist_checkpointing
from plans import (
    ALONE,
    CONTEXT_DOCUMENTS,
    CONTINUED,
    CUTS,
    DOCUMENTS,
    FOUR_PROCESSES,
    LAYOUTS,
    MTP_LAYOUTS,
    PAIRS,
    RESUMED,
    SHARED_SAMPLES,
    VARIANT_LAYOUTS,
)

from msa_pretrain.model.parallel import distributed

pytestmark = pytest.mark.layouts


def each(*names):
    """Test parameters; combinations of layouts are for `make parity`."""
    pairs = {*PAIRS, *FOUR_PROCESSES}
    return [pytest.param(name, marks=[pytest.mark.parity] * (name in pairs)) for name in names]


# One weight of each kind whose moments a checkpoint must hold.
TRAINED = {
    "model.embedding.word_embeddings.weight",
    "model.decoder.layers.3.self_attention.indexer.key_proj.weight",
    "model.decoder.layers.2.mlp.experts.gate_up_proj",
    "model.decoder.layers.1.mlp.router.weight",
    "model.output_layer.weight",
}
# what plans.TIED has not
NOT_TIED = {"model.output_layer.weight", "model.decoder.layers.1.mlp.router.weight"}


def choices(launcher, name, ranks):
    """All ranks' decisions, but those of padding: {step/where/document/position(/group): [chosen, margin]}."""
    taken = (launcher.seen(name, rank)["decisions"] for rank in range(ranks))
    return {key: choice for one in taken for key, choice in one.items() if "/-1/" not in key}


@pytest.mark.parametrize("name", each(*LAYOUTS, *ALONE))
def test_series_equal_those_of_one_process(walked, name):
    """LM loss, KL, both gradient norms, rates, loads and recall over the steps of both phases, to 1e-5."""
    expected = choices(walked, "one", 1)
    assert len(expected) == 20 * 3 * 80 + 10 * 4 * 80 * 4
    assert_same_series(walked, name, 2 if name in LAYOUTS else 1, "one", 12 if name in SHARED_SAMPLES else 20)


@pytest.mark.parametrize("name", each(*VARIANT_LAYOUTS, *FOUR_PROCESSES))
def test_series_of_variants_equal_those_of_one_process(walked, name):
    """With padding: index branches without detach, full-vector norms, shared experts, a tied head; stages and chunks
    without MSA or MoE layers."""
    variant, _ = (VARIANT_LAYOUTS | FOUR_PROCESSES)[name]
    assert_same_series(walked, name, 2 if name in VARIANT_LAYOUTS else 4, variant, num_steps=4)
    assert_same_moments(walked, name, variant, step=4)


def assert_same_series(walked, name, num_ranks, reference_name, num_steps):
    ours, reference = walked.seen(name)["series"], walked.seen(reference_name)["series"][:num_steps]
    taken = choices(walked, name, num_ranks)
    expected = {
        key: choice for key, choice in choices(walked, reference_name, 1).items() if int(key.split("/")[0]) <= num_steps
    }
    assert set(taken) == set(expected)
    flips = [key for key, (chosen, _) in taken.items() if sorted(chosen) != sorted(expected[key][0])]
    assert all(expected[key][1] < 1e-6 for key in flips), flips
    first_flip = min((int(key.split("/")[0]) for key in flips), default=num_steps + 1)
    assert [row["step"] for row in ours] == list(range(1, num_steps + 1))
    assert {row["train/phase"] for row in ours} == {"warmup", "sparse"}
    worst = {}
    for row, wanted in zip(ours, reference, strict=True):
        if row["step"] > first_flip:
            break
        assert set(row) == set(wanted)
        for key, value in wanted.items():
            if isinstance(value, str):
                assert row[key] == value
            else:
                worst[key] = max(worst.get(key, 0.0), abs(row[key] - value) / max(abs(value), 1e-12))
    print(f"{name}: {len(flips)} flips, {max(worst.values()):.1e}")
    # measured: 1.3e-6 at most, no flip
    assert max(worst.values()) <= 1e-5, worst


@pytest.mark.parametrize("name", each(*SHARED_SAMPLES))
def test_gradients_equal_those_of_one_process(walked, name):
    """Adam's first moment, ten steps of the warm-up and one of the sparse phase: relative error of each parameter."""
    assert_same_moments(walked, name, "one", step=11)


def assert_same_moments(walked, name, reference_name, step):
    with distributed():
        ours = tensors(dist_checkpointing.load_plain_tensors(str(walked.checkpoint(name, step))))
        reference = tensors(dist_checkpointing.load_plain_tensors(str(walked.checkpoint(reference_name, step))))
    worst = {
        key: (ours[key].double() - value.double()).norm().item() / value.double().norm().item()
        for key, value in reference.items()
        if ".exp_avg." in key
    }
    assert len(worst) > 40
    print(f"{name}: {max(worst.values()):.1e}")
    # measured: 3.9e-6 at most, eleven steps of rounding on
    assert max(worst.values()) <= 1e-5, worst


@pytest.mark.parametrize("name", [*DOCUMENTS, *CONTEXT_DOCUMENTS])
def test_documents_are_the_same_alone_packed_and_padded(walked, name):
    """1, 3, 7, 128 and 129 tokens in blocks of 16: values of both phases, the KL among them, and every gradient."""
    ranks = 2 if name in CONTEXT_DOCUMENTS else 1
    assert_same_series(walked, name, ranks, "alone", num_steps=2)
    for step in (1, 2):
        found, wanted = walked.gradients(name, step), walked.gradients("alone", step)
        errors = {key: ((found[key] - value).norm() / value.norm()).item() for key, value in wanted.items()}
        assert max(errors.values()) <= 1e-5, errors


@pytest.mark.parametrize("name", CUTS)
def test_one_process_killed_and_resumed_is_bit_for_bit_uninterrupted(walked, name):
    resumed, whole = walked.seen(name), walked.seen(f"whole_{CUTS[name][0]}")
    assert_same_state(resumed, whole, first_step=CUTS[name][1] + 1)


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("rank", [0, 1])
def test_two_processes_killed_and_resumed_are_bit_for_bit_uninterrupted(walked, name, rank):
    assert_same_state(walked.seen(f"{name}_resumed", rank), walked.seen(f"{name}_whole", rank), first_step=6)


def test_a_ramped_batch_resumes_with_the_same_phases_and_rates(walked):
    """Sizes 2, 2, 3, 3, then 4: the warm-up of 400 tokens ends inside the seventh step, by tokens and not by steps."""
    resumed, whole = walked.seen("ramp"), walked.seen("ramp_whole")
    assert resumed["digests"] == whole["digests"]
    assert resumed["series"] == [row for row in whole["series"] if row["step"] >= 5]
    phases = [row["train/phase"] for row in whole["series"]]
    consumed, expected = 0, []
    for size in [2, 2, 3, 3] + [4] * (len(phases) - 4):
        expected.append("warmup" if consumed < 400 else "sparse")
        consumed += 20 * size
    assert phases == expected and consumed >= 800


def test_growing_samples_equal_those_of_one_process(walked):
    """Ten steps of 80 tokens, the last five in longer samples, the switch at the eighth."""
    assert_same_series(walked, "lengths_dp2", 2, "lengths_one", num_steps=10)
    lengths = [
        max(int(key.split("/")[3]) for key in choices(walked, "lengths_one", 1) if key.startswith(f"{step}/"))
        for step in (5, 6)
    ]
    assert lengths[0] < 20 < lengths[1]


def assert_same_state(resumed, whole, first_step):
    assert resumed["digests"] == whole["digests"]
    assert resumed["steps"] == whole["steps"] == [10.0]
    kept = [row for row in whole["series"] if row["step"] >= first_step]
    assert resumed["series"] == kept
    assert {key: value for key, value in whole["decisions"].items() if int(key.split("/")[0]) >= first_step} == resumed[
        "decisions"
    ]
    # the steps that the killed job had logged past its checkpoint appear once
    assert resumed["metrics"] == list(range(1, 11))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_nan_on_one_rank_makes_every_rank_skip_the_step(walked, rank):
    """Field case T5.9: one step skipped and counted, weights and expert bias as they were, training goes on."""
    seen = walked.seen("nan", rank)
    weights = seen["weights"]
    assert weights["3"] == weights["2"] and weights["4"] != weights["3"]
    assert "'skipped_steps': 1" in seen["digests"]["counters"]
    assert seen["steps"] == [9.0]
    if rank == 0:
        bias = [row["moe/bias_range"] for row in seen["series"]]
        assert bias[2] == bias[1]
        assert seen["series"][-1]["train/lm_loss"] < 10


@pytest.mark.parametrize("name", MTP_LAYOUTS)
def test_token_prediction_further_ahead_is_the_same_in_every_layout(walked, name):
    """With two stages the last one has a copy of the embedding; its checkpoint goes on in one process."""
    alone = walked.seen("mtp_one")["series"]
    whole, rest = walked.seen(name)["series"], walked.seen(f"{name}_to_one")["series"]
    assert [row["step"] for row in rest] == list(range(6, 11))
    for row, wanted in zip([*whole, *rest], [*alone, *alone[5:]], strict=True):
        for key in ("train/lm_loss", "train/mtp_loss", "train/loss", "optim/grad_norm", "optim/indexer_grad_norm"):
            assert row[key] == pytest.approx(wanted[key], rel=1e-5), (row["step"], key)


def test_a_rank_whose_experts_get_no_token_trains_on(walked):
    """Case 2.11, T2.5 and T2.10: no hang, all tokens counted, and the numbers of one process."""
    ours, alone = walked.seen("idle"), walked.seen("idle_one")
    assert len(ours["series"]) == 10
    for row, wanted in zip(ours["series"], alone["series"], strict=True):
        assert row["moe/dead_experts"] == 3 * 2  # layers x experts
        assert row["moe/bias_range"] == pytest.approx(9.0, abs=0.03)
        for key in ("train/lm_loss", "optim/grad_norm", "moe/max_over_mean_load", "moe/aux_loss"):
            assert row[key] == pytest.approx(wanted[key], rel=1e-5), key


def test_console_shows_the_real_loss_once_when_the_last_stage_has_it(walked):
    """Field case T5.10, with two pipeline stages: every step of the job's runs is printed once, none with -1."""
    lines = [line for line in walked.logs["pp2"].read_text().splitlines() if "lm loss" in line]
    first = [line for line in lines if line.lstrip("step ").startswith("1/20 ")]
    ran = [name for name in LAYOUTS if (walked.directory / f"{name}.rank0.json").exists()]
    assert len(first) == len(ran) and all("lm loss 3." in line for line in first), first


def test_torchrun_and_plain_python_give_the_same_bits(walked):
    assert walked.seen("torchrun_whole_5")["digests"] == walked.seen("whole_5")["digests"]
    assert walked.seen("torchrun_whole_5")["series"] == walked.seen("whole_5")["series"]


@pytest.mark.parametrize(
    "source, target",
    [
        ("ep2", "ep2_to_dp2"),
        ("dp2", "dp2_to_ep2"),
        ("dp2", "dp2_to_pp2"),
        ("dp2", "dp2_to_tp2"),
        ("tp2", "tp2_to_one"),
        ("pp2", "pp2_to_one"),
        ("tied_pp2", "tied_pp2_to_one"),
        ("dp2", "dp2_to_one"),
        ("ep2", "ep2_to_one"),
    ],
)
def test_a_checkpoint_loads_under_another_layout(walked, source, target):
    """Weights and both moments element by element: what the new layout writes is what the old one wrote."""
    with distributed():
        before = dist_checkpointing.load_plain_tensors(str(walked.checkpoint(f"{source}_resumed", 5)))
        after = dist_checkpointing.load_plain_tensors(str(walked.checkpoint(target, 5)))
    before, after = tensors(before), tensors(after)
    assert set(before) == set(after)
    weights = {key for key in before if key.startswith("model.")}
    trained = TRAINED - (NOT_TIED if "tied" in source else set())
    for kind in ("exp_avg", "exp_avg_sq"):
        assert {key.removeprefix(f"optimizer.state.{kind}.") for key in before if f".{kind}." in key} >= trained
    assert any("experts.down_proj" in key for key in weights)
    for key, value in before.items():
        assert torch.equal(value, after[key]), key


@pytest.mark.parametrize("name", CONTINUED)
def test_a_dense_optimizer_is_kept_under_another_layout(walked, name):
    """Two pipeline stages of a dense bf16 model; then MSA alone, with virtual stages, or data-parallel in fp32."""
    with distributed():
        dense = tensors(dist_checkpointing.load_plain_tensors(str(walked.checkpoint("dense", 3))))
        begun = tensors(dist_checkpointing.load_plain_tensors(str(walked.checkpoint(name, 0))))
    for key, value in dense.items():
        # fp32 weights of an fp32 model are the optimizer's
        wanted = dense.get(f"optimizer.state.param.{key}", value) if "dp2" in name else value
        assert torch.equal(begun[key], wanted), key
    moments = [value for key, value in dense.items() if ".exp_avg." in key]
    assert len(moments) > 30 and all(value.any() for value in moments)
    index = {key: value for key, value in begun.items() if key not in dense}
    assert len(index) == 4 * 4 * 4 and all(".indexer." in key for key in index)  # layers x weights x (model, optimizer)
    for key, value in index.items():
        if key.startswith("model."):
            assert torch.equal(begun[f"optimizer.state.param.{key}"], value.float())
            assert not begun[f"optimizer.state.exp_avg.{key}"].any()
            assert not begun[f"optimizer.state.exp_avg_sq.{key}"].any()
    assert all(walked.seen(name, rank)["steps"] == [0.0, 3.0] for rank in range(CONTINUED[name][0]))


def tensors(state):
    found = {}

    def visit(node, path):
        if isinstance(node, dict):
            for key, value in node.items():
                visit(value, f"{path}.{key}" if path else str(key))
        elif isinstance(node, torch.Tensor):
            found[path] = node

    visit(state, "")
    return found


def test_experts_are_kept_by_global_id(walked):
    """Field case T3.6: four experts over two ranks are four different entries."""
    with distributed():
        state = tensors(dist_checkpointing.load_plain_tensors(str(walked.checkpoint("ep2_resumed", 5))))
    experts = state["model.decoder.layers.1.mlp.experts.down_proj"]
    assert experts.shape == (4, 24, 16)
    assert len({tuple(expert.flatten()[:4].tolist()) for expert in experts}) == 4
