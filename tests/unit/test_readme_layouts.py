"""The README's tables of layouts are what the tests of layouts run, and what the checks refuse."""

import re
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from msa_pretrain.training.config import ConfigError, load_config

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "distributed"))

import grid  # noqa: E402  (data beside the walker, not a package)
import plans  # noqa: E402

SECTION = (ROOT / "README.md").read_text().split("## Layouts")[1].split("\n## ")[0]


def rows_below(heading: str) -> list[list[str]]:
    """Cells of the table whose first heading is this one."""
    table = SECTION.split(f"| {heading} |")[1].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()[2:]]


REFUSED = [re.findall(r"`([^`]+)`", row[0]) for row in rows_below("refused")]


def test_the_grid_is_the_one_that_is_trained():
    assert "\n".join(grid.readme_table()) in SECTION
    features = len(grid.FEATURES)
    assert len(grid.PAIRS) == features * (features - 1) // 2 - len(grid.EXCLUSIVE)
    assert {layout.processes for layout in grid.PAIRS} == {1, 2, 4}


def test_every_other_layout_is_named_with_what_runs_it():
    named = {name: row[2] for row in rows_below("what equals one process") for name in re.findall(r"`(\w+)`", row[1])}
    groups = (plans.LAYOUTS, plans.VARIANT_LAYOUTS, plans.FOUR_PROCESSES, plans.MTP_LAYOUTS, plans.CONTEXT_DOCUMENTS)
    wanted = {name: "`make test-layouts`" for group in groups for name in group}
    wanted |= dict.fromkeys([*plans.PAIRS, *plans.FOUR_PROCESSES], "`make parity`")
    assert named == wanted


@pytest.mark.parametrize("overrides", REFUSED, ids=" ".join)
def test_what_is_refused_is_refused_with_a_remedy(overrides):
    with initialize_config_module("msa_pretrain.configs", version_base="1.3"):
        composed = compose("pretrain", ["experiment=cpu_smoke", "dry_run=true", *overrides])
    with pytest.raises(ConfigError) as caught:
        load_config(composed, world_size=2)
    key = overrides[0].split("=")[0]
    assert any(key in problem and re.search(r"\. (Use|Set) ", problem) for problem in caught.value.problems)


def test_every_check_of_a_layout_is_in_the_table():
    """By the sizes: a row for each one that a layout is made of."""
    keys = {override.split("=")[0] for overrides in REFUSED for override in overrides}
    sizes = {"tensor", "sequence", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor"}
    assert keys >= {f"parallel.{name}" for name in sizes}
