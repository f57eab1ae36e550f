"""Greedy generation with a cache of keys, values and index keys (spec section 8).

A pass gives each sequence some new tokens: they are query fragments at the end of their cached sequence, so prefill,
chunked prefill and decoding are one definition (spec section 2), and attention sees the cache as packed keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from ..kernels import Segments
from .config import ModelSpec, Phase
from .context import AttentionContext


@dataclass
class GenerationCache:
    """What the layers of this rank remember of `num_sequences` sequences of up to `capacity` tokens."""

    num_sequences: int
    capacity: int
    lengths: list[int] = field(init=False)
    """Tokens of each sequence, those of the present pass included."""
    places: Tensor = field(init=False)
    """int64 [t]: row of the flattened cache of each token of the present pass."""
    _layers: dict[int, tuple[Tensor, ...]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.lengths = [0] * self.num_sequences

    def start_pass(self, num_new: Sequence[int], device: torch.device) -> tuple[Segments, Tensor]:
        """Make room for so many new tokens of each sequence. Returns their fragments and positions, int64 [t]."""
        if len(num_new) != self.num_sequences:
            raise ValueError(f"GenerationCache: {len(num_new)} sequences given, but it holds {self.num_sequences}.")
        rows, positions, places, start = [], [], [], 0
        for number, (old, new) in enumerate(zip(self.lengths, num_new, strict=True)):
            if old + new > self.capacity:
                raise ValueError(
                    f"GenerationCache: sequence {number} grows to {old + new} tokens, past the capacity "
                    f"({self.capacity}). Make the cache larger."
                )
            rows.append((start, new, number * self.capacity, old + new))
            positions.append(torch.arange(old, old + new))
            places.append(positions[-1] + number * self.capacity)
            start += new
        self.lengths = [old + new for old, new in zip(self.lengths, num_new, strict=True)]
        self.places = torch.cat(places).to(device)
        return Segments(tuple(rows), start, self.num_sequences * self.capacity), torch.cat(positions).to(device)

    def extend(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Store the new rows [t, ...] of one layer; returns all of them, [num_sequences * capacity, ...]."""
        if layer not in self._layers:
            rows = self.num_sequences * self.capacity
            self._layers[layer] = tuple(tensor.new_zeros(rows, *tensor.shape[1:]) for tensor in new)
        for cached, tensor in zip(self._layers[layer], new, strict=True):
            cached[self.places] = tensor
        return self._layers[layer]

    def by_sequence(self, cached: Tensor) -> Tensor:
        """[num_sequences * capacity, ...] as [num_sequences, capacity, ...]."""
        return cached.unflatten(0, (self.num_sequences, self.capacity))


@torch.no_grad()
def generate(
    model: GPTModel,
    spec: ModelSpec,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    phase: Phase = Phase.sparse,
    prefill_chunk: int | None = None,
) -> list[list[int]]:
    """The `num_tokens` most likely next tokens of each prompt, one after the other, by a model of one process.

    `prefill_chunk`: longest piece in which prompts are read; None reads them at once. The logits are those of a full
    forward pass over the final sequences, up to rounding.

    Raises ValueError for an empty prompt and for a model that is split over processes.
    """
    if spec.parallel.smallest_world > 1:
        raise ValueError(
            f"generate: the model is split over {spec.parallel.smallest_world} processes. Load the checkpoint with "
            "every parallel size at 1."
        )
    if empty := [number for number, prompt in enumerate(prompts) if not prompt]:
        raise ValueError(f"generate: prompts {empty} are empty. Start them with the tokenizer's first token.")
    device = next(model.parameters()).device
    cache = GenerationCache(len(prompts), max(map(len, prompts)) + num_tokens)
    chunk = prefill_chunk or max(map(len, prompts))
    pending = [list(prompt) for prompt in prompts]
    tokens: list[list[int]] = [[] for _ in prompts]
    was_training = model.training
    model.eval()
    while len(tokens[0]) < num_tokens:
        # A sequence whose prompt is read waits until all are, so that every pass ends in one token a sequence.
        last = all(len(rest) <= chunk for rest in pending)
        pieces = [rest[:chunk] if last else rest[: min(chunk, len(rest) - 1)] for rest in pending]
        pending = [rest[len(piece) :] for rest, piece in zip(pending, pieces, strict=True)]
        logits = _next_logits(model, spec, cache, pieces, phase, device)
        if last:
            for sequence, rest, token in zip(tokens, pending, logits.argmax(-1).tolist(), strict=True):
                sequence.append(token)
                rest.append(token)
    model.train(was_training)
    return tokens


def _next_logits(
    model: GPTModel,
    spec: ModelSpec,
    cache: GenerationCache,
    pieces: Sequence[Sequence[int]],
    phase: Phase,
    device: torch.device,
) -> Tensor:
    """Logits [sequences, v] after the last token of each piece; rows of empty pieces mean nothing."""
    segments, positions = cache.start_pass([len(piece) for piece in pieces], device)
    ends = torch.tensor([len(piece) for piece in pieces], device=device).cumsum(0) - 1
    tokens = torch.tensor([token for piece in pieces for token in piece], device=device)
    context = AttentionContext.build(spec, segments, positions, phase, cache=cache)
    return model(tokens[None], positions[None], None, packed_seq_params=context)[0, ends]
