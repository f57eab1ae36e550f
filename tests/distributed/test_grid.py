"""Features of layouts alone and in pairs: loss, KL, gradient norms and every gradient equal those of one process.

The walker trains each layout for one step of the warm-up and one of the sparse phase, with Adam's first decay at 0 and
no clipping, so that the first moment in a checkpoint is the gradient of that step: assembled from all ranks' shards,
under global names, as a resumed run would read it.
"""

import math

import pytest
from grid import PAIRS, REFERENCE, SINGLES
from plans import EXACT
from walker import Run

pytestmark = pytest.mark.layouts
STEPS = {"warmup": 1, "sparse": 2}
VALUES = ("train/lm_loss", "indexer/kl", "optim/grad_norm", "optim/indexer_grad_norm")


@pytest.fixture(scope="module")
def grid(launcher, request):
    """One job a number of processes; pairs only where a test of theirs was asked for."""
    with_pairs = any(item.get_closest_marker("parity") for item in request.session.items)
    layouts = [REFERENCE, *SINGLES, *(PAIRS if with_pairs else [])]
    for processes in (1, 2, 4):
        runs = [
            Run(layout.name, EXACT + layout.overrides, steps=2, warmup_steps=1, save_at=[1, 2])
            for layout in layouts
            if layout.processes == processes
        ]
        if runs:
            launcher.launch(processes, runs, torchrun=processes > 1)
    return launcher


@pytest.fixture(scope="module")
def reference(grid):
    """Phase -> parameter -> gradient of the process without any feature."""
    return {phase: grid.gradients(REFERENCE.name, step) for phase, step in STEPS.items()}


@pytest.mark.parametrize("phase", STEPS)
@pytest.mark.parametrize(
    "layout",
    [*SINGLES, *(pytest.param(layout, marks=pytest.mark.parity) for layout in PAIRS)],
    ids=lambda layout: layout.name,
)
def test_equals_one_process(grid, reference, ratios, layout, phase):
    """To 1e-5, each gradient by its norm; the logged norms are those of the gradients: dense, expert and index ones."""
    ours, wanted = (grid.seen(name)["series"][STEPS[phase] - 1] for name in (layout.name, REFERENCE.name))
    assert ours["train/phase"] == phase and ours["step"] == STEPS[phase]
    found = grid.gradients(layout.name, STEPS[phase])
    assert set(found) == set(reference[phase])
    errors = {
        name: ((found[name] - gradient).norm() / gradient.norm()).item() for name, gradient in reference[phase].items()
    }
    worst = max(errors, key=errors.__getitem__)
    norms = {
        kind: math.sqrt(sum(found[name].square().sum().item() for name in found if (".indexer." in name) == is_index))
        for kind, is_index in (("optim/grad_norm", False), ("optim/indexer_grad_norm", True))
    }
    ratios.append(
        [layout.name, str(layout.processes), phase]
        + [f"{ours[key] / wanted[key]:.7f}" for key in VALUES]
        + [f"{errors[worst]:.1e}"]
    )
    for key in wanted.keys() - {"train/phase"}:
        assert ours[key] == pytest.approx(wanted[key], rel=1e-5), key
    for key, norm in norms.items():
        assert ours[key] == pytest.approx(norm, rel=1e-5), key
    assert errors[worst] <= 1e-5, (worst, errors[worst])
