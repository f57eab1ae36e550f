"""A search's outcome as text for a person and as plain values for JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from ...model.config import AttentionKind, ModelSpec, Phase
from ...model.flops import sparse_speedup, step_flops
from ...model.parameters import count_parameters
from ..config import TrainConfig
from .activations import Activations
from .communication import Message, micro_batch_messages, step_messages
from .hardware import EXPERT_SHARE, GPUS_PER_NODE, LINEAR_SHARE, LINK_SHARE, Gpu
from .memory import FRAGMENTATION, GIB, RESERVE_GIB, Peak
from .search import Found, Plan, phase_steps
from .stages import held_by_chunk, together

CURVE = tuple(2**power for power in range(13, 21))


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns aligned, numbers as they come; the first column to the left, the others to the right."""
    cells = [list(map(str, row)) for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = []
    for first, *rest in cells:
        numbers = [f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([f"{first:<{widths[0]}}", *numbers]).rstrip())
    return "\n".join(lines)


def torchrun(plan: Plan, overrides: Sequence[str]) -> str:
    """The command for every node; `overrides` are the user's own words, which the layout's replace."""
    world, layout = plan.layout.world_size, plan.overrides
    ours = {word.split("=")[0] for word in layout}
    words = [word for word in overrides if word.split("=")[0] not in ours] + layout
    nodes = max(1, world // GPUS_PER_NODE)
    where = "--standalone" if nodes == 1 else "--rdzv_backend=c10d --rdzv_endpoint=$HEAD_NODE:29500"
    return (
        f"torchrun --nnodes={nodes} --nproc_per_node={min(world, GPUS_PER_NODE)} {where} \\\n"
        f"    -m msa_pretrain.scripts.pretrain {' '.join(words)}"
    )


def text(config: TrainConfig, world_size: int, gpu: Gpu, found: Found, best: int, overrides: Sequence[str]) -> str:
    """Parameters, layouts, the best one's memory, messages, times and command, FLOPs by context length."""
    parts = [
        f"{config.run.name} on {world_size:,} x {gpu.name} ({gpu.memory_gib:.0f} GiB; {gpu.source})",
        table(("parameters", "count"), [(name, f"{count:,}") for name, count in parameter_rows(config.spec)]),
    ]
    if found.fitting:
        parts += [
            f"{len(found.fitting)} layouts fit, {len(found.too_large)} are too large for the memory. The fastest:",
            table(LAYOUT_HEADER, [layout_row(plan, config) for plan in shown(found, best)]),
            *_details(found.fitting[0], gpu),
            "the fastest layout's command, on every node:\n" + torchrun(found.fitting[0], overrides),
        ]
    else:
        parts.append(nothing_fits(config, world_size, gpu, found))
    parts += [
        table(
            ("context", "GQA/token", "MSA/token", "GQA/MSA", "attention alone"),
            [[f"{row['tokens']:,}", *(f"{row[key]:.3g}" for key in CURVE_KEYS)] for row in flops_curve(config.spec)],
        ),
        "FLOPs of training, forward and backward, one document of that length; last column: forward of one layer's "
        "attention (spec section 6).",
        f"Ranges: linear layers at {_share(LINEAR_SHARE)} and experts at {_share(EXPERT_SHARE)} of a large matrix "
        f"product, messages at {_share(LINK_SHARE)} of the links and not hidden; kernels, launches as in docs/results.",
    ]
    return "\n\n".join(parts)


def shown(found: Found, best: int) -> list[Plan]:
    """The fastest that fit, and the config's own layout after them if it is none of them."""
    fastest = found.fitting[:best]
    others = [found.own] if found.own and all(plan.config != found.own.config for plan in fastest) else []
    return fastest + others


def _share(share: Any) -> str:
    return f"{share.low:.0%} to {share.high:.0%}"


def parameter_rows(spec: ModelSpec) -> list[tuple[str, int]]:
    counts = count_parameters(spec)
    parts = {name: count for name, count in asdict(counts).items() if count}
    return [*parts.items(), ("total", counts.total), ("active outside embeddings", counts.active_outside_embeddings)]


LAYOUT_HEADER = (
    *("", "TP", "SP", "PP", "VPP", "CP", "EP", "micro-batch", "recompute", "micro-batches"),
    *("GiB (low to high)", "warm-up s/step", "sparse s/step", "days (low to high)"),
)


def layout_row(plan: Plan, config: TrainConfig) -> list[object]:
    parallel, training, peak = plan.config.parallel, plan.config.training, plan.peak
    seconds = {duration.phase: f"{duration.step_s.middle:.1f}" for duration in plan.durations}
    same = parallel == config.parallel and training == config.training
    days = plan.days
    return [
        "as configured" if same else "",
        *(parallel.tensor, "yes" if parallel.sequence else "no", parallel.pipeline, parallel.virtual_pipeline),
        *(parallel.context, parallel.expert, training.micro_batch_size, training.recompute.name),
        plan.load.num_micro_batches,
        f"{peak.total / GIB:.1f} ({peak.low / GIB:.1f} to {peak.high / GIB:.1f})",
        seconds.get(Phase.warmup, "-"),
        seconds.get(Phase.sparse, seconds.get(Phase.dense, "-")),
        f"{days.middle:.1f} ({days.low:.1f} to {days.high:.1f})",
    ]


def _details(plan: Plan, gpu: Gpu) -> list[str]:
    peak, lines = plan.peak, []
    rows = [(name, f"{size / GIB:.2f}") for name, size in memory_rows(peak)]
    lines.append(
        f"memory of its fullest GPU (stage {peak.stage}, {peak.phase.name}; micro-batches in flight by virtual stage: "
        f"{', '.join(map(str, peak.micro_batches))}), of {gpu.memory_gib:.0f} GiB\n" + table(("", "GiB"), rows)
    )
    messages = [(m, f"{m.size / 1e9:.2f}", "network" if m.crosses_nodes else "NVLink") for m in messages_of(plan)]
    if messages:
        lines.append(
            "messages of one GPU of that stage\n"
            + table(("", "GB a step", "ranks", "over"), [(m.kind, size, m.ranks, over) for m, size, over in messages])
        )
    for duration in plan.durations:
        parts = [
            (name, f"{r.middle:.2f}", f"{r.low:.2f} to {r.high:.2f}")
            for name, r in (*duration.parts.items(), ("step", duration.step_s))
        ]
        lines.append(f"seconds of a step, {duration.phase.name}\n" + table(("", "seconds", "range"), parts))
    return lines


def memory_rows(peak: Peak) -> list[tuple[str, float]]:
    """Bytes by part; the sum without the last two rows is what PyTorch should report as its peak."""
    states = peak.states
    parts = {
        f"{kind}, {part}": size
        for kind in ("weights", "gradients", "optimizer")
        for part, size in getattr(states, kind).items()
        if size
    }
    return [
        *parts.items(),
        ("activations", peak.activations),
        (f"largest operation ({peak.during})", peak.buffers),
        ("cuBLAS", peak.workspace),
        ("peak", peak.total),
        (f"to hold: {peak.high / GIB:.2f} x {1 + FRAGMENTATION:.2f} + {RESERVE_GIB:.0f} outside PyTorch", peak.needed),
    ]


def messages_of(plan: Plan) -> list[Message]:
    """What one GPU of the fullest stage sends in a step."""
    spec, layout, load = plan.config.spec, plan.layout, plan.load
    chunks = held_by_chunk(spec)[plan.peak.stage]
    a = Activations(spec, layout, load.tokens(spec), plan.peak.phase, deterministic=load.deterministic)
    each = micro_batch_messages(a, together(chunks), len(chunks))
    return [
        *(replace(message, size=message.size * load.num_micro_batches) for message in each),
        *step_messages(spec, layout, together(chunks), a.itemsize),
    ]


def nothing_fits(config: TrainConfig, world_size: int, gpu: Gpu, found: Found) -> str:
    """Why there is no layout: the nearest miss, or what the checks refuse."""
    if found.too_large:
        plan = found.too_large[0]
        peak, states = plan.peak, plan.peak.states.total
        return (
            f"NOTHING FITS: the nearest of {len(found.too_large)} layouts needs {peak.needed / GIB:.1f} GiB a GPU, "
            f"{peak.needed / GIB - gpu.memory_gib:.1f} more than there are ({states / GIB:.1f} of weights, gradients "
            f"and optimizer, {(peak.activations + peak.buffers) / GIB:.1f} of activations and buffers in stage "
            f"{peak.stage}, {peak.phase.name}).\n" + table(LAYOUT_HEADER, [layout_row(plan, config)])
        )
    reasons = "\n".join(f"  - {problem}" for problem in found.closest or found.refused)
    return (
        f"NOTHING FITS: the checks refuse every layout on {world_size} GPUs. The nearest to a legal one is refused "
        f"because:\n{reasons}"
    )


CURVE_KEYS = ("gqa", "msa", "ratio", "attention_ratio")


def flops_curve(spec: ModelSpec, lengths: Sequence[int] = CURVE) -> list[dict[str, float]]:
    """Training FLOPs per token of the GQA baseline and of MSA (sparse), and their ratios, by context length."""
    rows = []
    msa = replace(spec, attention=replace(spec.attention, kind=AttentionKind.msa))
    baseline = replace(spec, attention=replace(spec.attention, kind=AttentionKind.dense, full_layers=[]))
    for length in lengths:
        gqa = step_flops(baseline, [length], Phase.dense) / length
        sparse = step_flops(msa, [length], Phase.sparse) / length
        rows.append(
            dict(tokens=length, gqa=gqa, msa=sparse, ratio=gqa / sparse, attention_ratio=sparse_speedup(msa, length))
        )
    return rows


def as_json(
    config: TrainConfig, world_size: int, gpu: Gpu, found: Found, best: int, overrides: Sequence[str]
) -> dict[str, Any]:
    """Everything that `text` prints, unrounded; sizes in bytes, times in seconds and days."""
    return {
        "run": config.run.name,
        "gpus": world_size,
        "gpu": asdict(gpu),
        "parameters": dict(parameter_rows(config.spec)),
        "phase_steps": {phase.name: steps for phase, steps in phase_steps(config).items()},
        "flops_per_token": flops_curve(config.spec),
        "fitting": len(found.fitting),
        "too_large": len(found.too_large),
        "refused": dict(found.refused.most_common()),
        "best": [_plan_json(plan, overrides) for plan in found.fitting[:best]],
        "own": _plan_json(found.own, overrides) if found.own else None,
        "nearest_miss": _plan_json(found.too_large[0], overrides) if found.too_large else None,
    }


def _plan_json(plan: Plan, overrides: Sequence[str]) -> dict[str, Any]:
    peak = plan.peak
    return {
        "overrides": plan.overrides,
        "torchrun": torchrun(plan, overrides),
        "memory": {
            **dict(memory_rows(peak)),
            "peak": peak.total,
            "low": peak.low,
            "high": peak.high,
            "needed": peak.needed,
            "stage": peak.stage,
            "phase": peak.phase.name,
            "micro_batches": list(peak.micro_batches),
        },
        "messages": [asdict(message) | {"crosses_nodes": message.crosses_nodes} for message in messages_of(plan)],
        "step_s": {
            duration.phase.name: {name: asdict(r) for name, r in (*duration.parts.items(), ("step", duration.step_s))}
            for duration in plan.durations
        },
        "days": asdict(plan.days),
    }
