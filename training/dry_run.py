"""What a dry run prints: the resolved config, parameters, tokens per step and the memory that weights will take."""

from ..model.config import ModelSpec, Precision
from ..model.flops import step_flops
from ..model.parameters import count_parameters, index_parameters, rank_parameters
from .checks import splits_evenly
from .config import TrainConfig, to_dict, to_yaml
from .phases import phase_at
from .redaction import redact

GIB = 2**30


def report(config: TrainConfig, world_size: int) -> str:
    """Everything as text; `world_size` is the number of GPUs the run is planned for."""
    spec, training = config.spec, config.training
    counts = count_parameters(spec)
    index_layers = len(spec.msa_layers)
    lengths = [training.seq_length] * training.global_batch_size
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
        ("tokens per step", f"{config.tokens_per_step:,}"),
        ("steps", f"{config.total_steps:,}"),
        ("  of them warm-up", f"{-(-training.warmup_tokens // config.tokens_per_step):,}"),
        (f"FLOPs per token ({end.name})", f"{step_flops(spec, lengths, end) / config.tokens_per_step:.4g}"),
        ("GPUs", f"{world_size:,} (data parallel {config.parallel.data_parallel(world_size):,})"),
        *memory_rows(spec, world_size),
    ]
    width = max(len(label) for label, _ in rows)
    table = "\n".join(f"{label:<{width}}  {value}" for label, value in rows)
    return f"{to_yaml(redact(to_dict(config)))}\n{table}"


def memory_rows(spec: ModelSpec, world_size: int) -> list[tuple[str, str]]:
    """GiB on the fullest GPU for what does not depend on the batch; activations and buffers come on top."""
    parts = memory_of_states(spec, world_size)
    rows = [(f"  {name}, GiB", f"{size / GIB:.2f}") for name, size in parts.items()]
    return [("memory of the fullest GPU, GiB", f"{sum(parts.values()) / GIB:.2f} + activations"), *rows]


def memory_of_states(spec: ModelSpec, world_size: int) -> dict[str, float]:
    """Bytes of weights, gradients and optimizer states on a rank of the fullest pipeline stage.

    Weights in the training precision, gradients in fp32; Adam's moments (and fp32 main weights under bf16) are sharded
    over the ranks that hold copies: all data-parallel ranks for dense parameters, other ones for experts.
    """
    parallel = spec.parallel
    copies, expert_copies = parallel.data_parallel(world_size), world_size // parallel.expert_ranks
    bf16 = spec.precision is Precision.bf16
    weight, state = (2, 12) if bf16 else (4, 8)
    fullest = max((rank_parameters(spec, slots) for slots in stage_layers(spec)), key=lambda rank: rank.total)
    return {
        "weights": fullest.total * weight,
        "gradients": fullest.total * 4,
        "optimizer": fullest.dense * state / copies + fullest.experts * state / expert_copies,
    }


def stage_layers(spec: ModelSpec) -> list[list[int | str]]:
    """What each pipeline stage holds, its virtual stages together: 0-based layers, 'embedding', 'head'."""
    parallel, num_layers = spec.parallel, spec.model.num_layers
    chunks = parallel.pipeline * parallel.virtual_pipeline
    assert splits_evenly(num_layers, parallel.pipeline, parallel.virtual_pipeline)
    slots: list[int | str] = ["embedding", *range(num_layers), "head"]
    if num_layers % chunks == 0:  # embedding and head come on top of the first and last chunk
        size = num_layers // chunks
        split = [slots[1:-1][i * size : (i + 1) * size] for i in range(chunks)]
        split[0] = ["embedding", *split[0]]
        split[-1] = [*split[-1], "head"]
    else:
        size = len(slots) // chunks
        split = [slots[i * size : (i + 1) * size] for i in range(chunks)]
    stages = (split[stage :: parallel.pipeline] for stage in range(parallel.pipeline))
    return [[slot for chunk in stage for slot in chunk] for stage in stages]


def _billions(number: int) -> str:
    return f"{number / 1e9:.2f}B"
