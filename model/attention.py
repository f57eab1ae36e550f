"""GQA attention with the index branch beside it, on Megatron's parallel linear layers (spec sections 2-4)."""

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from ..kernels import (
    attach_dense_kl,
    decode_attention,
    dense_attention,
    dense_indexer_kl,
    select_blocks,
    selection_quality,
    sparse_attention,
    sparse_attention_with_kl,
    sparse_indexer_kl,
)
from .attach_loss import AttachLoss
from .backend import LayerModules
from .config import ModelSpec, Phase, QKNorm
from .context import AttentionContext
from .context_parallel import GatheredRows
from .indexer import Indexer
from .norm import FullVectorNorm, HeadNorm
from .rope import apply_rotation


class MSAAttention(MegatronModule):
    """QKV -> QK norm -> partial RoPE -> {dense | warm-up | sparse} attention -> output projection.

    A tensor-parallel rank has whole KV groups, each with its query heads and its index query head: attention, selection
    and KL need no message, and the KL of a rank is that of its groups. A context-parallel rank has whole layers and a
    share of the queries, and gathers the keys (`GatheredRows`) while it makes queries and selects blocks.

    Megatron's layout [t, 1, h] is converted here to the kernels' packed [t, heads, dim] and nowhere else. The phase
    comes with each micro-batch (`AttentionContext`); a layer without index branch attends densely in every phase.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        spec: ModelSpec,
        modules: LayerModules,
        pg_collection: ProcessGroupCollection,
        cp_comm_type: str | None = None,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
    ) -> None:
        super().__init__(config=config)
        model = spec.model
        self.spec, self.layer = spec, layer_number - 1
        self.tp_group, self.cp_group, self.head_dim = pg_collection.tp, pg_collection.cp, model.head_dim
        # of this rank
        self.num_heads = model.num_query_heads // self.tp_group.size()
        self.num_groups = model.num_kv_heads // self.tp_group.size()
        linear: dict[str, Any] = dict(
            config=config, init_method=config.init_method, bias=False, is_expert=False, tp_group=self.tp_group
        )
        width = (model.num_query_heads + 2 * model.num_kv_heads) * self.head_dim
        self.linear_qkv = modules.column_linear(
            model.hidden_size, width, gather_output=False, skip_bias_add=False, **linear
        )
        self.linear_proj = modules.row_linear(
            model.num_query_heads * self.head_dim,
            model.hidden_size,
            input_is_parallel=True,
            skip_bias_add=True,
            **linear,
        )
        self.query_norm = self._qk_norm(model.num_query_heads)
        self.key_norm = self._qk_norm(model.num_kv_heads)
        self.indexer = Indexer(config, spec, self.tp_group) if spec.is_msa(self.layer) else None

    def _qk_norm(self, num_heads: int) -> nn.Module:
        kind, eps = self.spec.model.qk_norm, self.spec.model.norm_eps
        if kind is QKNorm.none:
            return nn.Identity()
        if kind is QKNorm.full_vector:
            return FullVectorNorm(self.config, num_heads * self.head_dim, eps, self.tp_group)
        return HeadNorm(self.config, self.head_dim, eps, self.tp_group)

    def forward(
        self, hidden_states: Tensor, *, packed_seq_params: AttentionContext, **unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [t, 1, h], the output of the layer's input norm -> (output [t, 1, h], no bias).

        Under sequence parallelism input and output are this rank's share of the t tokens.
        """
        context = packed_seq_params
        if self.indexer is None:
            query, keys_and_values = self._project(hidden_states, context)
            key, value = keys_and_values.wait()
            if context.cache is not None:
                key, value = context.cache.extend(self.layer, key, value)
            output, _ = dense_attention(query, key, value, context.segments, backend=self._backend)
        elif context.phase is Phase.dense:
            raise ValueError("a model with index branches has no dense phase; use warmup or sparse.")
        else:
            index_query, index_key = self.indexer(hidden_states.squeeze(1), context.cos, context.sin)
            index_keys = GatheredRows(self.cp_group, index_key)
            query, keys_and_values = self._project(hidden_states, context)
            (index_key,) = index_keys.wait()
            attend = self._attend if context.cache is None else self._attend_cached
            output = attend(query, keys_and_values, index_query, index_key, context)
        return self.linear_proj(output.flatten(1)[:, None])

    @property
    def _backend(self) -> str:
        return self.spec.attention.backend.name

    @property
    def _selection(self) -> dict[str, Any]:
        attention = self.spec.attention
        return dict(
            block_size=attention.block_size,
            num_selected_blocks=attention.top_k,
            init_blocks=attention.init_blocks,
            backend=self._backend,
        )

    @property
    def _sparse(self) -> dict[str, Any]:
        attention = self.spec.attention
        # a query of so short a document keeps all its blocks
        short = attention.top_k * attention.block_size
        return dict(block_size=attention.block_size, dense_up_to=short)

    def _project(self, hidden_states: Tensor, context: AttentionContext) -> tuple[Tensor, GatheredRows]:
        """query [t, n, d] and, on their way, key and value [t, g, d] of this rank's heads, normed and rotated."""
        mixed, _ = self.linear_qkv(hidden_states)
        # [t, g, (n/g + 2) d]: each group's query heads, then its key, then its value
        mixed = mixed.squeeze(1).unflatten(-1, (self.num_groups, -1))
        sizes = [self.num_heads // self.num_groups * self.head_dim, self.head_dim, self.head_dim]
        query, key, value = mixed.split(sizes, dim=-1)
        key = apply_rotation(self._normed(self.key_norm, key), context.cos, context.sin)
        keys_and_values = GatheredRows(self.cp_group, key, value)
        query = self._normed(self.query_norm, query.reshape(-1, self.num_heads, self.head_dim))
        return apply_rotation(query, context.cos, context.sin), keys_and_values

    def _normed(self, norm: nn.Module, heads: Tensor) -> Tensor:
        if self.spec.model.qk_norm is QKNorm.full_vector:
            return norm(heads.flatten(1)).view(heads.shape)
        return norm(heads)

    def _attend(
        self,
        query: Tensor,
        keys_and_values: GatheredRows,
        index_query: Tensor,
        index_key: Tensor,
        context: AttentionContext,
    ) -> Tensor:
        """Attention of the context's phase [t, n, d] with the layer's KL attached."""
        segments, backend, warmup = context.segments, self._backend, context.phase is Phase.warmup
        trained = self.training and torch.is_grad_enabled()
        # once under full recompute, whose first pass runs without gradients
        measurements = context.measurements if trained or not self.training else None
        depth = self.layer - self.spec.model.num_layers  # of an MTP layer, from 0
        row_weight = context.mtp[depth].mask.t() if depth >= 0 else None
        quality_rows = context.quality_rows if measurements is not None and depth < 0 else None
        if not warmup or quality_rows is not None:
            with torch.no_grad():
                block_indices, index_lse = select_blocks(index_query, index_key, segments, **self._selection)
        key, value = keys_and_values.wait()
        if measurements is not None and quality_rows is not None:
            quality = selection_quality(
                query,
                key,
                index_query,
                index_key,
                block_indices,
                segments,
                quality_rows,
                block_size=self.spec.attention.block_size,
                support="full" if warmup else "kept",
            )
            measurements.add_quality(self.layer, quality)

        def record(kl: Tensor) -> None:
            if measurements is not None:
                measurements.add_kl(self.layer, kl)

        is_joint = trained and backend == "triton"
        loss = dict(kl_weight=context.kl_weight, row_weight=row_weight, record=record)
        if is_joint and not warmup:
            index = (index_query, index_key, block_indices, index_lse)
            return sparse_attention_with_kl(query, key, value, *index, segments, **self._sparse, **loss)
        if warmup:
            output, lse = dense_attention(query, key, value, segments, backend=backend)
        else:
            output, lse = sparse_attention(query, key, value, block_indices, segments, **self._sparse, backend=backend)
        if not trained and measurements is None:
            return output
        teacher = (index_query, index_key, query, key, lse)
        if is_joint:
            return attach_dense_kl(output, *teacher, segments, **loss)
        if warmup:
            kl = dense_indexer_kl(*teacher, segments, backend=backend)
        else:
            kl = sparse_indexer_kl(*teacher, block_indices, segments, **self._sparse, backend=backend)
        if row_weight is not None:
            kl = kl * row_weight
        record(kl.detach().double().sum())
        return AttachLoss.apply(output, kl.sum() * context.kl_weight) if trained else output

    def _attend_cached(
        self,
        query: Tensor,
        keys_and_values: GatheredRows,
        index_query: Tensor,
        index_key: Tensor,
        context: AttentionContext,
    ) -> Tensor:
        """Attention of new tokens [t, n, d] over the cache, which takes them in first; no KL."""
        cache, segments = context.cache, context.segments
        assert cache is not None
        key, value, index_key = cache.extend(self.layer, *keys_and_values.wait(), index_key)
        if context.phase is Phase.warmup:
            return dense_attention(query, key, value, segments, backend=self._backend)[0]
        if all(q_len == 1 for _, q_len, _, _ in segments.rows):
            key, value, index_key = map(cache.by_sequence, (key, value, index_key))
            lengths = segments.cached("lengths", query.device, lambda: torch.tensor(cache.lengths))
            return decode_attention(query, key, value, index_query, index_key, lengths, **self._selection)[0]
        block_indices, _ = select_blocks(index_query, index_key, segments, **self._selection)
        return sparse_attention(query, key, value, block_indices, segments, **self._sparse, backend=self._backend)[0]
