"""Samples of a fixed length, cut from indexed documents by megatron-core's GPT dataset, with the document borders kept.

A sample is `s + 1` consecutive tokens of the shuffled documents: `s` inputs and, shifted by one, `s` labels. A document
that is cut at a sample border goes on in another sample, where it starts a new segment at position 0. What an epoch
cannot fill (fewer than `s` tokens at its end) is dropped. Sample `i` depends on the blend, `num_samples`, `seq_length`
and `seed` alone: changing one of them in the middle of a run repeats some samples and skips others.
"""

import importlib
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split
from torch import Tensor
from torch.utils.data import Subset

from .prepare import Manifest, open_indexed_dataset
from .tokenizer import TokenizerIdentity

# megatron-core numbers the documents of all epochs of a source with int32.
MAX_DOCUMENT_INDEX = 2**31 - 1


@dataclass(frozen=True)
class Sample:
    """One row of `s` tokens and the documents it is cut from; a segment is one document's part of the row."""

    tokens: Tensor  # int64 [s]
    labels: Tensor  # int64 [s], the next token
    loss_mask: Tensor  # bool [s], False where the label is another document's first token
    segment_lengths: tuple[int, ...]  # sums to s
    document_ids: tuple[int, ...]  # of each segment, unique over all sources of the blend


@dataclass(frozen=True)
class SourceUse:
    """How often a run of `num_samples` goes through one source of its blend."""

    prefix: str
    share: float
    num_samples: float
    num_epochs: float


@dataclass
class PackedDatasetConfig(GPTDatasetConfig):
    """Megatron's dataset config and, for each source, what the samples need to know about it."""

    fingerprints: dict[str, str] = field(kw_only=True)
    """SHA-256 of each source's tokens; part of the cache key, or a source prepared anew would meet its old index."""

    document_offsets: dict[str, int] = field(kw_only=True)
    """What to add to a source's document numbers to make them unique over the blend."""


class PackedDataset(GPTDataset):
    """Megatron's GPT dataset of one source, giving `Sample`s with document borders taken from document lengths."""

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [*GPTDataset._key_config_attributes(), "fingerprints"]

    def __getitem__(self, idx: int) -> Sample:  # type: ignore[override]
        parts, documents = self._document_parts(idx)
        text = np.concatenate(parts).astype(np.int64)  # [s + 1]
        sequence_length, vocab_size = self.config.sequence_length, self.config.tokenizer.vocab_size
        assert text.size == sequence_length + 1, (text.size, sequence_length)
        if text.max() >= vocab_size or text.min() < 0:
            raise ValueError(
                f"{self.dataset_path} holds token ids up to {text.max()} (sample {idx}, documents {documents}), but "
                f"its manifest says vocab_size {vocab_size}. Prepare the data again (prepare_data --overwrite)."
            )
        lengths = [len(part) for part in parts]
        loss_mask = torch.ones(sequence_length, dtype=torch.bool)
        loss_mask[[border - 1 for border in itertools.accumulate(lengths[:-1])]] = False
        lengths[-1] -= 1  # the last token is a label only
        if lengths[-1] == 0:
            lengths.pop()
            documents.pop()
        tokens = torch.from_numpy(text)
        return Sample(
            tokens=tokens[:-1].contiguous(),
            labels=tokens[1:].contiguous(),
            loss_mask=loss_mask,
            segment_lengths=tuple(lengths),
            document_ids=tuple(self.config.document_offsets[self.dataset_path] + document for document in documents),
        )

    def _document_parts(self, idx: int) -> tuple[list[np.ndarray], list[int]]:
        """The sample's `s + 1` tokens, one array for each document part, and the parts' document numbers."""
        row = self.shuffle_index[idx]
        first, first_offset = (int(value) for value in self.sample_index[row])
        last, last_offset = (int(value) for value in self.sample_index[row + 1])
        parts, documents = [], []
        for position in range(first, last + 1):
            document = int(self.document_index[position])
            start = first_offset if position == first else 0
            # The sample ends with the token at `last_offset`, which is also the first token of the next sample.
            length = last_offset + 1 - start if position == last else None
            parts.append(self.dataset.get(document, offset=start, length=length))
            documents.append(document)
        return parts, documents


