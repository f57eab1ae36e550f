"""Searches: ranked layouts are legal, what is set stays, and a failure says why."""

import pytest

from msa_pretrain.training.checks import cross_check
from msa_pretrain.training.planner.hardware import GPUS
from msa_pretrain.training.planner.plan_report import flops_curve, nothing_fits, text
from msa_pretrain.training.planner.search import phase_steps, plan, search

PINNED = {"training.micro_batch_size", "training.recompute"}


@pytest.fixture(scope="module")
def small():
    """Pinned keys that leave a search of a second."""
    return {"parallel.virtual_pipeline", "training.micro_batch_size"}


def test_ranked_layouts_are_legal_fit_and_are_in_order(config_of, small):
    config = config_of()
    found = search(config, 512, GPUS["h200"], small)
    assert len(found.fitting) > 20 and found.refused
    for candidate in found.fitting:
        assert list(cross_check(candidate.config, 512)) == []
        assert candidate.peak.needed <= 139 * 2**30
        assert candidate.layout.data_parallel * candidate.load.num_micro_batches == 2048
    days = [candidate.days.middle for candidate in found.fitting]
    assert days == sorted(days)
    needs = [candidate.peak.needed for candidate in found.too_large]
    assert needs == sorted(needs) and needs[0] > 139 * 2**30
    assert {c.config.training.micro_batch_size for c in found.fitting} == {1}
    assert found.own is not None and found.own.config == config
    assert {c.config.parallel.virtual_pipeline for c in found.fitting} == {1}
    assert len({c.config.training.recompute for c in found.fitting}) > 1


def test_a_pinned_layout_is_the_only_one(config_of):
    names = ("tensor", "sequence", "pipeline", "virtual_pipeline", "context", "expert")
    config = config_of()
    found = search(config, 512, GPUS["h200"], PINNED | {f"parallel.{name}" for name in names})
    assert [candidate.config for candidate in found.fitting] == [config]
    assert found.fitting[0].days == plan(config, 512, GPUS["h200"]).days


def test_steps_of_the_phases(config_of):
    # 40e9 tokens of 16.8M a step, and the rest of 178,814
    assert [*phase_steps(config_of()).values()] == [2385, 178_814 - 2385]
    assert len(phase_steps(config_of("attention=dense", "training.warmup_tokens=0"))) == 1


def test_the_nearest_miss_is_named(config_of, small):
    config = config_of()
    found = search(config, 16, GPUS["h100"], small)
    assert not found.fitting and found.too_large
    message = text(config, 16, GPUS["h100"], found, 5, [])
    need = found.too_large[0].peak.needed / 2**30
    assert f"NOTHING FITS: the nearest of {len(found.too_large)} layouts needs {need:.1f} GiB a GPU" in message
    assert "torchrun" not in message and found.own is None  # 16 GPUs do not hold 8 stages x 32


def test_refusals_are_told(config_of):
    """3 GPUs do not divide the batch of 2,048, whatever the layout."""
    config = config_of()
    found = search(config, 3, GPUS["h200"], PINNED)
    assert not found.fitting and not found.too_large
    message = nothing_fits(config, 3, GPUS["h200"], found)
    assert "the checks refuse every layout on 3 GPUs. The nearest to a legal one is refused because:" in message
    assert (
        "- training.global_batch_size (2048) must be a multiple of micro_batch_size x data-parallel size (1 x 3)"
        in message
    )


def test_what_the_checks_refuse_is_not_searched(config_of, small):
    """Four KV groups do not split over eight ranks, so no candidate does; the reason is kept."""
    found = search(config_of("model.num_kv_heads=4"), 512, GPUS["h200"], small)
    assert {candidate.config.parallel.tensor for candidate in found.fitting + found.too_large} == {1, 2, 4}
    assert any(
        problem.startswith("parallel.tensor (8) must divide model.num_kv_heads (4)") for problem in found.refused
    )


def test_curve_of_the_papers_model(config_of):
    spec = config_of("model.num_query_heads=64", "model.num_kv_heads=4").spec
    curve = flops_curve(spec)
    assert [row["tokens"] for row in curve] == [2**power for power in range(13, 21)]
    assert round(curve[-1]["attention_ratio"], 1) == 28.4
    ratios = [row["ratio"] for row in curve]
    assert ratios == sorted(ratios) and ratios[0] > 1 and ratios[-1] > 20
