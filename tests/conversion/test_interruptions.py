"""A conversion killed midway leaves nothing that looks complete, and the same command finishes it."""

import os
import signal
from collections import Counter

import pytest
from safetensors.torch import load_file

from msa_pretrain.training.checkpoint import find_checkpoint, is_complete
from msa_pretrain.training.conversion.exporting import ExportChoices, plan_export, run_export
from msa_pretrain.training.conversion.importing import Import, plan_import, run_import
from msa_pretrain.training.conversion.verifying import compare, verify_tensors


def killed(convert, after: int) -> None:
    """Run `convert(on_bytes)` in a process that SIGKILL ends at the given call of `on_bytes`."""
    child = os.fork()
    if not child:
        calls = iter(range(after))

        def on_bytes(count: int) -> None:
            if next(calls, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)

        convert(on_bytes)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.fixture
def made(monkeypatch) -> Counter:
    """How often each tensor was made from the source."""
    counts: Counter = Counter()
    make = Import.make

    def counting(self, piece):
        counts[piece.ours] += 1
        return make(self, piece)

    monkeypatch.setattr(Import, "make", counting)
    return counts


def test_an_import_goes_on_after_its_last_whole_file(saved, tmp_path, made):
    plan, final = plan_import(saved("qwen3")), tmp_path / "step_0"
    killed(lambda on_bytes: run_import(plan, final, on_bytes), after=3 + 8 + 4)  # half of the second layer's eight
    assert not final.exists() and find_checkpoint(tmp_path) is None
    assert not is_complete(tmp_path / "step_0.partial")
    run_import(plan, final)
    assert is_complete(final) and not (tmp_path / "step_0.partial").exists()
    assert set(made) == {
        piece.ours for piece in plan.pieces if piece.ours.startswith(("decoder.layers.1", "decoder.layers.2"))
    }
    tensors = verify_tensors(compare(saved("qwen3"), final))
    assert len(tensors) == 36 and not any(tensor.max_difference for tensor in tensors)


def test_another_source_starts_anew(copy_of, change_tensors, tmp_path, made):
    folder, final = copy_of("qwen3"), tmp_path / "step_0"
    killed(lambda on_bytes: run_import(plan_import(folder), final, on_bytes), after=15)
    change_tensors(folder, lambda tensors: tensors["model.norm.weight"].add_(1))
    run_import(plan_import(folder), final)
    assert sum(made.values()) == 3 + 3 * 8
    assert not any(tensor.max_difference for tensor in verify_tensors(compare(folder, final)))


def test_an_export_goes_on_after_its_last_whole_file(saved, tmp_path):
    checkpoint = run_import(plan_import(saved("qwen3")), tmp_path / "checkpoint")
    plan = plan_export(checkpoint, ExportChoices(family="qwen3", max_positions=64, max_shard_bytes=40_000))
    final, partial = tmp_path / "exported", tmp_path / "exported.partial"
    killed(lambda on_bytes: run_export(plan, final, on_bytes), after=12)
    assert not final.exists() and not (partial / "config.json").exists()
    whole = {file.name: file.stat().st_mtime_ns for file in partial.glob("*.safetensors")}
    assert whole and any(file.suffix == ".tmp" for file in partial.iterdir())
    run_export(plan, final)
    assert {name: (final / name).stat().st_mtime_ns for name in whole} == whole
    assert not [file for file in final.iterdir() if file.suffix in (".tmp", ".txt")]
    assert not any(tensor.max_difference for tensor in verify_tensors(compare(final, checkpoint)))
    assert sum(len(load_file(file)) for file in final.glob("*.safetensors")) == 36
