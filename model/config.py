"""What a model is made of: typed configs without defaults for anything that must be chosen.

Dimension legend of the whole project: `s` sequence, `b` micro-batch, `t` packed tokens, `h` hidden, `n` query heads,
`g` KV heads = GQA groups, `d` head dim, `i` index head dim, `e` experts, `k` top-k, `f` expert FFN, `m` KV blocks,
`l` block length, `v` vocabulary.
"""

import math
from dataclasses import dataclass, field
from enum import Enum

# Enum members are spelled as in YAML and on the command line; OmegaConf lists them when a value is wrong.
Activation = Enum("Activation", ["swiglu", "swiglu_oai"])
ScoreFunction = Enum("ScoreFunction", ["sigmoid", "softmax"])
QKNorm = Enum("QKNorm", ["none", "per_head", "full_vector"])
LayerBackend = Enum("LayerBackend", ["torch", "transformer_engine"])
AttentionKind = Enum("AttentionKind", ["msa", "dense"])
IndexerInit = Enum("IndexerInit", ["random", "from_attention"])
AttentionBackend = Enum("AttentionBackend", ["reference", "triton"])
Dispatcher = Enum("Dispatcher", ["allgather", "alltoall"])
Recompute = Enum("Recompute", ["none", "selective", "full"])
Precision = Enum("Precision", ["fp32", "bf16"])
Phase = Enum("Phase", ["dense", "warmup", "sparse"])


@dataclass(kw_only=True)
class RopeScaling:
    """Slower rotation of the channels whose wavelength is long against the length of the first training (Llama 3.1)."""

    factor: float = 1.0
    """Division of the lowest frequencies; 1 means no scaling."""
    low_freq_factor: float = 1.0
    """Wavelengths above original_length / this are scaled in full."""
    high_freq_factor: float = 4.0
    """Wavelengths below original_length / this stay; those in between are scaled in part."""
    original_length: int = 8192
    """Tokens of a sequence in the training before the scaling."""


@dataclass(kw_only=True)
class ModelConfig:
    """The backbone's shape."""

    num_layers: int
    hidden_size: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    """Leading channels of each head that RoPE rotates (even, at most head_dim and index_dim)."""
    rope_theta: float
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    vocab_size: int
    """Rows of the embedding and of the head; at least the tokenizer's size."""
    qk_norm: QKNorm
    """`per_head`: one weight [d] (MiniMax-M3, Qwen3); `full_vector`: RMS over all heads (MiniMax-M2)."""
    norm_eps: float
    zero_centered_norms: bool = False
    """Weights w of all norms act as 1 + w and start at 0 (MiniMax-M3)."""
    activation: Activation
    """Of every MLP: experts, shared expert and plain MLP. `swiglu`: silu(gate) * up. `swiglu_oai` (MiniMax-M3):
    g * sigmoid(1.702 g) * (u + 1) with g = min(gate, 7) and u = up clamped to -7..7."""
    tie_embeddings: bool
    mtp_layers: int = 0
    """Layers that predict a token further ahead each, in training only (DeepSeek-V3's multi-token prediction)."""
    backend: LayerBackend
    """Where norms and GEMMs come from."""
    init_std: float = 0.02


@dataclass(kw_only=True)
class AttentionConfig:
    """MSA (spec sections 1-4)."""

    kind: AttentionKind
    """`msa`, or `dense` for the GQA baseline and for checkpoints that will be converted."""
    block_size: int = 128
    """Tokens of a KV block, l."""
    top_k: int = 16
    """KV blocks kept for each query and group, the local one included, k."""
    index_dim: int = 128
    """Channels of an index head, i."""
    init_blocks: int = 0
    """First blocks of a document that are always kept."""
    index_norm: bool = True
    """RMS norm on the index heads."""
    index_rope: bool = True
    """The main branch's partial RoPE on the index heads."""
    detach: bool = True
    """Stop the index branch's gradient at its input (paper eq. 11). Off only in ablations."""
    indexer_init: IndexerInit = IndexerInit.random
    """How index weights start that `training.init_from` does not bring: `random`, or `from_attention`: averages of the
    checkpoint's query and key projections (spec section 4)."""
    backend: AttentionBackend
    full_layers: list[int] = field(default_factory=list)
    """Layers (0-based) with dense attention for ever and no index branch."""


