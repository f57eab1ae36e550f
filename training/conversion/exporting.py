"""A training checkpoint as a Hugging Face folder, shard by shard and tensor by tensor."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...model.config import ModelSpec, Precision
from ...model.hf import FAMILIES, ConversionError
from ...model.hf.envelope import TEXT_PREFIX, VISION, envelope_config, small_tower_shapes
from ...model.hf.family import ExportOptions, Family, Piece
from ...model.hf.forms import Sizes
from ...model.mcore import DTYPES
from ..config import saved_spec
from .matching import is_mtp, model_tensors
from .stored import PREFIX, CheckpointReader
from .tensor_files import INDEX, Planned, TensorFolder, check_space, partial_name, sync, write_header, write_tensor

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class ExportChoices:
    """What a user may choose of an export."""

    family: str
    envelope: bool = True
    """For minimax_m3: the vision-language envelope; else the text model alone."""
    precision: Precision | None = None
    """Of the weights; None keeps the checkpoint's."""
    vocab_size: int | None = None
    """Rows of embedding and head; None: those of the import, or all."""
    max_positions: int
    max_shard_bytes: int = 5 * 10**9
    tokenizer: Path | None = None
    """A folder whose tokenizer files and special token ids go along."""
    vision_from: Path | None = None
    """A release whose vision tower goes along, in place of a small one of zeros."""


@dataclass(frozen=True)
class Part:
    """Tensors that are written together: those of a piece, or one of the vision tower."""

    tensors: list[Planned]
    make: Callable[[], list[Tensor]]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)


@dataclass(frozen=True)
class Export:
    """A checked conversion that has not begun."""

    reader: CheckpointReader
    spec: ModelSpec
    family: Family
    choices: ExportChoices
    sizes: Sizes
    notes: list[str] = field(default_factory=list)
    """What a user should know of the result."""

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.choices.precision or self.spec.precision]

    @property
    def prefix(self) -> str:
        return TEXT_PREFIX if self.has_envelope else ""

    @property
    def has_envelope(self) -> bool:
        return self.family.name == "minimax_m3" and self.choices.envelope

    def pieces(self) -> Iterator[Piece]:
        return self.family.pieces(self.spec, self.prefix)

    def ours(self, piece: Piece) -> Tensor:
        if piece.ours is None:
            return torch.zeros(piece.zeros, dtype=self.dtype)
        return self.reader.read(PREFIX + piece.ours, piece.expert)

    def written_dtype(self, piece: Piece) -> torch.dtype:
        return torch.float32 if piece.router and self.family.fp32_router else self.dtype

    def split(self, piece: Piece) -> list[Tensor]:
        """Theirs out of ours, as they are written."""
        dtype = self.written_dtype(piece)
        return [part.to(dtype).contiguous() for part in piece.form.split(self.ours(piece), self.sizes)]

    def parts(self) -> Iterator[Part]:
        for piece in self.pieces():
            if not piece.theirs:
                continue
            shape = piece.zeros if piece.ours is None else self._shape(piece)
            shapes = [part.shape for part in piece.form.split(torch.empty(shape, device="meta"), self.sizes)]
            planned = [
                Planned(name, self.written_dtype(piece), tuple(shape))
                for name, shape in zip(piece.theirs, shapes, strict=True)
            ]
            yield Part(planned, partial(self.split, piece))
        if self.has_envelope:
            yield from self._vision()

    def _shape(self, piece: Piece) -> tuple[int, ...]:
        shape = tuple(self.reader.tensors[f"{PREFIX}{piece.ours}"].size)
        return shape if piece.expert is None else (1, *shape[1:])

    def _vision(self) -> Iterator[Part]:
        if self.choices.vision_from is None:
            for name, shape in small_tower_shapes(self.spec.model.hidden_size).items():
                planned = Planned(name, self.dtype, shape)
                yield Part([planned], partial(_zeros, planned))
            return
        folder = TensorFolder(self.choices.vision_from)
        for name, entry in folder.entries.items():
            if name.startswith(VISION):
                planned = Planned(name, entry.dtype, entry.shape)
                yield Part([planned], partial(_read, folder, name))

    @property
    def total_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts())

    @property
    def peak_bytes(self) -> int:
        """Held at once beside the program itself: the largest boxes on disk, and twice the largest part."""
        return self.reader.peak_bytes() + 2 * max(part.num_bytes for part in self.parts())

    def config(self) -> dict[str, Any]:
        options = ExportOptions(
            vocab_size=self.sizes.vocab_size,
            max_positions=self.choices.max_positions,
            dtype=str(self.dtype).removeprefix("torch."),
            token_ids=_token_ids(self.choices.tokenizer),
        )
        config = self.family.write_config(self.spec, options)
        if self.has_envelope:
            return envelope_config(config, _config_of(self.choices.vision_from))
        return config | ({"model_type": "minimax_m3_vl_text"} if self.family.name == "minimax_m3" else {})


def _zeros(planned: Planned) -> list[Tensor]:
    return [torch.zeros(planned.shape, dtype=planned.dtype)]


def _read(folder: TensorFolder, name: str) -> list[Tensor]:
    return [folder.read(name)]


