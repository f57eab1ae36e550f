"""Times: ranges in order, parts that add up, and what must be slower."""

import pytest

from msa_pretrain.model.config import Phase
from msa_pretrain.training.planner.duration import step_duration
from msa_pretrain.training.planner.hardware import GPUS
from msa_pretrain.training.planner.ranges import Range, over


def seconds(config, layout_of, gpu="h200", world_size=512, phase=Phase.sparse, **parallel):
    return step_duration(*layout_of(config, world_size, **parallel), phase, GPUS[gpu])


def test_ranges():
    assert over(6.0, Range(2.0, 3.0)) == Range(2.0, 3.0)
    assert Range(1.0, 4.0).middle == 2.0
    assert Range(1.0, 2.0) + Range(3.0, 4.0) == Range(4.0, 6.0) and Range(1.0, 2.0) * 3.0 == Range(3.0, 6.0)
    assert Range(1.0, 5.0).at_least(Range(2.0, 3.0)) == Range(2.0, 5.0)


@pytest.mark.parametrize("gpu", GPUS)
def test_every_part_has_a_low_and_a_high(config_of, layout_of, gpu):
    duration = seconds(config_of(), layout_of, gpu)
    assert all(0 < part.low < part.high for part in duration.parts.values())
    assert duration.step_s.low == pytest.approx(sum(part.low for part in duration.parts.values()))
    assert {"layers", "expert messages", "pipeline messages", "pipeline bubble", "optimizer"} <= set(duration.parts)


def test_no_layer_is_faster_than_the_matrix_rate(config_of, layout_of):
    """The work of a stage at the measured rate of a large product bounds the low estimate from below."""
    duration = seconds(config_of("training.recompute=none"), layout_of)
    # a stage of 8 layers is the slowest; weights of a layer that each token goes through
    layer = 3072 * 112 * 128 + 256 * 3072 + 8 * 3 * 3072 * 1536
    assert "head" not in duration.parts
    assert duration.parts["layers"].low > 32 * 8192 * 6 * 8 * layer / 795e12


def test_what_costs_time(config_of, layout_of):
    base = seconds(config_of("training.recompute=none"), layout_of).step_s
    assert seconds(config_of("training.recompute=selective"), layout_of).step_s.middle > base.middle
    full = seconds(config_of("training.recompute=full"), layout_of).step_s
    assert 1.2 * base.middle < full.middle < 1.5 * base.middle
    # half the GPUs: twice the micro-batches, less bubble
    half = seconds(config_of("training.recompute=none"), layout_of, world_size=256).step_s
    assert 1.7 * base.middle < half.middle < 2 * base.middle
    assert seconds(config_of("training.recompute=none"), layout_of, "h100").step_s.middle > base.middle
    assert seconds(config_of("training.recompute=none"), layout_of, "b200").step_s.middle < base.middle


def test_virtual_stages_shrink_the_bubble(config_of, layout_of):
    one, two = (
        seconds(config_of(f"parallel.virtual_pipeline={count}"), layout_of).parts["pipeline bubble"].middle
        for count in (1, 2)
    )
    assert two == pytest.approx(one / 2, rel=0.02)


def test_short_steps_are_bound_by_launches(config_of, layout_of):
    """gpu_debug took 0.63 s a sparse step (docs/results/gpu_training.md); its GPU work alone is much less."""
    config = config_of(experiment="gpu_debug")
    step = seconds(config, layout_of, world_size=1).step_s
    assert step.low < 0.63 < step.high * 1.05