@dataclass(kw_only=True)
class MoEConfig:
    """Mixture of experts with a gate of its own for each expert and a selection bias."""

    num_experts: int
    top_k: int
    expert_hidden_size: int
    shared_hidden_size: int = 0
    """Hidden size of the shared expert; 0 means none."""
    score_function: ScoreFunction = ScoreFunction.sigmoid
    """What makes scores of the router's logits; those of the chosen experts are renormalised to 1. `softmax`: over all
    experts (Qwen3-MoE), without a bias."""
    routed_scaling: float = 1.0
    """Factor on the routed experts' sum (2.0 in MiniMax-M3)."""
    bias_update_rate: float = 1e-3
    """Step of the expert bias towards balance after each optimizer step; 0 freezes it."""
    num_groups: int = 1
    """Groups of consecutive experts (DeepSeek-V3); 1: every expert is open to every token."""
    top_groups: int = 1
    """Groups that a token may choose experts from; each is worth the sum of its top_k / top_groups best experts."""
    aux_loss_coef: float = 0.0
    """Factor on the sequence balance loss of each layer, a mean over tokens; a document is a sequence."""
    z_loss_coef: float = 0.0
    """Factor on each router's logsumexp(logits)^2, a mean over tokens."""
    force_balance: bool = False
    """For benchmarks: tokens take the experts in turn, whatever the router says, and the bias stands still."""
    dense_mlp_layers: list[int] = field(default_factory=list)
    """Layers (0-based) with a plain MLP."""
    dense_hidden_size: int = 0
    """Hidden size of those layers' MLP."""

    @property
    def has_losses(self) -> bool:
        return self.aux_loss_coef > 0 or self.z_loss_coef > 0


@dataclass(kw_only=True)
class ParallelConfig:
    """Megatron's parallel sizes; data parallelism takes the rest of the world."""

    tensor: int = 1
    """Ranks that share each layer's KV groups (with their query and index heads), MLP columns and vocabulary rows."""
    sequence: bool = False
    """Split activations between those layers over the tokens; goes with `tensor`, and MoE layers demand it."""
    pipeline: int = 1
    virtual_pipeline: int = 1
    """Model chunks per pipeline stage (interleaved schedule); 1 means none."""
    context: int = 1
    """Ranks that share the tokens of a micro-batch, two chunks each; they gather each other's keys and values."""
    expert: int = 1
    expert_tensor: int = 1
    """Ranks that share each expert's hidden channels: 1 (whole experts), or as many as `tensor`."""
    dispatcher: Dispatcher = Dispatcher.alltoall

    @property
    def virtual_stages(self) -> int | None:
        """As Megatron wants it: None without an interleaved schedule."""
        return self.virtual_pipeline if self.virtual_pipeline > 1 else None

    @property
    def model_ranks(self) -> int:
        """Processes that hold one copy of everything but the experts."""
        return self.tensor * self.context * self.pipeline

    @property
    def expert_ranks(self) -> int:
        """Processes that hold one copy of the experts."""
        return self.expert_tensor * self.expert * self.pipeline

    @property
    def smallest_world(self) -> int:
        """Every world is a multiple of it."""
        return math.lcm(self.model_ranks, self.expert_ranks)

    def data_parallel(self, world_size: int) -> int:
        """Ranks that read different samples."""
        return world_size // self.model_ranks


@dataclass(kw_only=True)
class ModelSpec:
    """All that decides the model and its sharding; what `model` functions take."""

    model: ModelConfig
    attention: AttentionConfig
    moe: MoEConfig
    parallel: ParallelConfig
    precision: Precision
    recompute: Recompute
    seed: int

    def is_msa(self, layer: int) -> bool:
        """Whether 0-based `layer` has an index branch."""
        return self.attention.kind is AttentionKind.msa and layer not in self.attention.full_layers

    def is_moe(self, layer: int) -> bool:
        return min(layer, self.model.num_layers - 1) not in self.moe.dense_mlp_layers

    def is_mtp(self, layer: int) -> bool:
        return layer >= self.model.num_layers

    @property
    def msa_layers(self) -> list[int]:
        return [layer for layer in range(self.model.num_layers) if self.is_msa(layer)]

    @property
    def mtp_layers(self) -> list[int]:
        """Numbers of the MTP layers, on from the decoder's: MSA layers, with the kind of MLP of its last layer."""
        return [self.model.num_layers + depth for depth in range(self.model.mtp_layers)]

    @property
    def moe_layers(self) -> list[int]:
        return [layer for layer in range(self.model.num_layers) if self.is_moe(layer)]
