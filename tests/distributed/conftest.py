"""Launches the walker (walker.py) once per world size and hands its findings to the tests."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core import dist_checkpointing

from msa_pretrain.data.prepare import write_indexed_dataset
from msa_pretrain.model.parallel import distributed

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from plans import (  # noqa: E402  (scripts beside the tests, not a package)
    ALONE,
    CONTEXT_DOCUMENTS,
    CONTINUED,
    CUTS,
    DENSE,
    DOCUMENTS,
    EXACT,
    FOUR_PROCESSES,
    KEEP,
    LAYOUTS,
    LENGTHS,
    MTP,
    MTP_LAYOUTS,
    PAIRS,
    RAMP,
    RESUMED,
    ROW,
    SHARED_SAMPLES,
    TIED,
    VARIANT_LAYOUTS,
    VARIANTS,
)
from walker import Run  # noqa: E402


class Launcher:
    """Runs plans in a folder with data in it and remembers what each rank saw."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        generator = np.random.default_rng(0)
        documents = [
            (f"doc{number}", generator.integers(0, 39, generator.integers(1, 40)).tolist()) for number in range(400)
        ]
        write_indexed_dataset(iter(documents), directory / "data", vocab_size=40, eod_id=39)
        self.logs: dict[str, Path] = {}
        """Run's name -> the output of its job."""
        self._plans = 0

    def launch(self, world_size: int, runs: list[Run], *, torchrun: bool = True, killed: bool = False) -> None:
        """Raises with the job's output when it fails; `killed`: it must end by a signal instead."""
        self._plans += 1
        plan = self.directory / f"plan{self._plans}.json"
        plan.write_text(json.dumps([asdict(run) for run in runs]))
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"] if torchrun else []
        command = [sys.executable, "-W", "ignore", *launcher, str(HERE / "walker.py"), str(self.directory), str(plan)]
        log = plan.with_suffix(".log")
        self.logs |= {run.name: log for run in runs}
        # a file: a pipe would wait for every process that a killed job leaves behind
        with log.open("w") as file:
            done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=2400, check=False)
        if killed:
            assert done.returncode == -9 or "SIGKILL" in log.read_text(), log.read_text()[-3000:]
        elif done.returncode:
            raise RuntimeError(f"the walker failed:\n{log.read_text()[-6000:]}")

    def seen(self, name: str, rank: int = 0) -> dict:
        return json.loads((self.directory / f"{name}.rank{rank}.json").read_text())

    def gradients(self, name: str, step: int) -> dict[str, torch.Tensor]:
        """Parameter's global name -> its whole gradient of that step, of a run with plans.EXACT that saved then."""
        with distributed():
            state = dist_checkpointing.load_plain_tensors(str(self.checkpoint(name, step)))
        moment = "optimizer.state.exp_avg."
        found = {key.removeprefix(moment): value.double() for key, value in state.items() if key.startswith(moment)}
        assert len(found) > 50 and all(value.isfinite().all() and value.any() for value in found.values())
        return found

    def checkpoint(self, folder: str, step: int) -> Path:
        return self.directory / "runs" / folder / "checkpoints" / f"step_{step}"


RATIOS = pytest.StashKey[list]()


@pytest.fixture(scope="session")
def ratios(request) -> list[list[str]]:
    """Rows of the table that ends the session's output: a layout's values over those of one process."""
    return request.config.stash.setdefault(RATIOS, [])


def pytest_terminal_summary(terminalreporter, config) -> None:
    if rows := config.stash.get(RATIOS, []):
        head = ["layout", "processes", "phase", "loss", "KL", "norm", "index norm", "worst gradient's error"]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        terminalreporter.section("layouts over one process")
        for row in (head, *rows):
            terminalreporter.write_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))


@pytest.fixture(scope="session")
def launcher(tmp_path_factory) -> Launcher:
    return Launcher(tmp_path_factory.mktemp("walker"))


