"""The grid: every feature of a layout alone and in pairs, against one process that has none of them.

Plain data, which the walker's plans, the tests and the README's table share.
"""

from dataclasses import dataclass
from itertools import combinations
from math import lcm, prod

P = "parallel."
# name -> (heading, what it sets); `dp` doubles the processes, `accumulation` makes every micro-batch one sample
FEATURES = {
    "tp": ("TP + SP", {P + "tensor": 2, P + "sequence": True}),
    "cp": ("CP", {P + "context": 2}),
    "pp": ("PP", {P + "pipeline": 2}),
    "vpp": ("VPP", {P + "pipeline": 2, P + "virtual_pipeline": 2}),
    "ep": ("EP", {P + "expert": 2}),
    "dp": ("DP", {}),
    "accumulation": ("accum.", {}),
    "full": ("full rec.", {"training.recompute": "full"}),
    "selective": ("sel. rec.", {"training.recompute": "selective"}),
}
EXCLUSIVE = [{"pp", "vpp"}, {"full", "selective"}]  # the one contains, or is instead of, the other
GLOBAL_BATCH = 4


@dataclass(frozen=True)
class Layout:
    features: tuple[str, ...]

    @property
    def name(self) -> str:
        return "-".join(self.features) or "none"

    @property
    def settings(self) -> dict:
        return {key: value for feature in self.features for key, value in FEATURES[feature][1].items()}

    @property
    def processes(self) -> int:
        tensor, context, pipeline, expert = (
            self.settings.get(P + key, 1) for key in ("tensor", "context", "pipeline", "expert")
        )
        return lcm(tensor * context * pipeline, pipeline * expert) * (2 if "dp" in self.features else 1)

    @property
    def overrides(self) -> list[str]:
        """With as few micro-batches as the layout can do with, or with `accumulation` one for each sample."""
        readers = self.processes // prod(self.settings.get(P + key, 1) for key in ("tensor", "context", "pipeline"))
        fewest = 2 if "vpp" in self.features else 1
        size = 1 if "accumulation" in self.features else GLOBAL_BATCH // (readers * fewest)
        settings = {**self.settings, "training.micro_batch_size": size}
        return [f"{key}={str(value).lower()}" for key, value in settings.items()]


REFERENCE = Layout(())
SINGLES = [Layout((feature,)) for feature in FEATURES]
PAIRS = [Layout(pair) for pair in combinations(FEATURES, 2) if set(pair) not in EXCLUSIVE]


def readme_table() -> list[str]:
    """The lines of the README's table: on the diagonal and above it, how many processes train that layout."""
    cells = {layout.features: str(layout.processes) for layout in (*SINGLES, *PAIRS)}
    headings = [heading for heading, _ in FEATURES.values()]
    lines = ["| | " + " | ".join(headings) + " |", "|---|" + "---|" * len(headings)]
    for row, name in enumerate(FEATURES):
        found = ["" if column < row else cells.get((name, other), "–") for column, other in enumerate(FEATURES)]
        found[row] = cells[(name,)]
        lines.append(f"| **{headings[row]}** | " + " | ".join(found) + " |")
    return lines
