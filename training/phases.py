"""The training phase as a pure function of consumed tokens (spec section 4)."""

from ..model.config import AttentionKind, Phase


def phase_at(consumed_tokens: int, *, kind: AttentionKind, warmup_tokens: int) -> Phase:
    """Phase of the step that starts with `consumed_tokens` behind it (positions fed, padding included).

    The switch to `sparse` happens at the first step that starts at or past the warm-up budget.
    """
    if kind is AttentionKind.dense:
        return Phase.dense
    return Phase.warmup if consumed_tokens < warmup_tokens else Phase.sparse
