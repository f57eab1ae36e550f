"""Peak memory of each pipeline stage: what stays, what micro-batches in flight keep, and the largest operation."""

from dataclasses import dataclass

from ...model.config import LayerBackend, ModelSpec, Phase, Precision
from . import buffers
from .activations import Activations
from .schedule import in_flight
from .stages import Held, Layout, held_by_chunk, together
from .states import States, states_of

GIB = 2**30

# Outside PyTorch's allocator: CUDA context and kernels, NCCL's buffers; inside it: blocks that do not fit together.
RESERVE_GIB = 3.0
FRAGMENTATION = 0.03

# cuBLAS under deterministic algorithms (:4096:8) and its default on Hopper, for the forward and the backward thread.
WORKSPACE_BYTES = 2 * 32 * 2**20
# Transformer Engine's own, on Hopper and later: one for each of four streams of grouped products, one for the others.
TE_WORKSPACE_BYTES = 5 * (32 * 2**20 + 1024)

# Experts get as many tokens as they are chosen by: early in a run some ranks have more than their share.
EXPERT_LOAD = (1.0, 1.25)
# Operations' own memory inside PyTorch's backward, as counted in `buffers`.
BUFFER_ERROR = (0.8, 1.25)


@dataclass(frozen=True)
class Peak:
    """Bytes of one GPU at its fullest moment; `low` and `high` bound it."""

    stage: int
    phase: Phase
    states: States
    activations: float
    """Kept by autograd for the micro-batches in flight, with their batches and tables."""
    micro_batches: tuple[int, ...]
    """In flight at that moment, by virtual stage."""
    buffers: float
    """Of the operation named in `during`, recomputed tensors included."""
    during: str
    workspace: float
    """Of cuBLAS."""
    low: float
    high: float

    @property
    def total(self) -> float:
        """What `torch.cuda.max_memory_allocated` should say."""
        return self.states.total + self.activations + self.buffers + self.workspace

    @property
    def needed(self) -> float:
        """Bytes that the GPU must have for the high estimate to fit."""
        return self.high * (1 + FRAGMENTATION) + RESERVE_GIB * GIB


@dataclass(frozen=True)
class Load:
    """A step's work as memory sees it."""

    micro_batch_size: int
    seq_length: int
    num_micro_batches: int
    deterministic: bool

    def tokens(self, spec: ModelSpec) -> int:
        """Of one micro-batch on one rank."""
        return self.micro_batch_size * self.seq_length // spec.parallel.context


def stage_peaks(spec: ModelSpec, layout: Layout, load: Load, phase: Phase) -> list[Peak]:
    """The peak of every pipeline stage in one phase."""
    even, busy = (
        Activations(spec, layout, load.tokens(spec), phase, deterministic=load.deterministic, expert_load=expert_load)
        for expert_load in EXPERT_LOAD
    )
    return [_peak(even, busy, load, stage, chunks) for stage, chunks in enumerate(held_by_chunk(spec))]


def fullest(spec: ModelSpec, layout: Layout, load: Load, phases: list[Phase]) -> Peak:
    """The peak that decides whether the layout fits."""
    return max((peak for phase in phases for peak in stage_peaks(spec, layout, load, phase)), key=lambda p: p.high)


def _peak(even: Activations, busy: Activations, load: Load, stage: int, chunks: list[Held]) -> Peak:
    """Peak of one stage; `busy` has the experts at their busiest, for the high estimate."""
    states = states_of(even.spec, even.layout, together(chunks))
    kept, flight, buffer, during = _moment(even, load, stage, chunks, states)
    busy_kept, _, busy_buffer, _ = _moment(busy, load, stage, chunks, states)
    workspace = workspace_bytes(even.spec)
    fixed = states.total + workspace
    low = fixed + kept + BUFFER_ERROR[0] * buffer
    high = fixed + busy_kept + BUFFER_ERROR[1] * busy_buffer
    return Peak(stage, even.phase, states, kept, flight, buffer, during, workspace, low, high)


def _moment(
    a: Activations, load: Load, stage: int, chunks: list[Held], states: States
) -> tuple[float, tuple[int, ...], float, str]:
    """The fullest moment: activations, micro-batches in flight, buffers, operation."""
    parallel = a.spec.parallel
    sizes = [a.chunk(chunk) for chunk in chunks]
    flights = in_flight(parallel.pipeline, parallel.virtual_pipeline, stage, load.num_micro_batches)
    kept, flight = max((sum(n * size for n, size in zip(f, sizes, strict=True)), f) for f in flights)
    kept += load.num_micro_batches * a.segment_tables()
    operations = buffers.largest(a, together(chunks))
    if operations["head"]:  # a layer's backward comes after its head's, whose softmax is gone then
        gone = sum(a.head().values()) + (sum(a.mtp_head().values()) if a.spec.mtp_layers else 0)
        operations = {name: size - (0 if name == "head" else gone) for name, size in operations.items()}
    during, size = max(operations.items(), key=lambda item: item[1])
    step = optimizer_buffers(a.spec, states)
    if step > kept + size:  # no activation is left then
        return 0.0, flight, step, "optimizer"
    return kept, flight, size, during


def workspace_bytes(spec: ModelSpec) -> int:
    return WORKSPACE_BYTES + (TE_WORKSPACE_BYTES if spec.model.backend is LayerBackend.transformer_engine else 0)


def optimizer_buffers(spec: ModelSpec, states: States) -> float:
    """torch's foreach AdamW: the square root of the second moment and the update, fp32, of its largest group."""
    per_parameter = 12 if spec.precision is Precision.bf16 else 8
    dense = sum(size for part, size in states.optimizer.items() if part not in ("experts", "router", "index"))
    return 2 * 4 * max(dense, states.optimizer.get("experts", 0.0)) / per_parameter
