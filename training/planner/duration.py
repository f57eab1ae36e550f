"""Time of a step and of the token budget, from measured rates (`hardware`, `measured`), each with its error.

A layer takes its GPU time or the host's launches, whichever is longer. Messages are not hidden behind computation: no
overlap is switched on (`training/optim.py`, `model/mcore.py`). One document a sample is assumed, so attention is at its
dearest. Not in it: validation, checkpoints, data, failures.
"""

from dataclasses import dataclass

from ...model.config import ModelSpec, Phase, Precision, Recompute
from .activations import Activations
from .communication import micro_batch_messages, step_messages
from .hardware import Gpu
from .measured import LAYER_LAUNCH_MS, kernel_ms
from .memory import EXPERT_LOAD, Load
from .ranges import NOTHING, Range, over
from .schedule import bubble
from .stages import Held, Layout, held_by_chunk, together
from .states import states_of
from .work import attention_products, head_products, mlp_products

# Element-wise kernels: times that a saved tensor's bytes are read or written, forward + backward and in a repeated
# forward pass. Counted by hand in our modules: 2 to 5 forward, twice that backward.
TRAFFIC = Range(6.0, 14.0)
TRAFFIC_AGAIN = Range(2.0, 5.0)


@dataclass(frozen=True)
class Duration:
    """Seconds of one step in one phase, on the slowest pipeline stage."""

    phase: Phase
    parts: dict[str, Range]
    """Of all micro-batches of the step; `bubble`, `gradients and weights` and `optimizer` once."""

    @property
    def step_s(self) -> Range:
        return sum(self.parts.values(), NOTHING)


def step_duration(spec: ModelSpec, layout: Layout, load: Load, phase: Phase, gpu: Gpu) -> Duration:
    """The stage that takes longest sets the pace of a pipeline."""
    # stages of the same layers take the same time
    stages = {str(sorted(map(str, together(chunks).items()))): chunks for chunks in held_by_chunk(spec)}
    durations = [_stage(spec, layout, load, phase, gpu, chunks) for chunks in stages.values()]
    return max(durations, key=lambda duration: duration.step_s.middle)


def _stage(spec: ModelSpec, layout: Layout, load: Load, phase: Phase, gpu: Gpu, chunks: list[Held]) -> Duration:
    held = together(chunks)
    a = Activations(spec, layout, load.tokens(spec), phase, deterministic=load.deterministic)
    lengths = [load.seq_length] * load.micro_batch_size
    layers = NOTHING
    launches = _launches(spec, phase)
    for slot, count in held.items():
        if isinstance(slot, int):
            layers += _layer(a, slot, lengths, gpu).at_least(launches) * count
    parts = {"layers": layers}
    if "head" in held:
        traffic = TRAFFIC * float(sum(a.head().values()))
        parts["head"] = over(head_products(a).linear, gpu.linear) + _time(traffic, gpu.copies)
    for message in micro_batch_messages(a, held, len(chunks)):
        parts[f"{message.kind} messages"] = over(message.size, gpu.link(message.crosses_nodes))
    parts = {name: time * float(load.num_micro_batches) for name, time in parts.items()}
    parallel = spec.parallel
    if parallel.pipeline > 1:
        idle = bubble(parallel.pipeline, parallel.virtual_pipeline, load.num_micro_batches)
        parts["pipeline bubble"] = sum(parts.values(), NOTHING) * idle
    messages = step_messages(spec, layout, held, a.itemsize)
    if messages:
        times = [over(message.size, gpu.link(message.crosses_nodes)) for message in messages]
        parts["gradients and weights"] = sum(times, NOTHING)
    parts["optimizer"] = _optimizer(spec, layout, held, gpu)
    return Duration(phase, parts)


def _launches(spec: ModelSpec, phase: Phase) -> Range:
    repeated = {Recompute.none: 1.0, Recompute.selective: 7 / 6, Recompute.full: 4 / 3}[spec.recompute]
    return LAYER_LAUNCH_MS[phase.name] * (1e-3 * repeated)


def _layer(a: Activations, layer: int, lengths: list[int], gpu: Gpu) -> Range:
    """Seconds of one layer for one micro-batch, forward, backward and what recompute repeats."""
    recompute = a.spec.recompute
    attention, mlp = attention_products(a, layer), mlp_products(a, layer)
    linear, experts = attention.linear + mlp.linear, mlp.experts
    if recompute is not Recompute.none:
        linear, experts = linear + mlp.linear_forward, experts + mlp.experts_forward
    if recompute is Recompute.full:
        linear += attention.linear_forward
    if a.spec.is_mtp(layer):
        linear += head_products(a).linear
    saved = float(sum(a.layer(layer).values()))
    traffic = TRAFFIC * saved
    repeated = saved - sum(a.kept(layer).values())
    if repeated > 0:
        traffic += TRAFFIC_AGAIN * repeated
    busiest = Range(*EXPERT_LOAD)
    return (
        over(linear, gpu.linear)
        + over(experts, gpu.experts) * busiest
        + _kernels(a, layer, lengths, gpu)
        + _time(traffic, gpu.copies)
    )


def _time(amount: Range, rate: Range) -> Range:
    return Range(amount.low / rate.high, amount.high / rate.low)


def _kernels(a: Activations, layer: int, lengths: list[int], gpu: Gpu) -> Range:
    """Attention, selection and KL of one layer; fp32 runs at a rate that nobody has measured and is not told apart."""
    spec, (heads, groups) = a.spec, a.heads
    sizes = dict(block_size=spec.attention.block_size, top_k=spec.attention.top_k)
    dim, index_dim = spec.model.head_dim, spec.attention.index_dim
    full = spec.recompute is Recompute.full
    suffix = " deterministic" if a.deterministic else ""

    def ms(op: str, width: int = dim) -> Range:
        return kernel_ms(op, heads, groups, width, tuple(lengths), **sizes)

    if not spec.is_msa(layer):
        total = ms("dense_fwd_bwd" + suffix) + (ms("dense_fwd" + suffix) if full else NOTHING)
    elif a.phase is Phase.warmup:
        total = ms("warmup_fwd_bwd" + suffix) + (ms("dense_fwd" + suffix) if full else NOTHING)
    else:
        total = ms("with_kl") + ms("select", index_dim)
        if full:
            total += ms("sparse_fwd") + ms("select", index_dim)
    context = 1 / spec.parallel.context  # each rank has its share of the queries
    return over(1e-3 * context, gpu.kernels) * total


def _optimizer(spec: ModelSpec, layout: Layout, held: Held, gpu: Gpu) -> Range:
    """Gradient norm and Adam over this rank's share: about 40 bytes a parameter read and written, once to twice."""
    states = states_of(spec, layout, held)
    parameters = sum(states.optimizer.values()) / (12 if spec.precision is Precision.bf16 else 8)
    zeroed = sum(states.gradients.values())
    return _time(Range(40.0, 80.0) * parameters + Range(1.0, 2.0) * zeroed, gpu.copies)
