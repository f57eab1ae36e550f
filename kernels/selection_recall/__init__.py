"""How well the kept blocks cover what the main branch attends to."""

from .op import selection_quality
from .quality import SelectionQuality, skill

__all__ = ["SelectionQuality", "selection_quality", "skill"]
