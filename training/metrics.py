"""The one registry of metric names: what each means, its unit, and how the ranks' values combine.

Names read `section/name` with the unit in the name. A placeholder stands for a part that varies:

    <i>      layer number, counted from 0 over the whole model      indexer/kl/layer_12
    <r>      KV group of that layer                                 indexer/score_recall/layer_12/group_3
    <set>    name of an evaluation set                              eval/valid/lm_loss
    <source> source of an evaluation set                            eval/valid/lm_loss/web_valid
    <phase>  dense, warmup or sparse                                eval/valid/lm_loss_sparse
    <task>, <len>  RULER task and context length                    eval/ruler/niah_single_4096

A metric that is not here cannot be logged; add a row below first.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from numbers import Real

MetricValue = int | float | str


class Reduction(Enum):
    """How the values that the data-parallel ranks hold become the one that is logged."""

    SUM = "sum"  # parts of one total
    MEAN = "mean"  # equally weighted averages
    MAX = "max"  # the worst rank counts
    LAST = "last"  # every rank holds the same value already


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One row of the registry. `name` may hold placeholders; `unit` "name" marks a text value."""

    name: str
    description: str
    unit: str
    reduction: Reduction

    @property
    def is_text(self) -> bool:
        return self.unit == "name"


PLACEHOLDERS = {
    "<i>": r"\d+",
    "<r>": r"\d+",
    "<set>": r"[A-Za-z0-9][A-Za-z0-9_.-]*",
    "<source>": r"[A-Za-z0-9_.-]+",
    "<phase>": "dense|warmup|sparse",
    "<task>": r"[a-z0-9][a-z0-9_]*",
    "<len>": r"\d+",
}

SUM, MEAN, MAX, LAST = Reduction.SUM, Reduction.MEAN, Reduction.MAX, Reduction.LAST

# Index measures on sampled long rows (more than k visible blocks), in training and on evaluation sets alike.
_RECALL = {
    "block_recall": "share of the true top-k blocks that the index selects",
    "random_block_recall": "expected block recall of the local block plus k-1 uniformly drawn blocks",
    "score_recall": "attention mass of the true top-k blocks that the index selects, of the mass of all of them",
    "random_score_recall": "expected score recall of the local block plus k-1 uniformly drawn blocks",
    "score_recall_skill": "(score recall - random) / (1 - random): 0 is chance, 1 is perfect",
    "captured_mass": "full-attention mass on the selected blocks",
}
# Expert loads of a step's global batch: description, unit, how the layers combine.
_LOADS = {
    "max_over_mean_load": ("tokens of the busiest expert over the mean", "ratio", "worst layer"),
    "min_over_mean_load": ("tokens of the idlest expert over the mean", "ratio", "worst layer"),
    "load_std": ("standard deviation of the experts' tokens over the mean", "ratio", "worst layer"),
    "dead_experts": ("experts that got no token", "experts", "summed over layers"),
    "bias_range": ("largest minus smallest expert bias", "1", "worst layer"),
}
_LONG_ROWS = ("share of rows with more than k visible blocks, the only rows that the recalls count", "fraction")

# name: (description, unit, reduction). Losses, KLs and recalls are ratios of sums over all ranks (a mean of the ranks'
# ratios would weigh unequal row counts alike): divided after their sums are reduced, they arrive equal everywhere.
_ROWS: dict[str, tuple[str, str, Reduction]] = {
    "train/lm_loss": ("language-model loss", "nats/token", LAST),
    "train/loss": ("LM + kl_coef x KL summed over layers + moe/weighted_losses + mtp_coef x MTP", "nats/token", LAST),
    "train/mtp_loss": ("loss of the tokens further ahead, mean over depths", "nats/token", LAST),
    "train/mtp_loss/depth_<i>": ("loss of the token i after the next, i = 1, 2, ...", "nats/token", LAST),
    "train/tokens": ("tokens consumed since the start: samples x length, padding included", "tokens", LAST),
    "train/samples": ("samples consumed since the start", "samples", LAST),
    "train/seq_length": ("tokens of each sample of the step, padding included", "tokens", LAST),
    "train/step": ("optimizer steps since the start", "steps", LAST),
    "train/phase": ("dense, warmup or sparse", "name", LAST),
    "optim/lr": ("learning rate of the backbone", "1", LAST),
    "optim/indexer_lr": ("learning rate of the index branch", "1", LAST),
    "optim/grad_norm": ("gradient norm of the backbone before its clip", "1", LAST),
    "optim/indexer_grad_norm": ("gradient norm of the index branch before its own clip", "1", LAST),
    "optim/skipped_steps": ("steps skipped for a non-finite loss or gradient since the start", "steps", LAST),
    "indexer/kl": ("KL(P || P_idx), mean over rows, groups and MSA layers", "nats", LAST),
    "indexer/kl_uniform": ("KL(P || uniform) on sampled rows: what an index that knows nothing gets", "nats", LAST),
    "indexer/kl_share_of_loss": ("kl_coef x KL summed over layers, of train/loss", "fraction", LAST),
    "indexer/kl/layer_<i>": ("KL(P || P_idx) of one layer", "nats", LAST),
    "indexer/kl_uniform/layer_<i>": ("KL(P || uniform) of one layer", "nats", LAST),
    "indexer/entropy": ("entropy of P_idx, mean over sampled rows, groups and layers", "nats", LAST),
    "indexer/entropy/layer_<i>": ("entropy of P_idx in one layer", "nats", LAST),
    "indexer/local_fraction": ("P_idx mass in the local block", "fraction", LAST),
    "indexer/sink_fraction": ("P_idx mass in the first block of the document", "fraction", LAST),
    "indexer/long_row_fraction": (*_LONG_ROWS, LAST),
    "moe/aux_loss": ("sequence balance loss, mean over tokens and layers: 1 is balance", "1", LAST),
    "moe/z_loss": ("logsumexp(router logits)^2, mean over tokens and layers", "1", LAST),
    "moe/weighted_losses": ("both with their factors, summed over layers: their part of train/loss", "1", LAST),
    "moe/forced_balance": ("1: experts are chosen in turn (moe.force_balance), so no loss means anything", "1", LAST),
    "perf/tokens_per_s_per_gpu": ("training throughput of one GPU", "tokens/s", MEAN),
    "perf/tflops_per_gpu": ("work really done in this phase, of one GPU", "TFLOP/s", MEAN),
    "perf/mfu": ("tflops_per_gpu over the dense peak of the GPU", "fraction", MEAN),
    "perf/step_s": ("time of one optimizer step on the slowest rank", "s", MAX),
    "perf/time_left_s": ("estimated time to the end of the run", "s", MAX),
    "memory/peak_gib": ("peak allocated GPU memory of the fullest rank", "GiB", MAX),
    "eval/<set>/lm_loss": ("language-model loss on an evaluation set", "nats/token", LAST),
    "eval/<set>/lm_loss/<source>": ("language-model loss on one source of an evaluation set", "nats/token", LAST),
    "eval/<set>/lm_loss_<phase>": ("the same weights evaluated in that phase, taken at the switch", "nats/token", LAST),
    "eval/<set>/ppl": ("exp of the language-model loss", "1", LAST),
    "eval/<set>/kl": ("KL(P || P_idx) on an evaluation set", "nats", LAST),
    "eval/<set>/kl_uniform": ("KL(P || uniform) on an evaluation set", "nats", LAST),
    "eval/<set>/long_row_fraction": (*_LONG_ROWS, LAST),
    "eval/ruler/<task>_<len>": ("score of a RULER task at one context length", "fraction", LAST),
}
for _name, (_description, _unit, _over_layers) in _LOADS.items():
    _ROWS[f"moe/{_name}"] = (f"{_description}; {_over_layers}", _unit, LAST)
    _ROWS[f"moe/{_name}/layer_<i>"] = (f"{_description}; one layer", _unit, LAST)
