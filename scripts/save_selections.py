"""The KV blocks that a trained model keeps on one document, for `bench_kernels --trained`.

    python -m msa_pretrain.scripts.save_selections --checkpoint runs/mine --tokens 16384 --output trained.pt
    python -m msa_pretrain.scripts.bench_kernels --trained trained.pt --output docs/results/kernels

The first document of the run's validation data (of its training data, without any) that is long enough is read from its
start by the model as it was saved, in the sparse phase: fp32, reference kernels, one process. OUTPUT is a file of
torch.save: int32 [t, g, k], as `select_blocks` gives them in one layer. How much neighbouring queries agree is printed.
"""

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from omegaconf import OmegaConf
from torch import Tensor

from msa_pretrain.data.indexed import open_indexed_dataset
from msa_pretrain.kernels import Segments, select_blocks
from msa_pretrain.model.config import Phase
from msa_pretrain.training.checkpoint import find_checkpoint, is_complete
from msa_pretrain.training.config import blend, saved_spec
from msa_pretrain.training.conversion.logits import loaded_model, logits_of

NEIGHBOURS = 128  # queries of a tile


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="its folder, or a run's, for the newest one")
    parser.add_argument("--tokens", type=int, default=16384, help="read of the document (default: %(default)s)")
    parser.add_argument("--layer", type=int, help="from 0 (default: the last MSA layer)")
    parser.add_argument("--data", nargs="+", metavar="PREFIX", help="prepared data in place of the run's")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(argv)
    for message in ("Transformer Engine and Apex are not installed", r".*is deprecated"):
        warnings.filterwarnings("ignore", message=message)
    try:
        checkpoint = find(args.checkpoint)
        run = dist_checkpointing.load_common_state_dict(str(checkpoint))["run"]
        layer = chosen_layer(run, args.layer)
        document = long_document(args.data or sources(run), args.tokens)
        block_indices, block_size = selections(checkpoint, layer, document)
        args.output.parent.mkdir(parents=True, exist_ok=True)
        torch.save(block_indices, args.output)
    except (ValueError, OSError) as err:
        sys.exit(f"save_selections: {err}")
    print(f"{args.output}: layer {layer} of {checkpoint}, {list(block_indices.shape)}")
    print(describe(block_indices, block_size))


def find(folder: Path) -> Path:
    """The checkpoint that `folder` is, or the newest of the run that it is."""
    checkpoint = folder if is_complete(folder) else find_checkpoint(folder / "checkpoints")
    if checkpoint is None:
        raise ValueError(f"{folder} is no complete checkpoint and no run with one. Correct --checkpoint.")
    return checkpoint


def chosen_layer(run: dict[str, Any], layer: int | None) -> int:
    """`layer`, or the last that selects, of a checkpoint's run; ValueError where nothing is selected."""
    layers = saved_spec(run["config"]).msa_layers
    if not layers:
        raise ValueError("the checkpoint has no MSA layer: its attention is dense and selects nothing.")
    # an imported checkpoint has no phase: its model is trained
    if (phase := run.get("phase", Phase.sparse.name)) != Phase.sparse.name:
        raise ValueError(
            f"the checkpoint is of the phase {phase}, which attends to every block. Take one of the sparse phase, "
            "which begins after training.warmup_tokens."
        )
    if layer is not None and layer not in layers:
        raise ValueError(f"--layer {layer} is no MSA layer. Use one of {layers}.")
    return layers[-1] if layer is None else layer


def sources(run: dict[str, Any]) -> list[str]:
    """Prefixes of the run's validation data, or else of its training data."""
    data = OmegaConf.create(run["config"]).get("data") or {}
    found = data.get("valid") or data.get("train")
    if not found:
        raise ValueError("the checkpoint names no data. Set --data to the prefix of prepared data.")
    return list(blend(list(found)))


def long_document(prefixes: Sequence[str], num_tokens: int) -> Tensor:
    """int64 [num_tokens], the start of the first document that is so long."""
    longest = 0
    for prefix in prefixes:
        dataset, manifest = open_indexed_dataset(Path(prefix))
        longest = max(longest, manifest.longest_document)
        if 0 < num_tokens <= manifest.longest_document:
            document = int((dataset.lengths >= num_tokens).argmax())
            return torch.from_numpy(dataset.get(document, 0, num_tokens).astype("int64"))
    raise ValueError(
        f"--tokens {num_tokens}: the longest document of {', '.join(prefixes)} has {longest}. Use 1 to {longest} "
        "tokens, or other --data."
    )


def selections(checkpoint: Path, layer: int, document: Tensor) -> tuple[Tensor, int]:
    """Blocks int32 [t, g, k] that 0-based `layer` keeps on a document int64 [t], and how many tokens a block has."""
    inputs: list[tuple[Tensor, Tensor]] = []
    with loaded_model(checkpoint) as (model, spec):
        indexer = model.decoder.layers[layer].self_attention.indexer
        indexer.register_forward_hook(lambda module, hidden, output: inputs.append(output))
        logits_of(model, spec, document)
        ((index_query, index_key),) = inputs
        attention = spec.attention
        block_indices, _ = select_blocks(
            index_query,
            index_key,
            Segments.from_cu_seqlens([0, len(document)]),
            block_size=attention.block_size,
            num_selected_blocks=attention.top_k,
            init_blocks=attention.init_blocks,
            backend=attention.backend.name,
        )
    return block_indices.cpu(), attention.block_size


def describe(block_indices: Tensor, block_size: int) -> str:
    """How much neighbouring queries agree, over those with more visible blocks than they keep; a group counts alone."""
    num_kept = block_indices.shape[2]
    chosen = block_indices[num_kept * block_size :].long()
    if not len(chosen):
        return f"no query has more than {num_kept} visible blocks: there is nothing to choose."
    kept = torch.zeros(*chosen.shape[:2], int(chosen.max()) + 1, dtype=torch.bool).scatter_(2, chosen, True)
    shared = (kept[1:] & kept[:-1]).sum() / kept[1:].sum().clamp(min=1)
    text = f"{len(chosen)} queries choose; one has {shared:.1%} of its blocks in common with the one before"
    if tiles := len(kept) // NEIGHBOURS:
        distinct = kept[: tiles * NEIGHBOURS].unflatten(0, (tiles, NEIGHBOURS)).any(1).sum(2).float().mean()
        text += f", {NEIGHBOURS} neighbours keep {distinct:.1f} different blocks"
    return text + "."


if __name__ == "__main__":
    main()
