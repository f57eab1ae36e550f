"""Linear layers and the RMS norm. Both save an `_extra_state` beside their weight, as the real ones do."""

import torch
from torch.nn import functional as F

from . import distributed, ops
from .cpp_extensions import general_grouped_gemm

__all__ = ["DotProductAttention", "GroupedLinear", "LayerNormLinear", "Linear", "RMSNorm", "distributed"]
__all__ += ["general_grouped_gemm", "ops"]


class _WithExtraState(torch.nn.Module):
    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state): ...


class Linear(_WithExtraState):
    def __init__(
        self,
        in_features,
        out_features,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        rng_tracker_name=None,
        init_method=None,
        bias=True,
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        parameters_split=None,
        device="cuda",
    ):
        super().__init__()
        assert not fuse_wgrad_accumulation and not bias and parameters_split is None
        self.tp_group, self.parallel_mode = tp_group, parallel_mode
        self.tp_size = tp_group.size() if tp_group is not None else tp_size
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        if parallel_mode == "column":
            self.out_features //= self.tp_size
        elif parallel_mode == "row":
            self.in_features //= self.tp_size
        shape = (self.out_features, self.in_features)
        # filled with NaN: nothing may count on initial values
        self.weight = torch.nn.Parameter(torch.full(shape, torch.nan, device=device, dtype=params_dtype))
        self.weight.tensor_model_parallel, self.weight.partition_stride = True, 1
        self.weight.partition_dim = 1 if parallel_mode == "row" else 0
        self.calls = 0

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        assert inp.dtype == self.weight.dtype, "Data types for parameters must match when outside of autocasted region."
        from megatron.core.tensor_parallel import mappings  # which imports this package

        self.calls += 1
        if self.parallel_mode == "column" and self.sequence_parallel:
            inp = mappings.gather_from_sequence_parallel_region(inp, group=self.tp_group)
        elif self.parallel_mode == "column":
            inp = mappings.copy_to_tensor_model_parallel_region(inp, group=self.tp_group)
        out = F.linear(inp, self.weight)
        if self.parallel_mode == "row" and self.sequence_parallel:
            return mappings.reduce_scatter_to_sequence_parallel_region(out, group=self.tp_group)
        if self.parallel_mode == "row":
            return mappings.reduce_from_tensor_model_parallel_region(out, group=self.tp_group)
        return out


class RMSNorm(_WithExtraState):
    def __init__(
        self,
        normalized_shape=None,
        eps=1e-5,
        sequence_parallel=None,
        params_dtype=None,
        zero_centered_gamma=False,
        hidden_size=None,
        *,
        device=None,
        dtype=None,
        sm_margin=0,
    ):
        super().__init__()
        assert normalized_shape is not None and hidden_size is None, "`hidden_size` is deprecated"
        self.eps, self.calls = eps, 0
        self.weight = torch.nn.Parameter(torch.ones(normalized_shape, device=device, dtype=dtype))
        if sequence_parallel is not None:
            self.weight.sequence_parallel = sequence_parallel

    def forward(self, inp):
        self.calls += 1
        return F.rms_norm(inp, inp.shape[-1:], self.weight, self.eps)


class LayerNormLinear(Linear): ...


class GroupedLinear(_WithExtraState): ...


class DotProductAttention(torch.nn.Module): ...