for _name, _description in _RECALL.items():
    _ROWS[f"indexer/{_name}"] = (_description, "fraction", LAST)
    _ROWS[f"indexer/{_name}/layer_<i>"] = (f"{_description}; one layer", "fraction", LAST)
    _ROWS[f"indexer/{_name}/layer_<i>/group_<r>"] = (f"{_description}; one layer and KV group", "fraction", LAST)
    _ROWS[f"eval/<set>/{_name}"] = (_description, "fraction", LAST)

REGISTRY: dict[str, Metric] = {
    name: Metric(name=name, description=description, unit=unit, reduction=reduction)
    for name, (description, unit, reduction) in _ROWS.items()
}


def _compile(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(<\w+>)", pattern)
    return re.compile(
        "".join(f"(?:{PLACEHOLDERS[part]})" if part in PLACEHOLDERS else re.escape(part) for part in parts)
    )


_PATTERNS = [(_compile(name), metric) for name, metric in REGISTRY.items() if "<" in name]


@lru_cache(maxsize=4096)
def find_metric(name: str) -> Metric:
    """The registry row of a name. Raises ValueError, with the nearest name, when there is none."""
    if name in REGISTRY and "<" not in name:
        return REGISTRY[name]
    for pattern, metric in _PATTERNS:
        if pattern.fullmatch(name):
            return metric
    near = _nearest(name)
    hint = f" Did you mean '{near}'?" if near else " Names are listed in training/metrics.py."
    raise ValueError(f"metric '{name}' is not registered.{hint}")


def _nearest(name: str) -> str | None:
    """The closest valid name, with the caller's own layer, group and set filled into the patterns."""
    numbers = re.findall(r"\d+", name)
    segments = name.split("/")
    fill = {"<phase>": "sparse"}
    if numbers:
        fill |= {"<i>": numbers[0], "<r>": numbers[-1]}
    if len(segments) > 2:
        fill["<set>"] = segments[1]
    candidates = []
    for candidate in REGISTRY:
        for placeholder, value in fill.items():
            candidate = candidate.replace(placeholder, value)
        candidates.append(candidate)
    near = difflib.get_close_matches(name, candidates, n=1)
    return near[0] if near else None


def names_by_reduction(names: Iterable[str]) -> dict[Reduction, list[str]]:
    """Names grouped by how ranks combine, each group sorted, so that one collective serves a group."""
    groups: dict[Reduction, list[str]] = {}
    for name in sorted(names):
        groups.setdefault(find_metric(name).reduction, []).append(name)
    return groups


def check_values(values: Mapping[str, object]) -> dict[str, MetricValue]:
    """Plain Python values of registered metrics; one-element tensors and arrays become numbers.

    Raises ValueError for an unregistered name, a text where a number belongs, or the reverse.
    """
    checked: dict[str, MetricValue] = {}
    for name, value in values.items():
        metric = find_metric(name)
        plain = value.item() if hasattr(value, "item") else value
        if metric.is_text:
            if not isinstance(plain, str):
                raise ValueError(f"metric '{name}' takes a text, got {plain!r}.")
            checked[name] = plain
        elif isinstance(plain, Real):
            checked[name] = int(plain) if isinstance(plain, int) else float(plain)
        else:
            raise ValueError(f"metric '{name}' takes a number in {metric.unit}, got {plain!r}.")
    return checked
