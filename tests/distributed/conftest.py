"""Launches the walker (walker.py) once per world size and hands its findings to the tests."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from msa_pretrain.data.prepare import write_indexed_dataset

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from walker import Run  # noqa: E402  (the walker is a script beside the tests, not a package)


class Launcher:
    """Runs plans in a folder with data in it and remembers what each rank saw."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        generator = np.random.default_rng(0)
        documents = [
            (f"doc{number}", generator.integers(0, 39, generator.integers(1, 40)).tolist()) for number in range(400)
        ]
        write_indexed_dataset(iter(documents), directory / "data", vocab_size=40, eod_id=39)
        self._plans = 0

    def launch(self, world_size: int, runs: list[Run], *, torchrun: bool = True, killed: bool = False) -> None:
        """Raises with the job's output when it fails; `killed`: it must end by a signal instead."""
        self._plans += 1
        plan = self.directory / f"plan{self._plans}.json"
        plan.write_text(json.dumps([asdict(run) for run in runs]))
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"] if torchrun else []
        command = [sys.executable, "-W", "ignore", *launcher, str(HERE / "walker.py"), str(self.directory), str(plan)]
        log = plan.with_suffix(".log")  # a file: a pipe would wait for every process that a killed job leaves behind
        with log.open("w") as file:
            done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=200, check=False)
        if killed:
            assert done.returncode == -9 or "SIGKILL" in log.read_text(), log.read_text()[-3000:]
        elif done.returncode:
            raise RuntimeError(f"the walker failed:\n{log.read_text()[-6000:]}")

    def seen(self, name: str, rank: int = 0) -> dict:
        return json.loads((self.directory / f"{name}.rank{rank}.json").read_text())

    def checkpoint(self, folder: str, step: int) -> Path:
        return self.directory / "runs" / folder / "checkpoints" / f"step_{step}"


@pytest.fixture(scope="session")
def launcher(tmp_path_factory) -> Launcher:
    return Launcher(tmp_path_factory.mktemp("walker"))
