"""Logits of a checkpoint and of a Hugging Face folder on the same tokens: the test of a map that no map can fake.

transformers computes in its own code, ours in ours; both in fp32 on one process, so the model must fit the host twice.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from ...kernels import Segments
from ...model.config import ModelSpec, Phase, Precision
from ...model.context import AttentionContext
from ...model.gpt import build_model
from ...model.hf import ConversionError
from ...model.parallel import distributed, model_parallel
from ..checkpoint import MODEL_METADATA, is_extra, plain
from ..config import saved_spec
from .stored import CheckpointReader


@dataclass(frozen=True)
class LogitsComparison:
    """Of one prompt."""

    length: int
    max_difference: float
    same_choice: float
    """Share of the positions where both have the same most likely token."""


def compare_logits(
    folder: Path, checkpoint: Path, prompts: Sequence[Tensor], *, trust_remote_code: bool = False
) -> list[LogitsComparison]:
    """prompts int64 [s]. trust_remote_code: let transformers run the code in `folder`."""
    theirs = list(hf_logits(folder, prompts, trust_remote_code=trust_remote_code))
    found = []
    with loaded_model(checkpoint) as (model, spec):
        for prompt, expected in zip(prompts, theirs, strict=True):
            ours = logits_of(model, spec, prompt)[:, : expected.shape[1]]
            same = (ours.argmax(-1) == expected.argmax(-1)).float().mean().item()
            found.append(LogitsComparison(len(prompt), (ours - expected).abs().max().item(), same))
    return found


@contextmanager
def loaded_model(checkpoint: Path) -> Iterator[tuple[GPTModel, ModelSpec]]:
    """The checkpoint's model in fp32, in a world of one process, with the reference kernels."""
    spec = saved_spec(CheckpointReader(checkpoint).run["config"])
    spec = replace(spec, precision=Precision.fp32, model=replace(spec.model, mtp_layers=0))
    with distributed(), model_parallel(spec.parallel, seed=0):
        (model,) = build_model(spec, seq_length=8, initialized=False)
        state = model.sharded_state_dict(prefix="model.", metadata=dict(MODEL_METADATA))
        state = {key: value for key, value in state.items() if not is_extra(key)}
        loaded = dist_checkpointing.load({"model": state}, str(checkpoint))["model"]
        lacks, unknown = model.load_state_dict(plain(loaded), strict=False)
        assert not unknown and all(map(is_extra, lacks)), (lacks, unknown)
        yield model.eval(), spec


@torch.no_grad()
def logits_of(model: GPTModel, spec: ModelSpec, prompt: Tensor) -> Tensor:
    """fp32 [s, v] after each token of a prompt, int64 [s]."""
    length = len(prompt)
    prompt = prompt.to(next(model.parameters()).device)
    segments = Segments(((0, length, 0, length),), length, length)
    positions = torch.arange(length, device=prompt.device)
    phase = Phase.sparse if spec.msa_layers else Phase.dense
    context = AttentionContext.build(spec, segments, positions, phase)
    return model(prompt[None], positions[None], None, packed_seq_params=context)[0].float().cpu()


def hf_logits(folder: Path, prompts: Sequence[Tensor], *, trust_remote_code: bool = False) -> Iterator[Tensor]:
    """fp32 [s, vocabulary] of each prompt by transformers."""
    model = hf_model(folder, trust_remote_code=trust_remote_code)
    for prompt in prompts:
        with torch.no_grad():
            yield model(prompt[None]).logits[0].float()


def hf_model(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """transformers' model of the folder in fp32, with every weight from its files."""
    import transformers  # seconds, and no part of a conversion

    config = json.loads((folder / "config.json").read_text())
    if config.get("quantization_config"):
        raise ConversionError("the logits of an FP8 folder are not compared: transformers needs a GPU for it.")
    classes: dict[str, str] = {
        "minimax_m3_vl": "AutoModelForImageTextToText",
        "minimax_m3_vl_text": "MiniMaxM3VLForCausalLM",
    }
    kind = config.get("model_type")
    if kind == "minimax_m3_vl_text":
        _register_text_names()
    loader = getattr(transformers, classes.get(kind, "AutoModelForCausalLM"))
    model, info = loader.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, trust_remote_code=trust_remote_code
    )
    # transformers fills what it does not find with random numbers
    if lacking := sorted(info["missing_keys"]) + sorted(info["mismatched_keys"]):
        raise ConversionError(f"transformers does not find {lacking[0]} and {len(lacking) - 1} more in {folder}.")
    return model.eval()


def _register_text_names() -> None:
    """transformers 5.24 maps released names for the envelope only; give the text class the rules that concern it."""
    from transformers import conversion_mapping

    other = ("language_model", "vision_tower", "projector", "patch_merge")
    rules = conversion_mapping.get_checkpoint_conversion_mapping("minimax_m3_vl")
    text = [rule for rule in rules if not any(part in str(rule.source_patterns) for part in other)]
    conversion_mapping.register_checkpoint_conversion_mapping("minimax_m3_vl_text", text, overwrite=True)
