"""Does a Hugging Face folder hold the weights of a checkpoint? Both are read back from disk, tensor by tensor.

This compares through the map that converted; whether the map is right, only the logits can tell (`logits.py`).
"""

import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...model.config import AttentionKind, ModelSpec
from ...model.hf import ConversionError, family_of
from ...model.hf.family import Architecture, Piece
from ...model.hf.forms import Sizes
from ..config import saved_spec
from .matching import Source, is_mtp, model_tensors
from .stored import PREFIX, CheckpointReader
from .tensor_files import TensorFolder, bytes_of

# What may differ between a model and its copy in another format: padding, spelling of norms, training alone.
FREE = {
    "model": {"vocab_size", "zero_centered_norms", "tie_embeddings", "mtp_layers", "backend", "init_std"},
    "moe": {"shared_hidden_size", "bias_update_rate", "aux_loss_coef", "z_loss_coef"},
}
SELECTION = ("block_size", "top_k", "index_dim", "init_blocks")


@dataclass(frozen=True)
class Verified:
    """One tensor of theirs."""

    name: str
    num_bytes: int
    checksum: int
    """CRC-32 of the values on disk, in the narrower of the two dtypes."""
    max_difference: float
    """0 where every bit is the same."""


@dataclass(frozen=True)
class Comparison:
    """A folder and a checkpoint whose names, shapes and configs agree."""

    source: Source
    reader: CheckpointReader
    spec: ModelSpec
    sizes: Sizes
    pieces: list[Piece]

    @property
    def total_bytes(self) -> int:
        return sum(self.source.folder.entries[name].num_bytes for piece in self.pieces for name in piece.theirs)

    def tensors(self) -> Iterator[Verified]:
        """Compare every tensor. Yields it with its difference."""
        for piece in self.pieces:
            ours = self._ours(piece)
            if not piece.theirs and ours.any():
                yield Verified(f"(none) for {piece.ours}", 0, 0, ours.abs().max().item())
            for name, part in zip(piece.theirs, piece.form.split(ours, self.sizes), strict=False):
                yield self._verified(name, part)

    def _ours(self, piece: Piece) -> Tensor:
        if piece.ours is None:
            return torch.zeros(piece.zeros)
        return self.reader.read(PREFIX + piece.ours, piece.expert)

    def _verified(self, name: str, ours: Tensor) -> Verified:
        theirs = self.source.read(name)
        narrow = min(ours.dtype, theirs.dtype, key=lambda dtype: dtype.itemsize)
        ours, theirs = ours.to(narrow).contiguous(), theirs.to(narrow)
        same = bytes_of(ours) == bytes_of(theirs)
        # nan where only the sign of a zero differs
        difference = 0.0 if same else (ours.double() - theirs.double()).abs().max().item() or float("nan")
        return Verified(name, self.source.folder.entries[name].num_bytes, zlib.crc32(bytes_of(theirs)), difference)


def compare(folder: Path, checkpoint: Path) -> Comparison:
    """Compare key sets, shapes and configs.

    Raises ConversionError with everything that is missing, left over, of another shape, or another model.
    """
    reader = CheckpointReader(checkpoint)
    spec = saved_spec(reader.run["config"])
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    family = family_of(config)
    architecture = family.read_config(config)
    if problems := list(_differing(architecture, spec)):
        raise ConversionError(f"{folder} and {checkpoint} are different models:", problems)
    source = Source(TensorFolder(folder), family, spec)
    pieces = list(family.pieces(spec, source.prefix))
    sizes = Sizes.of(spec, architecture.model.vocab_size, zero_centered_norms=family.zero_centered_norms)
    shapes = model_tensors(spec)
    source.match(pieces, shapes, sizes)
    stored = {key.removeprefix(PREFIX): tuple(value.size) for key, value in reader.tensors.items() if not is_mtp(key)}
    if stored != shapes:
        raise ConversionError(
            f"{checkpoint} does not hold the model of its config:",
            [str(key) for key, _ in sorted(stored.items() ^ shapes.items())],
        )
    return Comparison(source, reader, spec, sizes, pieces)


def _differing(theirs: Architecture, ours: ModelSpec) -> Iterator[str]:
    """Values of the two configs that make another model."""
    for section in ("model", "moe"):
        if section == "moe" and not ours.moe_layers:
            continue
        one, other = asdict(getattr(theirs, section)), asdict(getattr(ours, section))
        for key in one.keys() - FREE[section]:
            if one[key] != other[key]:
                yield f"{section}.{key} is {one[key]} in config.json and {other[key]} in the checkpoint."
    msa = theirs.spec(ours.precision).msa_layers
    if msa != ours.msa_layers:
        yield f"layers {msa} have an index branch in config.json, {ours.msa_layers} in the checkpoint."
    elif ours.attention.kind is AttentionKind.msa:
        for key in SELECTION:
            if (one := getattr(theirs.attention, key)) != (other := getattr(ours.attention, key)):
                yield f"attention.{key} is {one} in config.json and {other} in the checkpoint."


def verify_tensors(comparison: Comparison, on_bytes: Callable[[int], None] = lambda count: None) -> list[Verified]:
    """All tensors, compared."""
    verified = []
    for tensor in comparison.tensors():
        verified.append(tensor)
        on_bytes(tensor.num_bytes)
    return verified


def vocabulary_of(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text())
    return family_of(config).read_config(config).model.vocab_size
