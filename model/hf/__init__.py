"""Hugging Face formats: one declarative map per family, read in both directions."""

from typing import Any

from .config_reader import ConversionError
from .family import Family
from .llama import LLAMA, QWEN3, QWEN3_MOE
from .minimax_m2 import MINIMAX_M2
from .minimax_m3 import MINIMAX_M3

FAMILIES: dict[str, Family] = {family.name: family for family in (LLAMA, QWEN3, QWEN3_MOE, MINIMAX_M2, MINIMAX_M3)}


def family_of(config: dict[str, Any]) -> Family:
    """By the model_type of a config.json, or its architecture. Raises ConversionError for any other."""
    kind, classes = config.get("model_type"), config.get("architectures") or []
    for family in FAMILIES.values():
        if kind in family.model_types or any(name in family.architectures for name in classes):
            return family
    raise ConversionError(
        f"config.json has model_type {kind!r} and architectures {classes}, which is no family known here. "
        f"Known: {', '.join(FAMILIES)}."
    )