def plan_export(path: Path, choices: ExportChoices) -> Export:
    """Compare the checkpoint at `path` with the model of its config, and that with the format.

    Raises:
        ConversionError: a tensor is missing or left over, or the format cannot express the model: every reason.
    """
    reader = CheckpointReader(path)
    run = reader.run
    spec = saved_spec(run["config"])
    family = FAMILIES[choices.family]
    if problems := list(family.cannot_express(spec)):
        raise ConversionError(f"the format of {family.name} cannot express this model:", problems)
    stored = {key.removeprefix(PREFIX): tuple(value.size) for key, value in reader.tensors.items() if not is_mtp(key)}
    wanted = model_tensors(spec)
    if stored != wanted:
        differing = sorted(stored.items() ^ wanted.items())
        raise ConversionError(f"{path} does not hold the model of its config:", [f"{key}" for key, _ in differing])
    rows = spec.model.vocab_size
    vocab_size = choices.vocab_size or run.get("vocab_size", rows)
    if vocab_size > rows:
        raise ConversionError(f"--vocab-size ({vocab_size}) is more than the model's {rows} rows.")
    sizes = Sizes.of(spec, vocab_size, zero_centered_norms=family.zero_centered_norms)
    export = Export(reader, spec, family, choices, sizes)
    for piece in export.pieces():
        if not piece.theirs and export.ours(piece).any():
            raise ConversionError(f"the format of {family.name} has no place for {piece.ours}, which is not zero.")
    if len(stored) < len(reader.tensors):
        export.notes.append(
            f"{len(reader.tensors) - len(stored)} tensors of MTP layers, which only train, are left out"
        )
    if vocab_size < rows:
        export.notes.append(f"{rows - vocab_size} rows past the vocabulary of {vocab_size} are cut off")
    if sizes.norm_shift:
        export.notes.append("norm weights w are written as w - 1")
    if export.has_envelope and choices.vision_from is None:
        export.notes.append("the vision tower is a small one of zeros; --vision-from brings a release's")
    return export


def _config_of(folder: Path | None) -> dict[str, Any]:
    if folder is None or not (folder / "config.json").is_file():
        return {}
    return json.loads((folder / "config.json").read_text())


def _token_ids(folder: Path | None) -> dict[str, Any]:
    config = _config_of(folder)
    config = config.get("text_config", config)
    return {key: config[key] for key in TOKEN_IDS if config.get(key) is not None}


def run_export(plan: Export, final: Path, on_bytes: Callable[[int], None] = lambda count: None) -> Path:
    """Write the folder `final`, complete or not at all; a killed conversion goes on after its last whole file."""
    if final.exists():
        raise ConversionError(f"{final} exists. Choose another --to, or remove it.")
    check_space(final, plan.total_bytes)
    folder = partial_name(final)
    note, fingerprint = folder / "journal.txt", _fingerprint(plan)
    if not (note.is_file() and note.read_text() == fingerprint):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        note.write_text(fingerprint)
    shards = _shards(plan)
    weight_map: dict[str, str] = {}
    for number, parts in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= {tensor.name: name for part in parts for tensor in part.tensors}
        if (folder / name).is_file():
            on_bytes(sum(part.num_bytes for part in parts))
            continue
        unfinished = folder / f"{name}.tmp"
        with unfinished.open("wb") as stream:
            write_header(stream, [tensor for part in parts for tensor in part.tensors])
            for part in parts:
                for planned, tensor in zip(part.tensors, part.make(), strict=True):
                    assert (tuple(tensor.shape), tensor.dtype) == (planned.shape, planned.dtype), planned
                    write_tensor(stream, tensor)
                on_bytes(part.num_bytes)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(unfinished, folder / name)
    _write_beside(plan, folder, weight_map, sum(part.num_bytes for parts in shards for part in parts))
    note.unlink()
    os.replace(folder, final)
    sync(final.parent)
    return final


def _write_beside(plan: Export, folder: Path, weight_map: dict[str, str], total: int) -> None:
    texts = {"config.json": json.dumps(plan.config(), indent=2) + "\n"}
    if len(set(weight_map.values())) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        texts[INDEX] = json.dumps(index, indent=2) + "\n"
    for name, text in texts.items():
        (folder / name).write_text(text)
        sync(folder / name)
    if plan.choices.tokenizer is not None:
        for name in TOKENIZER_FILES:
            if (plan.choices.tokenizer / name).is_file():
                shutil.copy(plan.choices.tokenizer / name, folder / name)


def _shards(plan: Export) -> list[list[Part]]:
    """Files in the order of the layers, each as full as the limit allows."""
    shards: list[list[Part]] = [[]]
    size = 0
    for part in plan.parts():
        if shards[-1] and size + part.num_bytes > plan.choices.max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(part)
        size += part.num_bytes
    return shards


def _fingerprint(plan: Export) -> str:
    metadata = plan.reader.path / ".metadata"
    what = f"{plan.reader.path.resolve()} {metadata.stat().st_mtime_ns} {plan.choices} {plan.sizes}"
    return hashlib.sha256(what.encode()).hexdigest()
