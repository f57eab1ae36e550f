"""A Hugging Face folder as a training checkpoint, one file for each layer, written tensor by tensor."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...model.config import ModelSpec, Precision
from ...model.hf import ConversionError, family_of
from ...model.hf.family import Architecture, Family, Piece
from ...model.hf.forms import Sizes
from ...model.mcore import DTYPES
from ..checkpoint import is_complete
from ..config import architecture_to_dict, to_yaml
from .matching import HEAD_NAME, Source, model_tensors
from .quantized import FP8
from .stored import PREFIX, CheckpointWriter, Chunk
from .tensor_files import TensorFolder, check_space

EMBED = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Import:
    """A checked conversion that has not begun."""

    family: Family
    spec: ModelSpec
    vocab_size: int
    pieces: list[Piece]
    shapes: dict[str, tuple[int, ...]]
    source: Source
    ignored: list[str]
    architecture: Architecture

    @property
    def sizes(self) -> Sizes:
        return Sizes.of(self.spec, self.vocab_size, zero_centered_norms=self.family.zero_centered_norms)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.spec.precision]

    @property
    def total_bytes(self) -> int:
        return sum(self.chunk(piece).num_bytes for piece in self.pieces)

    @property
    def peak_bytes(self) -> int:
        """Held at once beside the program itself: the parts of the largest piece, what they make, and its rounding."""
        return max(
            sum(map(self.source.num_bytes, piece.theirs)) + 2 * self.chunk(piece).num_bytes for piece in self.pieces
        )

    def chunk(self, piece: Piece) -> Chunk:
        assert piece.ours is not None
        shape = self.shapes[piece.ours]
        dtype = torch.float32 if piece.router else self.dtype
        if piece.expert is None:
            return Chunk(PREFIX + piece.ours, dtype, shape, (0,) * len(shape), shape)
        offset = (piece.expert, *(0,) * (len(shape) - 1))
        return Chunk(PREFIX + piece.ours, dtype, shape, offset, (1, *shape[1:]))

    def make(self, piece: Piece) -> Tensor:
        chunk = self.chunk(piece)
        if not piece.theirs:
            return torch.zeros(chunk.shape, dtype=chunk.dtype)
        parts = [self.source.read(name) for name in piece.theirs]
        return piece.form.join(parts, self.sizes).to(chunk.dtype).contiguous()


def plan_import(path: Path, *, precision: Precision | None = None, vocab_multiple: int = 1) -> Import:
    """Read config and headers of the folder at `path` and compare them with the model they describe.

    Args:
        precision: of the weights written; None keeps theirs (bf16 for FP8).
        vocab_multiple: our embedding and head get rows of zeros up to a multiple of it.

    Raises:
        ConversionError: anything that the model cannot be, or a tensor that is missing, left over or of another shape.
    """
    if vocab_multiple < 1:
        raise ConversionError(f"--vocab-multiple ({vocab_multiple}) must be at least 1.")
    config = json.loads((path / "config.json").read_text()) if (path / "config.json").is_file() else None
    if config is None:
        raise ConversionError(f"{path} has no config.json. Name the folder of a Hugging Face model.")
    family = family_of(config)
    architecture = family.read_config(config)
    folder = TensorFolder(path)
    vocab_size = architecture.model.vocab_size
    rows = -(-vocab_size // vocab_multiple) * vocab_multiple
    architecture = replace(architecture, model=replace(architecture.model, vocab_size=rows))
    spec = architecture.spec(precision or _precision(folder))
    source = Source(folder, family, spec)
    pieces = list(family.pieces(spec, source.prefix))
    shapes = model_tensors(spec)
    sizes = Sizes.of(spec, vocab_size, zero_centered_norms=family.zero_centered_norms)
    ignored = source.match(pieces, shapes, sizes)
    plan = Import(family, spec, vocab_size, pieces, shapes, source, ignored, architecture)
    _check_copied_head(plan)
    _check_rounding(plan, asked=precision is not None)
    return plan


def _precision(folder: TensorFolder) -> Precision:
    """That of the widest weight of two dimensions, router apart."""
    widest = max(
        (
            entry.dtype
            for name, entry in folder.entries.items()
            if len(entry.shape) == 2 and not name.endswith((".gate.weight", "_scale_inv"))
        ),
        key=lambda dtype: dtype.itemsize,
        default=None,
    )
    if widest in (torch.bfloat16, *FP8):
        return Precision.bf16
    if widest == torch.float32:
        return Precision.fp32
    raise ConversionError(f"{folder.path} has weights of {widest}. Choose --dtype bf16 or --dtype fp32.")


def _check_copied_head(plan: Import) -> None:
    """A tied model's folder may hold the head too: as a copy, or the model is not tied."""
    if head := [name for name in plan.ignored if name.endswith(HEAD_NAME)]:
        embedding = plan.source.read(plan.source.prefix + EMBED)
        if not torch.equal(plan.source.read(head[0]), embedding):
            raise ConversionError(
                f"{head[0]} is not the embedding, though config.json says tie_word_embeddings. Correct config.json."
            )