class BlendedPackedDataset(BlendedDataset):
    """Megatron's blend, except that it gives `Sample`s and can be built without a process group."""

    def __getitem__(self, idx: int) -> Sample:  # type: ignore[override]
        return self.datasets[self.dataset_index[idx]][self.dataset_sample_index[idx]]

    def _build_indices(self) -> tuple[np.ndarray, np.ndarray]:
        if torch.distributed.is_initialized():
            return super()._build_indices()
        # Megatron asks for this process's rank before it writes its cache, which fails here. A single process builds
        # the index in memory instead: it takes milliseconds.
        from megatron.core.datasets.helpers import build_blending_indices

        dataset_index = np.zeros(self.size, dtype=np.int16)
        sample_index = np.zeros(self.size, dtype=np.int64)
        build_blending_indices(dataset_index, sample_index, self.weights, len(self.datasets), self.size, False)
        for number, dataset in enumerate(self.datasets):
            drawn = int((dataset_index == number).sum())
            assert drawn <= len(dataset), (dataset.dataset_path, drawn, len(dataset))
        return dataset_index, sample_index


class PackedDatasetBuilder(BlendedMegatronDatasetBuilder):
    """Megatron's builder, with the blend class replaced."""

    @staticmethod
    def build_generic_dataset(cls: Any, *args: Any) -> Any:
        return BlendedMegatronDatasetBuilder.build_generic_dataset(
            BlendedPackedDataset if cls is BlendedDataset else cls, *args
        )


def build_dataset(
    blend: dict[str, float],
    *,
    num_samples: int,
    seq_length: int,
    seed: int,
    cache_dir: Path,
    split_name: str,
) -> Subset[Sample]:
    """Exactly `num_samples` samples of `seq_length` tokens, drawn from the indexed datasets of `blend`.

    blend: {path prefix: weight}. Weights are shares of samples whatever the sizes of the sources, and need not sum to
    1; a source that is too small for its share is read again in a new order (`source_uses` says how often).
    cache_dir: where the sample orders are kept. With torch.distributed initialised, all ranks must call this together
    and see the same folder: rank 0 builds, the others wait and read.
    split_name: "train", "valid" or "test"; the splits are separate files, so this only labels the cache.

    Every check reads the same files on every rank, so that all ranks raise or none does.
    """
    if split_name not in Split.__members__:
        raise ValueError(f"split_name is {split_name!r}. Use one of {', '.join(Split.__members__)}.")
    if num_samples < 1 or seq_length < 1:
        raise ValueError(f"num_samples ({num_samples}) and seq_length ({seq_length}) must be at least 1.")
    require_compiled_helper()
    manifests = _read_manifests(blend, seq_length)
    for use in _source_uses(blend, manifests, num_samples, seq_length):
        _check_document_index(use, manifests[use.prefix])
    any_manifest = next(iter(manifests.values()))
    offsets = [0, *itertools.accumulate(manifest.num_documents for manifest in manifests.values())]
    split = Split[split_name]
    blends: list[Any] = [None] * len(Split)
    blends[split.value] = (list(manifests), [float(weight) for weight in blend.values()])
    sizes = [0] * len(Split)
    sizes[split.value] = num_samples
    config = PackedDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend_per_split=blends,
        path_to_cache=str(cache_dir),
        mid_level_dataset_surplus=blend_surplus(len(manifests), num_samples),
        tokenizer=TokenizerIdentity(any_manifest.tokenizer, any_manifest.vocab_size, any_manifest.eod_id),
        # Megatron's own masks compare token values; ours come from lengths, so its are off.
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        fingerprints={prefix: manifest.fingerprint for prefix, manifest in manifests.items()},
        document_offsets=dict(zip(manifests, offsets, strict=False)),
    )
    dataset = PackedDatasetBuilder(PackedDataset, sizes, lambda: True, config).build()[split.value]
    # Megatron rounds up: to whole epochs for one source, to whole samples of every source for a blend.
    return Subset(dataset, range(num_samples))


