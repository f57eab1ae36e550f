"""Rates of each kind of GPU: H200 measured where that was possible, the others scaled by public data sheets."""

from dataclasses import dataclass

from .ranges import Range

GPUS_PER_NODE = 8

# Of the measured rate of a large matrix product. A guess for products of 4K to 64K rows until it is measured.
LINEAR_SHARE = Range(0.65, 0.92)
# torch's grouped_mm; 65% was measured on an H200 for 64 experts with even loads (docs/results/memory.md).
EXPERT_SHARE = Range(0.45, 0.75)
# Of the measured copy rate, for element-wise kernels of PyTorch.
COPY_SHARE = Range(0.6, 0.95)
# Of a link's data-sheet rate, for NCCL's collectives on large messages.
LINK_SHARE = Range(0.55, 0.85)


@dataclass(frozen=True)
class Gpu:
    """One GPU in a node of eight. Rates in TFLOP/s and in 10^9 bytes a second, each way."""

    name: str
    memory_gib: float
    matmul_tflops: float
    """Dense bf16 matrix product of 8192^3."""
    copy_gb_s: float
    """Device copy, bytes read plus bytes written."""
    nvlink_gb_s: float
    network_gb_s: float
    kernels: Range
    """Speed of this project's attention kernels against the H200 they were measured on."""
    source: str

    @property
    def linear(self) -> Range:
        """FLOP/s of linear layers."""
        return LINEAR_SHARE * (self.matmul_tflops * 1e12)

    @property
    def experts(self) -> Range:
        return EXPERT_SHARE * (self.matmul_tflops * 1e12)

    @property
    def copies(self) -> Range:
        return COPY_SHARE * (self.copy_gb_s * 1e9)

    def link(self, crosses_nodes: bool) -> Range:
        return LINK_SHARE * ((self.network_gb_s if crosses_nodes else self.nvlink_gb_s) * 1e9)


# Data sheets (dense bf16 TFLOP/s, memory TB/s and GB, NVLink both ways): H200 SXM 989.5, 4.8, 141, 900;
# H100 SXM 989.5, 3.35, 80, 900; B200 of an HGX B200 2250, 8.0, 180, 1800. 80 and 180 are taken as 10^9 bytes.
# Network: one 400 Gbit/s adapter a GPU, as the vendor's reference nodes of all three have.
_H200_MATMUL, _H200_COPY = 795.0, 4260.0

GPUS = {
    "h200": Gpu(
        "H200", 139.0, _H200_MATMUL, _H200_COPY, 450.0, 50.0, Range(1.0, 1.0),
        "measured on one H200: 8192^3 bf16 product, device copy, memory of the driver; links by data sheet",
    ),
    "h100": Gpu(
        "H100", 80e9 / 2**30, _H200_MATMUL, _H200_COPY * 3.35 / 4.8, 450.0, 50.0, Range(0.8, 1.0),
        "scaled from the H200 by data sheets: same matrix rate, memory rate 3.35/4.8; not measured",
    ),
    "b200": Gpu(
        "B200", 180e9 / 2**30, _H200_MATMUL * 2250 / 989.5, _H200_COPY * 8.0 / 4.8, 900.0, 50.0, Range(0.7, 2.0),
        "scaled from the H200 by data sheets: matrix rate 2250/989.5, memory rate 8/4.8; kernels are tuned for Hopper",
    ),
}  # fmt: skip
