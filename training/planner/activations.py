"""What autograd keeps of one micro-batch, tensor by tensor, as our modules and Megatron's save it.

tests/integration/test_saved_tensors.py compares these numbers with the storages that a real forward pass saves, to the
byte. Names are of tensors; a storage that two operations save is listed once, where it is made.
"""

from dataclasses import dataclass

from ...model.config import LayerBackend, ModelSpec, Phase, Precision, QKNorm, Recompute
from .stages import Held, Layout, Slot

Saved = dict[str, int]
"""Name -> bytes."""


@dataclass(frozen=True)
class Activations:
    """Bytes saved by the layers of one rank for a micro-batch of `tokens` tokens on this rank.

    `tokens` is micro-batch size x sequence length / context-parallel size. `fused_norms` is torch's fused RMS norm,
    which keeps its input; without it (CPU) the norm is several operations that keep fp32 copies. `expert_load` is the
    share of the rank's experts in the tokens, 1 when all experts are equally busy.
    """

    spec: ModelSpec
    layout: Layout
    tokens: int
    phase: Phase
    deterministic: bool = True
    fused_norms: bool = True
    expert_load: float = 1.0

    @property
    def itemsize(self) -> int:
        return 2 if self.spec.precision is Precision.bf16 else 4

    @property
    def rows(self) -> int:
        """Tokens of this rank between the parallel linears: a share of them under sequence parallelism."""
        parallel = self.spec.parallel
        return self.tokens // parallel.tensor if parallel.sequence else self.tokens

    @property
    def expert_rows(self) -> int:
        """(token, expert) pairs that this rank's experts compute."""
        return round(self.rows * self.spec.parallel.expert_tensor * self.spec.moe.top_k * self.expert_load)

    @property
    def heads(self) -> tuple[int, int]:
        """Query heads and KV groups of this rank."""
        model, tensor = self.spec.model, self.spec.parallel.tensor
        return model.num_query_heads // tensor, model.num_kv_heads // tensor

    def chunk(self, held: Held) -> int:
        """Everything kept of one micro-batch by a chunk of the model, under the config's recompute."""
        saved = sum(count * sum(self.kept(slot).values()) for slot, count in held.items())
        if self.spec.parallel.pipeline > 1 and "head" not in held:
            saved += self.hidden_states  # Megatron keeps a stage's output until its backward pass
        return saved + sum(self.micro_batch().values())

    def kept(self, slot: Slot) -> Saved:
        """What stays of one slot until its backward pass, under the config's recompute."""
        if slot == "embedding":
            return {}
        if slot == "head":
            return self.head()
        assert isinstance(slot, int)
        if self.spec.recompute is Recompute.none:
            return self.layer(slot)
        is_mtp = self.spec.is_mtp(slot)
        ahead = self.mtp_head() if is_mtp else {}
        if self.spec.recompute is Recompute.full:
            embedded = {"MTP embedding": self.hidden_states} if is_mtp else {}
            return {"layer input": self.hidden_states, **embedded, **ahead}
        kept = {**self.attention(slot), **self._norm("MLP norm", self.rows, self.spec.model.hidden_size)}
        return {**kept, "MLP input": self.hidden_states, **(self._mtp_input() if is_mtp else {}), **ahead}

    def layer(self, layer: int) -> Saved:
        """All that the forward pass of one layer saves without recompute."""
        norm = self._norm("MLP norm", self.rows, self.spec.model.hidden_size)
        saved = {**self.attention(layer), **norm, **self.ffn(layer)}
        return {**saved, **self._mtp_input(), **self.mtp_head()} if self.spec.is_mtp(layer) else saved

    def ffn(self, layer: int) -> Saved:
        """Of the layer's experts or MLP."""
        return self.experts() if self.spec.is_moe(layer) else self.mlp("MLP", self.spec.moe.dense_hidden_size)

    @property
    def hidden_states(self) -> int:
        return self.itemsize * self.rows * self.spec.model.hidden_size

    def attention(self, layer: int) -> Saved:
        """Input norm, projections, index branch and kernels of one layer (`model/attention.py`)."""
        spec, tokens, size = self.spec, self.tokens, self.itemsize
        model, (heads, groups) = spec.model, self.heads
        dim = model.head_dim
        per_head = model.qk_norm is QKNorm.per_head
        has_norm, rotates = model.qk_norm is not QKNorm.none, model.rotary_dim > 0
        saved = {
            **self._norm("input norm", self.rows, model.hidden_size),
            "QKV input": self.hidden_states,
            # the value is a view of it
            "QKV output": size * tokens * (heads + 2 * groups) * dim,
        }
        # with one group the heads are views of the QKV output, with several the query is a copy
        if per_head:
            saved |= self._norm("query norm", tokens * heads, dim, input_kept=groups == 1)
            saved |= self._norm("key norm", tokens * groups, dim, input_kept=True)
        elif has_norm:
            saved |= self._full_vector_norm("query norm", heads * dim, input_kept=groups == 1)
            saved |= self._full_vector_norm("key norm", groups * dim, input_kept=groups == 1)
        query_is_new, key_is_new = rotates or has_norm or groups > 1, rotates or has_norm
        # context parallelism attends over the keys and values of all ranks
        context = spec.parallel.context
        if context > 1:
            saved["gathered key and value"] = size * 2 * tokens * context * groups * dim
        saved["query"] = size * tokens * heads * dim * query_is_new
        saved["key"] = size * tokens * groups * dim * (key_is_new and context == 1)
        saved |= {"output": size * tokens * heads * dim, "lse": 4 * tokens * heads}
        return {**saved, **self._index_branch(groups)} if spec.is_msa(layer) else saved

    def _index_branch(self, groups: int) -> Saved:
        attention, parallel, tokens = self.spec.attention, self.spec.parallel, self.tokens
        dim = attention.index_dim
        saved: Saved = {}
        if parallel.sequence:
            saved["gathered index input"] = self.itemsize * tokens * self.spec.model.hidden_size
        if attention.index_norm:
            saved |= self._norm("index query norm", tokens * groups, dim) | self._norm("index key norm", tokens, dim)
        saved["index query"] = self.itemsize * tokens * groups * dim
        saved["index key"] = self.itemsize * tokens * parallel.context * dim
        if self.phase is Phase.sparse:
            saved |= {"block ids": 4 * tokens * groups * attention.top_k, "student lse": 4 * tokens * groups}
        return saved

    def mlp(self, name: str, ffn_size: int, *, input_kept: bool = False) -> Saved:
        """Megatron's SwiGLU MLP: gate and up in one, up + 0, silu(gate), their product."""
        ffn = ffn_size // self.spec.parallel.tensor
        return {
            f"{name} input": 0 if input_kept else self.hidden_states,
            f"{name} gate and up": self.itemsize * self.tokens * 2 * ffn,
            f"{name} activation": self.itemsize * self.tokens * 3 * ffn,
        }

    def experts(self) -> Saved:
        """Router, dispatcher and grouped experts; the tokens that arrive from other ranks are as many as those sent."""
        spec, rows, pairs = self.spec, self.rows, self.expert_rows
        moe, model, size = spec.moe, spec.model, self.itemsize
        ffn = moe.expert_hidden_size // spec.parallel.expert_tensor
        local = moe.num_experts // spec.parallel.expert
        saved = {
            "router input": 4 * rows * model.hidden_size,
            # scores, weights, the map of chosen experts; two sums
            "router": rows * moe.num_experts * (4 + 4 + 1) + 8 * rows,
            # the map and the probabilities transposed, the order of the tokens
            "permutation": rows * moe.num_experts * (1 + 4) + 8 * rows * moe.top_k,
            "expert input": size * pairs * model.hidden_size,
            "expert gate and up": size * pairs * 2 * ffn,
            # silu(gate), silu(gate) x up, and that times the probability
            "expert activation": size * pairs * 3 * ffn + 4 * pairs,
            # Transformer Engine has them on the host
            "expert borders": 4 * local * (model.backend is LayerBackend.torch),
        }
        if moe.shared_hidden_size:  # in fp32 the router has kept their common input
            saved |= self.mlp("shared expert", moe.shared_hidden_size, input_kept=size == 4)
        return saved

    def head(self) -> Saved:
        """Final norm, output layer and Megatron's cross entropy, which keeps the softmax in fp32."""
        model, tokens = self.spec.model, self.tokens
        return {
            **self._norm("final norm", self.rows, model.hidden_size),
            "head input": self.hidden_states,
            "softmax": 4 * tokens * model.vocab_size // self.spec.parallel.tensor,
            "targets": (1 + 8) * tokens,
        }

    def _mtp_input(self) -> Saved:
        """What goes into an MTP layer, embedding and state, normed and projected, and the norm at its end."""
        width = self.spec.model.hidden_size
        saved: Saved = {"MTP projection input": 2 * self.hidden_states}
        for name in ("MTP embedding norm", "MTP state norm", "MTP final norm"):
            saved |= self._norm(name, self.rows, width)
        return saved

    def mtp_head(self) -> Saved:
        """Of an MTP layer: token ids, another turn of the output layer, the mask of its targets, the attached loss."""
        head = {f"MTP {name}": size for name, size in self.head().items() if not name.startswith("final norm")}
        return {**head, "MTP tokens": 8 * self.tokens, "MTP mask": 4 * self.tokens, "MTP loss": 4}

    def micro_batch(self) -> Saved:
        """Tokens, labels, positions, document ids (int64) and the fp32 loss mask; fp32 rotary tables."""
        return {"batch": 36 * self.tokens, "rotary tables": 8 * self.tokens * self.spec.model.rotary_dim}

    def segment_tables(self) -> int:
        """Tables of documents and blocks on the GPU, kept for every micro-batch until the step ends."""
        return 28 * self.tokens

    def _norm(self, name: str, rows: int, width: int, *, input_kept: bool = False) -> Saved:
        """RMS norm over `width`; `input_kept` where another tensor holds the input's storage already."""
        saved = self.itemsize * rows * width if not input_kept else 0
        zero_centered = self.spec.model.zero_centered_norms
        if self.itemsize == 2 and (zero_centered or not self.fused_norms):
            saved = 4 * rows * width  # the input in fp32, in place of the input
        if not self.fused_norms:
            saved += 4 * rows * width
        return {f"{name} input": saved, f"{name} scale": 4 * rows, f"{name} weight": 4 * width * zero_centered}

    def _full_vector_norm(self, name: str, width: int, *, input_kept: bool) -> Saved:
        if self.spec.parallel.tensor == 1:
            return self._norm(name, self.tokens, width, input_kept=input_kept)
        # the mean crosses ranks, so the norm is several operations in fp32
        return {f"{name} input": 8 * self.tokens * width, f"{name} scale": 12 * self.tokens}
