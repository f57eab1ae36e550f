"""Arrays that are built once and then read by everyone: atomic, by key, on shared or on local disks.

An entry is a folder `<cache_dir>/<key>` that appears by a rename when it is complete, and is never changed. Processes
that build the same entry at once do not hurt each other: the first rename wins, the others throw their copy away. No
lock is taken, since locks do not hold on every network file system.
"""

import errno
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch.distributed as dist

Arrays = dict[str, np.ndarray]


def cached(cache_dir: Path, key: str, build: Callable[[], Arrays]) -> Arrays:
    """The arrays of entry `key`, memory-mapped; `build` makes them where the entry is absent.

    With torch.distributed initialised all ranks must call this together. Rank 0 builds first; then one rank for each
    host and folder that still sees no entry (a local disk) builds its own. An error on one rank is raised on all.
    """
    entry = Path(cache_dir).absolute() / key
    if not (dist.is_available() and dist.is_initialized()):
        _build_if_absent(entry, build)
        return _load(entry)
    rank = dist.get_rank()
    _agree(_attempt(entry, build) if rank == 0 else None)
    place = None if entry.is_dir() else (socket.gethostname(), str(entry))
    places: list[tuple[str, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(places, place)
    builds = place is not None and places.index(place) == rank
    _agree(_attempt(entry, build) if builds else None)
    return _load(entry)


def _attempt(entry: Path, build: Callable[[], Arrays]) -> str | None:
    """Build; a failure comes back as text, for every rank to raise."""
    try:
        _build_if_absent(entry, build)
    except (OSError, ValueError, ImportError, MemoryError) as err:
        return f"{type(err).__name__}: {err}"
    return None


def _agree(problem: str | None) -> None:
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if found := next(((rank, text) for rank, text in enumerate(problems) if text), None):
        raise ValueError(f"rank {found[0]} could not build the order of the samples: {found[1]}")


def _build_if_absent(entry: Path, build: Callable[[], Arrays]) -> None:
    if entry.is_dir():
        return
    arrays = build()
    entry.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{entry.name}.", dir=entry.parent))
    try:
        os.chmod(unfinished, 0o755)  # mkdtemp shuts out everyone else
        for name, array in arrays.items():
            with open(unfinished / f"{name}.npy", "wb") as file:
                np.save(file, array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        try:
            os.rename(unfinished, entry)
        except OSError as err:
            if err.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _load(entry: Path) -> Arrays:
    if not entry.is_dir():
        raise ValueError(f"data.cache_dir: {entry} was built but cannot be seen. Does something remove it?")
    return {path.stem: np.load(path, mmap_mode="r", allow_pickle=False) for path in sorted(entry.glob("*.npy"))}
