"""What a dry run prints: the resolved config, parameters, tokens per step and the memory that weights will take."""

from ..model.config import ModelSpec, Precision
from ..model.flops import step_flops
from ..model.parameters import attention_parameters, count_parameters, index_parameters, mlp_parameters, mtp_parameters
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
        ("GPUs", f"{world_size:,} (data parallel {world_size // config.parallel.pipeline:,})"),
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
    """Bytes of weights, gradients and optimizer states on the fullest pipeline stage.

    Weights in the training precision, gradients in fp32; Adam's moments (and fp32 main weights under bf16) are sharded
    over the ranks that hold copies: all data-parallel ranks for dense parameters, fewer by `parallel.expert` for
    experts.
    """
    data_parallel = world_size // spec.parallel.pipeline
    copies = data_parallel // spec.parallel.expert
    bf16 = spec.precision is Precision.bf16
    weight, state = (2, 12) if bf16 else (4, 8)
    stages = [_stage(spec, layers) for layers in stage_layers(spec)]
    dense, experts = max(
        ((dense, experts / spec.parallel.expert) for dense, experts in stages),
        key=lambda stage: sum(stage),
    )
    return {
        "weights": (dense + experts) * weight,
        "gradients": (dense + experts) * 4,
        "optimizer": dense * state / data_parallel + experts * state / copies,
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


def _stage(spec: ModelSpec, slots: list[int | str]) -> tuple[int, int]:
    """(dense parameters, expert parameters) of one stage, before expert parallelism."""
    model, moe = spec.model, spec.moe
    size = model.hidden_size
    dense = experts = 0
    for slot in slots:
        if isinstance(slot, str):
            dense += model.vocab_size * size + (size if slot == "head" else 0)
            if slot == "head" and model.mtp_layers:  # with a copy of the embedding, where another stage has it
                routed = moe.num_experts * mlp_parameters(size, moe.expert_hidden_size)
                routed = routed if spec.is_moe(model.num_layers) else 0
                dense += model.mtp_layers * (mtp_parameters(spec) - routed)
                dense += model.vocab_size * size if spec.parallel.pipeline > 1 else 0
                experts += model.mtp_layers * routed
            continue
        dense += attention_parameters(spec) + 2 * size + (index_parameters(spec) if spec.is_msa(slot) else 0)
        if spec.is_moe(slot):
            dense += moe.num_experts * size + mlp_parameters(size, moe.shared_hidden_size)
            experts += moe.num_experts * mlp_parameters(size, moe.expert_hidden_size)
        else:
            dense += mlp_parameters(size, moe.dense_hidden_size)
    return dense, experts


def _billions(number: int) -> str:
    return f"{number / 1e9:.2f}B"
