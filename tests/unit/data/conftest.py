"""Small indexed datasets. Token ids are unique over a corpus wherever a test has to tell tokens apart."""

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported: nothing here may wait for a network

from msa_pretrain.data.dataset import BlendedDataset, build_dataset
from msa_pretrain.data.writer import write_indexed_dataset

EOD = 0


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """write(name, documents) -> prefix; ids below 5000, EOD 0."""

    def write_documents(name: str, documents: list[list[int]], *, vocab_size: int = 5000, tokenizer: str = "t") -> str:
        named = ((f"{name}-{number}", ids) for number, ids in enumerate(documents))
        write_indexed_dataset(named, tmp_path / name, vocab_size=vocab_size, eod_id=EOD, tokenizer=tokenizer)
        return str(tmp_path / name)

    return write_documents


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., object]:
    def build_from(*blends: dict[str, float] | tuple[int, dict[str, float]], **changes: object) -> BlendedDataset:
        """Of one blend, or of stages (first sample, blend)."""
        stages = [blend if isinstance(blend, tuple) else (0, blend) for blend in blends]
        arguments = {"num_samples": 1, "seq_length": 8, "seed": 0, "cache_dir": tmp_path / "cache"}
        return build_dataset(stages, **{**arguments, **changes})

    return build_from


@pytest.fixture
def unique_documents() -> list[list[int]]:
    """30 documents of 1 to 30 tokens (EOD not counted), 465 in all, every id used once."""
    ids = itertools.count(1)
    return [[next(ids) for _ in range(1 + (7 * number) % 30)] for number in range(30)]
