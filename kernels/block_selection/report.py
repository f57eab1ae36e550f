"""Scores that are not finite: found on the GPU, reported on the CPU without a synchronisation per call."""

import torch
from torch import Tensor

KINDS = ("index_query row {row} is not finite", "index_key row {row} is not finite",
         "a score of query row {row} is not finite")  # fmt: skip


class ScoreReport:
    """Three words on the device: largest (row + 1) of each of KINDS, 0 for none. They stay set until they are raised.

    Every call copies them to pinned memory without waiting; a later call, or `raise_if_not_finite`, reads that copy.
    So an error shows up one call late at the earliest, and the copy also works inside a CUDA graph. On the CPU the
    words are read in the same call.
    """

    def __init__(self, device: torch.device) -> None:
        self.words = torch.zeros(len(KINDS), dtype=torch.int64, device=device)
        self._arrived = self.words if device.type == "cpu" else torch.zeros(len(KINDS), dtype=torch.int64).pin_memory()

    def send(self) -> None:
        """Copy the words to the host, in stream order."""
        if self._arrived is not self.words:
            self._arrived.copy_(self.words, non_blocking=True)

    def raise_if_arrived(self, op: str) -> None:
        """Raise ValueError, and forget, if the last copy that arrived names a row."""
        words = self._arrived.tolist()
        if not any(words):
            return
        if self.words.is_cuda:
            torch.cuda.synchronize(self.words.device)
        self.words.zero_()
        self._arrived.zero_()
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
            report.send()
            torch.cuda.synchronize(device)
        report.raise_if_arrived("select_blocks")


def new_magnitudes(device: torch.device) -> Tensor:
    """int32 bits of the largest |index_query| and |index_key|, to be raised by the check kernel."""
    return torch.zeros(2, dtype=torch.int32, device=device)
