"""What a dry run prints: the resolved config, parameters, tokens per step and the memory that weights will take."""

from ..model.config import ModelSpec
from ..model.flops import step_flops
from ..model.parameters import count_parameters, index_parameters
from .config import InitOptimizer, TrainConfig, to_dict, to_yaml
from .curriculum import Stage
from .phases import phase_at
from .planner.memory import GIB
from .planner.stages import Layout, held_by_chunk, together
from .planner.states import states_of
from .redaction import redact


def report(config: TrainConfig, world_size: int) -> str:
    """Everything as text; `world_size` is the number of GPUs the run is planned for."""
    spec, training = config.spec, config.training
    counts = count_parameters(spec)
    index_layers = len(spec.msa_layers)
    last = config.stages[-1]
    lengths = [last.seq_length] * last.global_batch_size
    end = phase_at(training.total_tokens, kind=config.attention.kind, warmup_tokens=training.warmup_tokens)
    rows = [
        ("parameters, total", f"{counts.total:,}"),
        ("  backbone", f"{counts.backbone:,} ({_billions(counts.backbone)})"),
        (
            "  index branch",
            f"{counts.index:,} ({index_layers} layers x {index_parameters(spec) if index_layers else 0:,})",
        ),
        (
            "  active outside the embeddings",
            f"{counts.active_outside_embeddings:,} ({_billions(counts.active_outside_embeddings)})",
        ),
        *([("  MTP layers", f"{counts.mtp:,}")] if counts.mtp else []),
        ("  embedding + head", f"{counts.embedding + counts.head:,}"),
        ("  experts", f"{counts.experts:,}"),
        *start_rows(config),
        ("tokens per step", f"{config.tokens_per_step:,}"),
        *((f"  from token {stage.first_token:,}", stage_words(stage)) for stage in config.stages if stage.key),
        ("steps", f"{config.total_steps:,}"),
        ("  of them warm-up", f"{config.steps_until(training.warmup_tokens):,}"),
        (f"FLOPs per token ({end.name})", f"{step_flops(spec, lengths, end) / last.tokens_per_step:.4g}"),
        ("GPUs", f"{world_size:,} (data parallel {config.parallel.data_parallel(world_size):,})"),
        *memory_rows(spec, world_size),
    ]
    width = max(len(label) for label, _ in rows)
    table = "\n".join(f"{label:<{width}}  {value}" for label, value in rows)
    return f"{to_yaml(redact(to_dict(config)))}\n{table}"


def start_rows(config: TrainConfig) -> list[tuple[str, str]]:
    """What a new run brings along from another one's checkpoint."""
    training = config.training
    if not training.init_from:
        return []
    if training.init_optimizer is InitOptimizer.reset:
        optimizer = "reset: all moments start at zero"
    else:
        optimizer = "kept: fp32 weights, moments and Adam steps; a new index branch starts at step 0"
    return [("weights from", training.init_from), ("  optimizer", optimizer)]


def stage_words(stage: Stage) -> str:
    return f"{stage.tokens_per_step:,} ({stage.global_batch_size:,} samples of {stage.seq_length:,})"


def memory_rows(spec: ModelSpec, world_size: int) -> list[tuple[str, str]]:
    """GiB on the fullest GPU for what does not depend on the batch; activations and buffers come on top."""
    parts = memory_of_states(spec, world_size)
    rows = [(f"  {name}, GiB", f"{size / GIB:.2f}") for name, size in parts.items()]
    return [("memory of the fullest GPU, GiB", f"{sum(parts.values()) / GIB:.2f} + activations"), *rows]


def memory_of_states(spec: ModelSpec, world_size: int) -> dict[str, float]:
    """Bytes of weights, gradients and optimizer states on the fullest pipeline stage, as the planner counts them."""
    layout = Layout(spec.parallel, world_size)
    stages = (states_of(spec, layout, together(chunks)) for chunks in held_by_chunk(spec))
    fullest = max(stages, key=lambda states: states.total)
    return {kind: sum(getattr(fullest, kind).values()) for kind in ("weights", "gradients", "optimizer")}


def _billions(number: int) -> str:
    return f"{number / 1e9:.2f}B"