def blend_surplus(num_sources: int, num_samples: int) -> float:
    """Share of samples to build above what a source of a blend is asked for.

    Megatron rounds every source up, so the blend is up to `num_sources` samples longer than asked, and a large source
    gives most of them: megatron's own 0.5% is too little for many small sources, and the build fails.
    """
    return 0.005 + num_sources / num_samples


def samples_per_epoch(num_tokens: int, seq_length: int) -> int:
    """Samples that one pass over `num_tokens` tokens gives; the last label needs one token more."""
    return (num_tokens - 1) // seq_length


def source_uses(blend: dict[str, float], *, num_samples: int, seq_length: int) -> list[SourceUse]:
    """What `build_dataset` with these arguments draws from each source; to be shown before the first step."""
    return _source_uses(blend, _read_manifests(blend, seq_length), num_samples, seq_length)


def require_compiled_helper() -> None:
    """Raise ImportError unless megatron-core's compiled dataset helper loads. It is never compiled here."""
    try:
        importlib.import_module("megatron.core.datasets.helpers_cpp")
    except ImportError as err:
        raise ImportError(
            f"megatron-core's compiled dataset helper (megatron/core/datasets/helpers_cpp) does not load: {err}. "
            "Install a megatron-core wheel that was built for this version of Python."
        ) from err


def _read_manifests(blend: dict[str, float], seq_length: int) -> dict[str, Manifest]:
    if not blend:
        raise ValueError("the blend is empty. Name at least one data prefix with its weight.")
    for prefix, weight in blend.items():
        if not 0 < weight < float("inf"):
            raise ValueError(f"the weight of {prefix} is {weight}. Weights must be positive; leave out unused sources.")
    manifests = {str(prefix): open_indexed_dataset(Path(prefix))[1] for prefix in blend}
    first_prefix, first = next(iter(manifests.items()))
    for prefix, manifest in manifests.items():
        if manifest.num_tokens < seq_length + 1:
            raise ValueError(
                f"{prefix} holds {manifest.num_tokens} tokens, fewer than the {seq_length + 1} of one sample "
                f"(seq_length {seq_length}, and one for the last label). Use more data or a smaller seq_length."
            )
        vocabularies = [(m.tokenizer, m.vocab_size, m.eod_id) for m in (first, manifest)]
        if vocabularies[0] != vocabularies[1]:
            raise ValueError(
                f"the sources of a blend must share one tokenizer, but (tokenizer, vocab_size, eod_id) is "
                f"{vocabularies[0]} in {first_prefix} and {vocabularies[1]} in {prefix}. "
                "Prepare them with the same one."
            )
    return manifests


def _source_uses(
    blend: dict[str, float], manifests: dict[str, Manifest], num_samples: int, seq_length: int
) -> list[SourceUse]:
    total = sum(blend.values())
    uses = []
    for (prefix, manifest), weight in zip(manifests.items(), blend.values(), strict=True):
        drawn = num_samples * weight / total
        uses.append(SourceUse(prefix, weight / total, drawn, drawn * seq_length / manifest.num_tokens))
    return uses


def _check_document_index(use: SourceUse, manifest: Manifest) -> None:
    num_entries = manifest.num_documents * (int(use.num_epochs) + 1)
    if num_entries > MAX_DOCUMENT_INDEX:
        raise ValueError(
            f"{use.prefix}: {manifest.num_documents} documents in about {use.num_epochs:.1f} epochs exceed "
            f"megatron-core's limit of {MAX_DOCUMENT_INDEX} document entries. Split the source or draw fewer samples."
        )
