"""The weights of a training checkpoint (Megatron's torch_dist), written and read one tensor at a time.

`dist_checkpointing.save` and `load` want the whole model in memory. Its files are those of torch.distributed's
checkpoints, whose reader and writer work by items; they are used here directly.
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from ...model.hf import ConversionError
from ..checkpoint import is_complete
from .tensor_files import partial_name, sync

PREFIX = "model."
JOURNAL = "journal"


@dataclass(frozen=True)
class Chunk:
    """A box of one tensor."""

    key: str
    dtype: torch.dtype
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class _LazyPlanner(DefaultSavePlanner):
    """Makes each tensor when it is written."""

    def __init__(self, make: Callable[[int], Tensor], order: dict[MetadataIndex, int]) -> None:
        super().__init__()
        self.make, self.order = make, order

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.make(self.order[write_item.index])


class CheckpointWriter:
    """Writes `final`, under another name until `finish`; a writer that was killed goes on with its whole groups.

    fingerprint: says what is being written; what another conversion left is thrown away.
    """

    def __init__(self, final: Path, fingerprint: str) -> None:
        self.final, self.folder = final, partial_name(final)
        note = self.folder / f"{JOURNAL}.txt"
        if not (note.is_file() and note.read_text() == fingerprint):
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            note.write_text(fingerprint)
        self.writer = FileSystemWriter(self.folder, single_file_per_rank=True, sync_files=True)
        self.tensors: dict[str, TensorStorageMetadata] = {}
        self.places: list[WriteResult] = []

    def write(self, group: int, chunks: Sequence[Chunk], make: Callable[[int], Tensor]) -> bool:
        """Write a file of these chunks, `make(i)` being the tensor of the i-th; False where it is there already."""
        for chunk in chunks:
            stored = self.tensors.setdefault(
                chunk.key,
                TensorStorageMetadata(TensorProperties(dtype=chunk.dtype), torch.Size(chunk.global_shape), []),
            )
            stored.chunks.append(_box(chunk))
        journal = self.folder / f"{JOURNAL}_{group}.json"
        if journal.is_file():
            self.places += [_from_record(record) for record in json.loads(journal.read_text())]
            return False
        indices = [MetadataIndex(chunk.key, torch.Size(chunk.offset)) for chunk in chunks]
        items = [
            WriteItem(
                index=index,
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    _box(chunk), TensorProperties(dtype=chunk.dtype), torch.Size(chunk.global_shape)
                ),
            )
            for index, chunk in zip(indices, chunks, strict=True)
        ]
        planner = _LazyPlanner(make, {index: number for number, index in enumerate(indices)})
        plan = SavePlan(items, storage_data=_StoragePrefix(f"__{group}_"))
        results = self.writer.write_data(plan, planner).value()
        _write_whole(journal, json.dumps([_to_record(result) for result in results]))
        self.places += results
        return True

    def finish(self, run: dict[str, Any], files: dict[str, str]) -> None:
        """Make the checkpoint complete. `run`: its common state; `files`: texts to lie beside it, by relative path."""
        for name, text in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            sync(path)
        torch.save({"run": run}, self.folder / "common.pt")
        sync(self.folder / "common.pt")
        save_config(CheckpointingConfig("torch_dist", 1), str(self.folder))
        sync(self.folder / "metadata.json")
        for journal in self.folder.glob(f"{JOURNAL}*"):
            journal.unlink()
        self.writer.finish(Metadata(state_dict_metadata=dict(self.tensors)), [self.places])
        os.replace(self.folder, self.final)
        sync(self.final.parent)


def _box(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.shape))


def _to_record(result: WriteResult) -> list[Any]:
    place = result.storage_data
    assert result.index.offset is not None
    return [result.index.fqn, list(result.index.offset), place.relative_path, place.offset, place.length]


def _from_record(record: list[Any]) -> WriteResult:
    key, offset, path, start, length = record
    return WriteResult(MetadataIndex(key, torch.Size(offset)), length, _StorageInfo(path, start, length))


def _write_whole(path: Path, text: str) -> None:
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(text)
    sync(unfinished)
    os.replace(unfinished, path)


class CheckpointReader:
    """The weights of a complete checkpoint, by key (with the prefix `model.`). The files are pickle inside."""

    def __init__(self, path: Path) -> None:
        if not is_complete(path):
            raise ConversionError(f"{path} is not a complete checkpoint.")
        self.path = path
        metadata = FileSystemReader(path).read_metadata()
        self.tensors: dict[str, TensorStorageMetadata] = {
            key: value
            for key, value in metadata.state_dict_metadata.items()
            if key.startswith(PREFIX) and isinstance(value, TensorStorageMetadata)
        }
        self._places = {(index.fqn, tuple(index.offset or ())): info for index, info in metadata.storage_data.items()}
        self._boxes: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    @property
    def run(self) -> dict[str, Any]:
        return dist_checkpointing.load_common_state_dict(str(self.path))["run"]

    def peak_bytes(self) -> int:
        """Of boxes in memory at once: those that hold the same experts, or one of another tensor."""
        return max(
            sum(box.sizes.numel() for box in tensor.chunks if box.offsets[:1] == first)
            * tensor.properties.dtype.itemsize
            for tensor in self.tensors.values()
            for first in {box.offsets[:1] for box in tensor.chunks}
        )

    def read(self, key: str, index: int | None = None) -> Tensor:
        """The whole tensor, or with `index` that row [1, ...] of it."""
        stored = self.tensors[key]
        if index is None:
            return self._whole(key, stored)
        boxes = [box for box in stored.chunks if box.offsets[0] <= index < box.offsets[0] + box.sizes[0]]
        wanted = {(key, tuple(box.offsets)): box for box in boxes}
        # a box may hold many experts, which are asked for one by one
        self._boxes = {
            where: self._boxes[where] if where in self._boxes else self._load(key, box) for where, box in wanted.items()
        }
        row = torch.empty([1, *stored.size[1:]], dtype=stored.properties.dtype)
        for where, box in wanted.items():
            local = index - box.offsets[0]
            _place(row, self._boxes[where][local : local + 1], [0, *box.offsets[1:]])
        return row

    def _whole(self, key: str, stored: TensorStorageMetadata) -> Tensor:
        self._boxes = {}
        if len(stored.chunks) == 1:
            return self._load(key, stored.chunks[0])
        tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
        for box in stored.chunks:
            _place(tensor, self._load(key, box), box.offsets)
        return tensor

    def _load(self, key: str, box: ChunkStorageMetadata) -> Tensor:
        place = self._places[key, tuple(box.offsets)]
        with open(self.path / place.relative_path, "rb") as file:
            view = FileSystemReader(self.path)._slice_file(file, place)
            return torch.load(view, map_location="cpu", weights_only=True)


def _place(tensor: Tensor, part: Tensor, offsets: Sequence[int]) -> None:
    """Copy `part` into the tensor at these offsets."""
    target = tensor
    for dim, (start, size) in enumerate(zip(offsets, part.shape, strict=True)):
        target = target.narrow(dim, start, size)
    target.copy_(part)
