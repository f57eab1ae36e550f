"""Cached orders: one builder, atomic, on shared and on local disks; two jobs at once do not hurt each other."""

import multiprocessing
import time

import numpy as np
import pytest
import torch

from msa_pretrain.data.cache import cached

FORK = multiprocessing.get_context("fork")  # spares the children the imports


def run(target, *arguments, processes):
    """What `target(number, *arguments)` returns in that many processes; an exception comes back as text."""
    results = FORK.SimpleQueue()

    def work(number):
        try:
            results.put((number, target(number, *arguments)))
        except Exception as err:
            results.put((number, f"{type(err).__name__}: {err}"))

    started = [FORK.Process(target=work, args=(number,)) for number in range(processes)]
    for process in started:
        process.start()
    found = dict(results.get() for _ in started)
    for process in started:
        process.join(timeout=60)
    assert [process.exitcode for process in started] == [0] * processes
    return [found[number] for number in range(processes)]


def builder(folder, number=0, fail=False):
    """Builds two arrays, slowly, and leaves a mark."""

    def build():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"built-by-{number}-{time.monotonic_ns()}").touch()
        if fail:
            raise OSError(28, "No space left on device")
        time.sleep(0.01)
        return {"a": np.arange(50_000), "b": np.full((3, 2), number)}

    return build


def test_an_entry_is_built_once_and_mapped(tmp_path):
    for _ in range(2):
        arrays = cached(tmp_path / "cache", "key", builder(tmp_path / "marks"))
        assert arrays["a"].tolist() == list(range(50_000)) and arrays["b"].shape == (3, 2)
        assert isinstance(arrays["a"], np.memmap) and not arrays["a"].flags.writeable
    assert len(list((tmp_path / "marks").iterdir())) == 1
    assert sorted(p.name for p in (tmp_path / "cache").rglob("*")) == ["a.npy", "b.npy", "key"]


def test_a_build_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(OSError, match="No space left"):
        cached(tmp_path / "cache", "key", builder(tmp_path / "marks", fail=True))
    assert not (tmp_path / "cache").exists() or list((tmp_path / "cache").iterdir()) == []


def test_eight_jobs_that_build_one_cache_twenty_times(tmp_path):
    """T4.8."""

    def job(number, folder):
        for turn in range(20):
            arrays = cached(folder / "cache", f"key{turn}", builder(folder / "marks", number))
            if not (np.array_equal(arrays["a"], np.arange(50_000)) and len(set(arrays["b"].ravel().tolist())) == 1):
                return "torn"
        return "fine"

    assert run(job, tmp_path, processes=8) == ["fine"] * 8
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == sorted(f"key{turn}" for turn in range(20))


def _in_a_world(rank, folder, cache_of, fail_on):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    try:
        arrays = cached(cache_of(rank), "key", builder(folder / "marks", rank, fail=rank == fail_on))
        return arrays["b"].ravel().tolist()
    finally:
        torch.distributed.destroy_process_group()


def test_ranks_on_two_nodes_with_disks_of_their_own(tmp_path):
    """T4.7: ranks 0 and 1 see one folder, ranks 2 and 3 another; one rank of each builds."""
    seen = run(_in_a_world, tmp_path, lambda rank: tmp_path / f"node{rank // 2}", None, processes=4)
    assert seen == [[0] * 6, [0] * 6, [2] * 6, [2] * 6]
    assert sorted(p.name[:10] for p in (tmp_path / "marks").iterdir()) == ["built-by-0", "built-by-2"]
    assert (tmp_path / "node0/key/a.npy").read_bytes() == (tmp_path / "node1/key/a.npy").read_bytes()


def test_ranks_on_a_shared_disk(tmp_path):
    seen = run(_in_a_world, tmp_path, lambda rank: tmp_path / "shared", None, processes=4)
    assert seen == [[0] * 6] * 4
    assert [p.name[:10] for p in (tmp_path / "marks").iterdir()] == ["built-by-0"]


@pytest.mark.parametrize("fail_on", [0, 2])
def test_a_failure_is_one_message_on_every_rank(tmp_path, fail_on):
    """A rank that raised alone would leave the others waiting for it."""
    seen = run(_in_a_world, tmp_path, lambda rank: tmp_path / f"node{rank // 2}", fail_on, processes=4)
    problem = "OSError: [Errno 28] No space left on device"
    expected = f"ValueError: rank {fail_on} could not build the order of the samples: {problem}"
    assert seen == [expected] * 4
