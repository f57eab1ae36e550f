"""A family's map against what is there: our model's tensors on one side, a Hugging Face folder's on the other."""

import torch
from torch import Tensor

from ...model.config import ModelSpec
from ...model.hf import ConversionError
from ...model.hf.family import Family, Piece
from ...model.hf.forms import Sizes
from ...model.mcore import DTYPES
from ..sharding import share_of_rank
from .quantized import FP8, blocks_of, dequantize, scale_name
from .stored import PREFIX
from .tensor_files import TensorFolder

MANY = 20
HEAD_NAME = "lm_head.weight"


def model_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name (without `model.`) and shape of every tensor that a checkpoint of the model holds, MTP layers left out."""
    shards = share_of_rank(spec, seq_length=8, rank=0, world_size=1).shards
    tensors = {shard.key.removeprefix(PREFIX): shard.global_shape for shard in shards}
    return {name: shape for name, shape in tensors.items() if not is_mtp(name)}


def is_mtp(name: str) -> bool:
    return name.removeprefix(PREFIX).startswith("mtp.")


class Source:
    """A Hugging Face folder read through a family's map: weights in FP8 come back in the precision of `spec`."""

    def __init__(self, folder: TensorFolder, family: Family, spec: ModelSpec) -> None:
        self.folder, self.family, self.dtype = folder, family, DTYPES[spec.precision]
        # a tied model may be saved with a copy of its head
        tied = spec.model.tie_embeddings and not family.separate_head
        self.ignored = (*family.ignored, *((HEAD_NAME,) if tied else ()))
        envelope = any(name.startswith("language_model.") for name in folder.entries)
        self.prefix = "language_model." if envelope else ""

    def match(self, pieces: list[Piece], ours: dict[str, tuple[int, ...]], sizes: Sizes) -> list[str]:
        """Compare names and shapes on both sides; returns the names that the family ignores.

        Raises ConversionError with every tensor that is missing, left over or of another shape.
        """
        problems: list[str] = []
        used: set[str] = set()
        made: set[str] = set()
        for piece in pieces:
            used.update(piece.theirs)
            used.update(map(scale_name, piece.theirs))
            lacking = [name for name in piece.theirs if name not in self.folder.entries]
            problems += [f"{name} is missing." for name in lacking]
            if piece.ours is None:
                continue
            made.add(piece.ours)
            if not lacking and piece.theirs and piece.ours in ours:
                problems += self._other_shape(piece, ours[piece.ours], sizes)
        problems += [f"no tensor of theirs makes our {name}." for name in sorted(ours.keys() - made)]
        problems += [f"the model has no {name}." for name in sorted(made - ours.keys())]
        extra = sorted(self.folder.entries.keys() - used)
        ignored = [name for name in extra if any(part in name for part in self.ignored)]
        problems += [f"{name} is left over." for name in extra if name not in set(ignored)]
        if problems:
            more = [f"and {len(problems) - MANY} more."] if len(problems) > MANY else []
            raise ConversionError(
                f"{self.folder.path} does not have the tensors that its config.json describes ({self.family.name}):",
                problems[:MANY] + more,
            )
        return ignored

    def _other_shape(self, piece: Piece, shape: tuple[int, ...], sizes: Sizes) -> list[str]:
        wanted = shape if piece.expert is None else (1, *shape[1:])
        try:
            parts = [torch.empty(self.folder.entries[name].shape, device="meta") for name in piece.theirs]
            found = tuple(piece.form.join(parts, sizes).shape)
            if found == wanted:
                for name in piece.theirs:
                    self._check_scale(name)
                return []
        except (RuntimeError, ValueError) as err:
            if isinstance(err, ConversionError):
                raise
            found = ()  # parts that do not fit together
        shapes = ", ".join(f"{name} {self.folder.entries[name].shape}" for name in piece.theirs)
        return [f"{shapes}: together {found or 'nothing'}, which does not make our {piece.ours} {wanted}."]

    def _check_scale(self, name: str) -> None:
        entry, scale = self.folder.entries[name], self.folder.entries.get(scale_name(name))
        if entry.dtype in FP8:
            if scale is None:
                raise ConversionError(f"{name} is {entry.dtype} and has no {scale_name(name)}: its values are unknown.")
            blocks_of(name, entry.shape, scale.dtype, scale.shape)
        elif scale is not None:
            raise ConversionError(f"{scale_name(name)} scales {name}, which is {entry.dtype} and not FP8.")

    def read(self, name: str) -> Tensor:
        tensor = self.folder.read(name)
        if tensor.dtype in FP8:
            return dequantize(name, tensor, self.folder.read(scale_name(name)), self.dtype)
        return tensor

    def num_bytes(self, name: str) -> int:
        """Read at once, for one tensor and its conversion."""
        entry = self.folder.entries[name]
        wide = torch.Size(entry.shape).numel() * self.dtype.itemsize if entry.dtype in FP8 else 0
        return entry.num_bytes + wide
