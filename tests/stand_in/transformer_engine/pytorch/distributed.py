"""Named by megatron-core at import; nothing of it is used without FP8 and CUDA graphs."""


class CudaRNGStatesTracker: ...


def activation_recompute_forward(*args, **kwargs):
    raise NotImplementedError


def checkpoint(*args, **kwargs):
    raise NotImplementedError
