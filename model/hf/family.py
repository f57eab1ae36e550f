"""A family of Hugging Face checkpoints: one table of names, from which both directions follow, and its config.json."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ..config import AttentionConfig, ModelConfig, ModelSpec, MoEConfig, ParallelConfig, Precision, QKNorm, Recompute
from .forms import COPY, EXPERT_DOWN, EXPERT_GATE_UP, GATE_UP, NORM, QKV, VOCABULARY, Form

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True)
class Row:
    """One of our tensors and those of theirs that make it. Names of experts' tensors hold `{e}`, the expert."""

    ours: str
    theirs: tuple[str, ...]
    form: Form = COPY
    router: bool = False
    """fp32 whatever the dtype of the rest: rounding flips the choice between close experts."""


@dataclass(frozen=True)
class Piece:
    """One expert's or a whole tensor of ours, and theirs. Where one side is missing, the other is zeros."""

    ours: str | None
    expert: int | None
    """Of a tensor of all experts, the index on its first axis."""
    theirs: tuple[str, ...]
    form: Form
    router: bool
    zeros: tuple[int, ...] = ()
    """Without `ours`: the shape that it would have."""


@dataclass(frozen=True)
class Architecture:
    """What a config.json says, in our configs."""

    model: ModelConfig
    attention: AttentionConfig
    moe: MoEConfig

    def spec(self, precision: Precision) -> ModelSpec:
        """For one process."""
        return ModelSpec(
            model=self.model,
            attention=self.attention,
            moe=self.moe,
            parallel=ParallelConfig(),
            precision=precision,
            recompute=Recompute.none,
            seed=0,
        )


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What a config.json holds beside the model."""

    vocab_size: int
    max_positions: int
    dtype: str
    """Of the weights, as torch calls it."""
    token_ids: dict[str, Any] = field(default_factory=dict)
    """bos_token_id, eos_token_id, pad_token_id."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Names of `index` are relative to a decoder layer, those of `moe`, `shared` and `experts` to its MoE block."""

    name: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    """Named in config.json; the first is written."""
    moe_block: str = "mlp"
    """What they call that block."""
    index: tuple[Row, ...] = ()
    moe: tuple[Row, ...] = ()
    shared: tuple[Row, ...] = ()
    experts: tuple[Row, ...] = ()
    zero_centered_norms: bool = False
    fp32_router: bool = True
    """Router and bias are fp32 in the format; else in the dtype of the rest."""
    separate_head: bool = False
    """The format has a head in every case: a copy of a tied embedding."""
    always_shared: bool = False
    """The format has a shared expert in every MoE layer: zeros where the model has none."""
    ignored: tuple[str, ...] = ()
    """Parts of names that other programs need and this one does not."""
    read_config: Callable[[dict[str, Any]], Architecture]
    """Raises ConversionError for what the model here cannot be."""
    cannot_express: Callable[[ModelSpec], Iterator[str]]
    """Every reason why a model cannot be written in this format: the key, its value and what the format has."""
    write_config: Callable[[ModelSpec, ExportOptions], dict[str, Any]]

    def pieces(self, spec: ModelSpec, prefix: str = "") -> Iterator[Piece]:
        """Every tensor of the model in the order of its layers, MTP layers left out. `prefix` stands before theirs."""
        for row in OUTSIDE:
            if row.ours == HEAD and spec.model.tie_embeddings:
                if not self.separate_head:
                    continue
                row = replace(row, ours=EMBEDDING)
            yield _piece(row, "", prefix)
        for layer in range(spec.model.num_layers):
            ours, theirs = f"decoder.layers.{layer}.", f"{prefix}model.layers.{layer}."
            for row in self._layer_rows(spec, layer):
                yield _piece(row, ours, theirs)
            if spec.is_moe(layer):
                yield from self._moe_pieces(spec, f"{ours}mlp.", f"{theirs}{self.moe_block}.")

    def _layer_rows(self, spec: ModelSpec, layer: int) -> Iterator[Row]:
        yield from ATTENTION
        if spec.model.qk_norm is not QKNorm.none:
            yield from QK_NORMS
        if spec.is_msa(layer):
            yield from self.index
        if not spec.is_moe(layer):
            yield from DENSE_MLP

    def _moe_pieces(self, spec: ModelSpec, ours: str, theirs: str) -> Iterator[Piece]:
        for row in self.moe:
            yield _piece(row, ours, theirs)
        if spec.moe.shared_hidden_size:
            for row in self.shared:
                yield _piece(row, ours, theirs)
        elif self.always_shared:
            size, width = spec.model.hidden_size, spec.moe.expert_hidden_size
            for row, shape in zip(self.shared, ((2 * width, size), (size, width)), strict=True):
                yield replace(_piece(row, ours, theirs), ours=None, zeros=shape)
        for row in self.experts:
            for expert in range(spec.moe.num_experts):
                yield _piece(row, ours, theirs, expert)


def _piece(row: Row, ours: str, theirs: str, expert: int | None = None) -> Piece:
    names = tuple(theirs + name.format(e=expert) for name in row.theirs)
    return Piece(ours + row.ours, expert, names, row.form, row.router)


OUTSIDE = (
    Row(EMBEDDING, ("model.embed_tokens.weight",), VOCABULARY),
    Row("decoder.final_layernorm.weight", ("model.norm.weight",), NORM),
    Row(HEAD, ("lm_head.weight",), VOCABULARY),
)
ATTENTION = (
    Row("input_layernorm.weight", ("input_layernorm.weight",), NORM),
    Row(
        "self_attention.linear_qkv.weight",
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        QKV,
    ),
    Row("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",)),
    Row("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), NORM),
)
QK_NORMS = (
    Row("self_attention.query_norm.weight", ("self_attn.q_norm.weight",), NORM),
    Row("self_attention.key_norm.weight", ("self_attn.k_norm.weight",), NORM),
)
DENSE_MLP = (
    Row("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), GATE_UP),
    Row("mlp.linear_fc2.weight", ("mlp.down_proj.weight",)),
)
ROUTER = Row("router.weight", ("gate.weight",), router=True)
ROUTER_BIAS = Row("router.expert_bias", ("e_score_correction_bias",), router=True)
NO_ROUTER_BIAS = Row("router.expert_bias", (), router=True)
SHARED_EXPERT = (
    Row(
        "shared_experts.linear_fc1.weight",
        ("shared_experts.gate_proj.weight", "shared_experts.up_proj.weight"),
        GATE_UP,
    ),
    Row("shared_experts.linear_fc2.weight", ("shared_experts.down_proj.weight",)),
)
EXPERTS_W123 = (
    Row("experts.gate_up_proj", ("experts.{e}.w1.weight", "experts.{e}.w3.weight"), EXPERT_GATE_UP),
    Row("experts.down_proj", ("experts.{e}.w2.weight",), EXPERT_DOWN),
)
EXPERTS_PROJ = (
    Row("experts.gate_up_proj", ("experts.{e}.gate_proj.weight", "experts.{e}.up_proj.weight"), EXPERT_GATE_UP),
    Row("experts.down_proj", ("experts.{e}.down_proj.weight",), EXPERT_DOWN),
)
