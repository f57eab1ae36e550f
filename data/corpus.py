"""The built-in corpus: the Python standard library's own source text, present wherever Python is.

A file's split and its rank under `max_bytes` are functions of its relative path alone, so neither moves when files are
added, and a smaller `max_bytes` keeps a subset of each split.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DEFAULT_MAX_BYTES = 12_000_000
VALID_PER_MILLE = 50
SPLITS = ("train", "valid")

# Installed packages are not the standard library; its tests hold odd encodings and deliberate syntax errors; pydoc_data
# is one generated file of 0.75 MB, more than all other validation files together.
EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data", "__pycache__"}
)
# Written at build time, so it differs from machine to machine.
EXCLUDED_PREFIX = "_sysconfigdata"


@dataclass(frozen=True)
class CorpusFile:
    """One source file; `name` is its path relative to the library's root, with forward slashes."""

    name: str
    path: Path
    num_bytes: int

    @property
    def split(self) -> str:
        return "valid" if _hash(self.name, "split") % 1000 < VALID_PER_MILLE else "train"


def _hash(name: str, purpose: str) -> int:
    """A 64-bit hash that is the same in every process; `purpose` keeps the split and the byte limit independent."""
    return int.from_bytes(hashlib.sha256(f"{purpose}:{name}".encode()).digest()[:8], "big")


def stdlib_root() -> Path:
    """The folder that holds the standard library's source text."""
    root = Path(sysconfig.get_path("stdlib"))
    if not (root / "os.py").is_file():
        raise ValueError(
            f"the built-in corpus needs the Python standard library's source text, but {root} holds no os.py "
            "(a zipped or stripped Python). Use a Python with its library as .py files."
        )
    return root


def list_corpus(*, max_bytes: int = DEFAULT_MAX_BYTES, root: Path | None = None) -> list[CorpusFile]:
    """The corpus below `root` (default: the standard library), sorted by name, of at most `max_bytes` bytes.

    Files are taken in the order of a hash of their names until the next one would exceed the limit.
    """
    if max_bytes < 1:
        raise ValueError(f"max_bytes ({max_bytes}) must be at least 1.")
    root = stdlib_root() if root is None else root
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in EXCLUDED_FOLDERS]
        for name in names:
            if name.endswith(".py") and not name.startswith(EXCLUDED_PREFIX):
                path = Path(folder, name)
                files.append(CorpusFile(path.relative_to(root).as_posix(), path, path.stat().st_size))
    taken, num_bytes = [], 0
    for file in sorted(files, key=lambda file: (_hash(file.name, "limit"), file.name)):
        num_bytes += file.num_bytes
        if num_bytes > max_bytes:
            break
        taken.append(file)
    return sorted(taken, key=lambda file: file.name)


def read_corpus(
    split: str, *, max_bytes: int = DEFAULT_MAX_BYTES, root: Path | None = None
) -> Iterator[tuple[str, bytes]]:
    """(name, content) of every file of `split`, in order of name."""
    if split not in SPLITS:
        raise ValueError(f"the built-in corpus has no split {split!r}. Use one of {', '.join(SPLITS)}.")
    files = list_corpus(max_bytes=max_bytes, root=root)
    return ((file.name, file.path.read_bytes()) for file in files if file.split == split)
