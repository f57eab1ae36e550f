"""Scores that are not finite: found on the GPU, reported on the CPU without a synchronisation per call."""

import torch
from torch import Tensor

KINDS = ("index_query row {row} is not finite", "index_key row {row} is not finite",
         "a score of query row {row} is not finite")  # fmt: skip


class ScoreReport:
    """Three words: (row + 1) of a bad row of each of KINDS, 0 for none. They stay set until they are raised.

    For a GPU they lie in pinned host memory, where kernels write them themselves, in a CUDA graph too, and only when
    something is wrong. A later call, or `raise_if_not_finite`, reads them: an error shows up one call late at the
    earliest. On the CPU they are read in the same call.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.words = torch.zeros(len(KINDS), dtype=torch.int64, pin_memory=device.type == "cuda")

    def raise_if_arrived(self, op: str) -> None:
        """Raise ValueError, and forget, if a word names a row."""
        words = self.words.tolist()
        if not any(words):
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.words.zero_()
        found = "; ".join(kind.format(row=word - 1) for kind, word in zip(KINDS, words, strict=True) if word)
        raise ValueError(
            f"{op}: {found} (in this call or an earlier one). A non-finite score cannot be ranked: look for NaN or "
            "overflow in the index queries and keys."
        )


_REPORTS: dict[torch.device, ScoreReport] = {}


def score_report(device: torch.device) -> ScoreReport:
    """The report of this device."""
    if device not in _REPORTS:
        _REPORTS[device] = ScoreReport(device)
    return _REPORTS[device]


def raise_if_not_finite() -> None:
    """Wait for the GPUs and raise ValueError if any call so far met a visible index score that is not finite."""
    for device, report in _REPORTS.items():
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        report.raise_if_arrived("select_blocks")


def new_magnitudes(device: torch.device) -> Tensor:
    """int32 bits of the largest |index_query| and |index_key|, to be raised by the check kernel."""
    return torch.zeros(2, dtype=torch.int32, device=device)
