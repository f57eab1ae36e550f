"""The metric registry: known names pass, unknown ones are refused with the nearest known one."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from msa_pretrain.training.metrics import REGISTRY, Reduction, check_values, find_metric, names_by_reduction


@pytest.mark.parametrize(
    "name, row",
    [
        ("train/lm_loss", "train/lm_loss"),
        ("indexer/kl/layer_0", "indexer/kl/layer_<i>"),
        ("indexer/score_recall/layer_61", "indexer/score_recall/layer_<i>"),
        ("indexer/score_recall/layer_3/group_2", "indexer/score_recall/layer_<i>/group_<r>"),
        ("eval/valid/lm_loss", "eval/<set>/lm_loss"),
        ("eval/wiki-v2.1/score_recall_skill", "eval/<set>/score_recall_skill"),
        ("eval/valid/lm_loss_sparse", "eval/<set>/lm_loss_<phase>"),
        ("eval/ruler/niah_single_1_4096", "eval/ruler/<task>_<len>"),
    ],
)
def test_names_and_patterns_are_found(name, row):
    assert find_metric(name) is REGISTRY[row]


@pytest.mark.parametrize(
    "name, nearest",
    [
        ("train/lm_los", "train/lm_loss"),
        ("train/learning_rate", None),
        ("optim/grad_nrom", "optim/grad_norm"),
        ("indexer/kl/layer3", "indexer/kl/layer_3"),
        ("indexer/score_recal/layer_12", "indexer/score_recall/layer_12"),
        ("eval/valid/lm_lose", "eval/valid/lm_loss"),
        ("eval/valid/lm_loss_spars", "eval/valid/lm_loss_sparse"),
        ("perf/tokens_per_s_per_gpus", "perf/tokens_per_s_per_gpu"),
    ],
)
def test_typo_is_refused_with_the_nearest_name(name, nearest):
    text = f"metric '{name}' is not registered. " + (f"Did you mean '{nearest}'?" if nearest else "")
    with pytest.raises(ValueError, match="^" + re.escape(text)):
        find_metric(name)


@pytest.mark.parametrize("name", ["indexer/kl/layer_<i>", "indexer/kl/layer_-1", "indexer/kl/layer_1x", "eval/a/b/ppl"])
def test_a_pattern_is_matched_as_a_whole(name):
    with pytest.raises(ValueError, match="is not registered"):
        find_metric(name)


def test_names_without_any_neighbour_point_at_the_list():
    with pytest.raises(ValueError, match=r"'zzz' is not registered\. Names are listed in training/metrics\.py"):
        find_metric("zzz")


def test_every_row_is_complete_and_well_formed():
    for name, metric in REGISTRY.items():
        assert re.fullmatch(r"[a-z]+(/[a-z0-9_<>]+)+", name), name
        assert metric.name == name and metric.description and metric.unit
        assert isinstance(metric.reduction, Reduction)


def test_units_are_in_the_names():
    for suffix, unit in (("_s", "s"), ("_gib", "GiB"), ("_fraction", "fraction")):
        assert {m.unit for name, m in REGISTRY.items() if name.endswith(suffix)} == {unit}


def test_values_become_plain_numbers():
    checked = check_values({"train/lm_loss": torch.tensor(2.5), "train/tokens": np.int64(7), "train/phase": "sparse"})
    assert checked == {"train/lm_loss": 2.5, "train/tokens": 7, "train/phase": "sparse"}
    assert [type(v) for v in checked.values()] == [float, int, str]


def test_a_text_for_a_number_is_refused():
    with pytest.raises(ValueError, match=r"metric 'optim/lr' takes a number in 1, got 'fast'"):
        check_values({"optim/lr": "fast"})
    with pytest.raises(ValueError, match=r"metric 'perf/step_s' takes a number in s, got None"):
        check_values({"perf/step_s": None})


def test_a_number_for_a_text_is_refused():
    with pytest.raises(ValueError, match=r"metric 'train/phase' takes a text, got 2"):
        check_values({"train/phase": 2})


def test_names_are_grouped_by_reduction():
    groups = names_by_reduction(["perf/step_s", "train/lm_loss", "memory/peak_gib", "indexer/kl/layer_1", "perf/mfu"])
    assert groups == {
        Reduction.MAX: ["memory/peak_gib", "perf/step_s"],
        Reduction.LAST: ["indexer/kl/layer_1", "train/lm_loss"],
        Reduction.MEAN: ["perf/mfu"],
    }


@pytest.mark.parametrize(
    "module", ["metrics", "redaction", "sinks", "wandb_sink", "summary", "console", "figures", "report"]
)
def test_tracking_knows_no_engine(module):
    import msa_pretrain.training

    source = (Path(msa_pretrain.training.__file__).parent / f"{module}.py").read_text()
    assert not re.search(r"^\s*(from|import) (megatron|hydra|omegaconf)\b", source, re.MULTILINE)