def _check_rounding(plan: Import, *, asked: bool) -> None:
    if asked:
        return
    wide = [
        name
        for piece in plan.pieces
        if not piece.router
        for name in piece.theirs
        if plan.source.folder.entries[name].dtype.itemsize > plan.dtype.itemsize
    ]
    if wide:
        raise ConversionError(
            f"{wide[0]} and {len(wide) - 1} more are wider than {plan.dtype}, in which the weights would be written. "
            "Choose --dtype fp32 to keep them or --dtype bf16 to round them."
        )


def run_import(plan: Import, final: Path, on_bytes: Callable[[int], None] = lambda count: None) -> Path:
    """Write the checkpoint `final`, complete or not at all; a killed conversion goes on where it was.

    on_bytes: told of the bytes of every tensor written.
    """
    if final.exists():
        state = "is a checkpoint already" if is_complete(final) else "exists and is no checkpoint"
        raise ConversionError(f"{final} {state}. Choose another --to, or remove it.")
    check_space(final, plan.total_bytes)
    writer = CheckpointWriter(final, _fingerprint(plan))
    for group, pieces in enumerate(_by_layer(plan.pieces)):
        chunks = [plan.chunk(piece) for piece in pieces]

        def make(number: int, pieces: list[Piece] = pieces, chunks: list[Chunk] = chunks) -> Tensor:
            tensor = plan.make(pieces[number])
            on_bytes(chunks[number].num_bytes)
            return tensor

        if not writer.write(group, chunks, make):
            on_bytes(sum(chunk.num_bytes for chunk in chunks))
    writer.finish(_run_state(plan), _hydra_files(plan))
    return final


def _by_layer(pieces: list[Piece]) -> list[list[Piece]]:
    groups: dict[str, list[Piece]] = {}
    for piece in pieces:
        assert piece.ours is not None
        parts = piece.ours.split(".")
        groups.setdefault(parts[2] if parts[:2] == ["decoder", "layers"] else "", []).append(piece)
    return list(groups.values())


def _fingerprint(plan: Import) -> str:
    """Of the source and of what is made of it: a rerun with other files or options starts anew."""
    digest = hashlib.sha256(f"{plan.spec} {plan.vocab_size} {plan.family.name}".encode())
    for name, entry in sorted(plan.source.folder.entries.items()):
        changed = entry.file.stat().st_mtime_ns
        digest.update(f"{name} {entry.file.name} {changed} {entry.dtype} {entry.shape} {entry.start}\n".encode())
    return digest.hexdigest()


def _run_state(plan: Import) -> dict[str, Any]:
    """What a training run keeps in its checkpoints, as far as it exists without a run."""
    sections = architecture_to_dict(plan.architecture)
    return {
        "imported_from": plan.family.name,
        "vocab_size": plan.vocab_size,
        "config": to_yaml({**sections, "training": {"precision": plan.spec.precision.name}}),
    }


def _hydra_files(plan: Import) -> dict[str, str]:
    """Config groups of the model, for `pretrain --config-dir <checkpoint>/configs model=imported moe=imported`."""
    return {
        f"configs/{section}/imported.yaml": to_yaml(values)
        for section, values in architecture_to_dict(plan.architecture).items()
    }