@pytest.fixture(scope="session")
def walked(launcher, request):
    """All jobs, once; those of pairs of layouts only where a test of theirs was asked for."""
    with_pairs = any(item.get_closest_marker("parity") for item in request.session.items)
    long = dict(steps=20, warmup_steps=10)
    # tensor parallelism sends many messages: twelve steps of the twenty
    cut_long = dict(stop_before=13, save_at=[11], **long)
    short = dict(steps=4, warmup_steps=2, padded=True)
    each_phase = dict(steps=2, warmup_steps=1, save_at=[1, 2])
    launcher.launch(
        1,
        [
            Run("one", save_at=[11], **long),
            *(Run(name, overrides, **long) for name, overrides in ALONE.items()),
            *(Run(name, overrides, **short) for name, overrides in VARIANTS.items()),
            Run("whole_5", warmup_steps=5, save_at=[5]),
            Run("whole_7", warmup_steps=7),
            Run("idle_one", favour_first_half=True),
            Run("mtp_one", MTP),
            *(Run(name, [*ROW, *EXACT], documents=documents, **each_phase) for name, documents in DOCUMENTS.items()),
            Run("ramp_whole", RAMP),
            Run("lengths_one", LENGTHS, warmup_steps=7),
            Run("ramp_cut", RAMP, "ramp", save_at=[4], stop_before=6),
        ],
        torchrun=False,
    )
    # every run goes on past its checkpoint before it ends, and the last takes its job down with it
    cut = [
        Run(f"{name}_cut", [], name, warmup_steps=warmup, save_at=[at], stop_before=at + 3, kill=name == list(CUTS)[-1])
        for name, (warmup, at) in CUTS.items()
    ]
    launcher.launch(1, cut, torchrun=False, killed=True)
    launcher.launch(
        2,
        [
            *(
                Run(name, overrides, **(cut_long if name in SHARED_SAMPLES else long))
                for name, overrides in LAYOUTS.items()
                if with_pairs or name not in PAIRS
            ),
            *(Run(name, VARIANTS[of] + overrides, **short) for name, (of, overrides) in VARIANT_LAYOUTS.items()),
            *(Run(f"{name}_whole", overrides) for name, overrides in RESUMED.items()),
            Run("nan", nan_at=3),
            *(
                Run(name, [*ROW, *EXACT, *LAYOUTS["cp2"]], documents=documents, **each_phase)
                for name, documents in CONTEXT_DOCUMENTS.items()
            ),
            Run("lengths_dp2", LENGTHS, warmup_steps=7),
            *(Run(name, overrides, save_at=[5]) for name, overrides in MTP_LAYOUTS.items()),
            Run("idle", LAYOUTS["ep2_alltoall"], favour_first_half=True),
            Run("dense", DENSE, steps=3, warmup_steps=0, save_at=[3]),
            Run("batched_p2p", LAYOUTS["pp2_vpp2"], steps=3, warmup_steps=3, batched_p2p=True),
        ],
    )
    cut = [
        Run(f"{name}_cut", overrides, f"{name}_resumed", save_at=[5], stop_before=8, kill=name == list(RESUMED)[-1])
        for name, overrides in RESUMED.items()
    ]
    launcher.launch(2, cut, killed=True)
    checkpoint = {name: str(launcher.checkpoint(f"{name}_resumed", 5)) for name in RESUMED}
    loaded = dict(save_at=[5], stop_before=6)
    source = f"training.init_from={launcher.checkpoint('dense', 3)}"
    continued = {
        processes: [
            Run(name, [source, *KEEP, *overrides], save_at=[0], stop_before=1)
            for name, (number, overrides) in CONTINUED.items()
            if number == processes
        ]
        for processes in (1, 2)
    }
    launcher.launch(
        2,
        [
            *(Run(f"{name}_resumed", overrides) for name, overrides in RESUMED.items()),
            Run("ep2_to_dp2", [], load=checkpoint["ep2"], **loaded),
            Run("dp2_to_ep2", RESUMED["ep2"], load=checkpoint["dp2"], **loaded),
            Run("dp2_to_pp2", RESUMED["pp2"], load=checkpoint["dp2"], **loaded),
            Run("dp2_to_tp2", RESUMED["tp2"], load=checkpoint["dp2"], **loaded),
            *continued[2],
        ],
    )
    if with_pairs:
        launcher.launch(
            4, [Run(name, VARIANTS[of] + overrides, **short) for name, (of, overrides) in FOUR_PROCESSES.items()]
        )
    launcher.launch(
        1,
        [
            *(Run(name, warmup_steps=warmup) for name, (warmup, _) in CUTS.items()),
            Run("ramp", RAMP),
            *(
                Run(f"{name}_to_one", TIED if name.startswith("tied") else [], load=checkpoint[name], **loaded)
                for name in RESUMED
            ),
            *continued[1],
            *(Run(f"{name}_to_one", MTP, load=str(launcher.checkpoint(name, 5))) for name in MTP_LAYOUTS),
        ],
        torchrun=False,
    )
    launcher.launch(1, [Run("torchrun_whole_5")])
    return launcher
