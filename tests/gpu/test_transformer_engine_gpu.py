"""`model.backend=transformer_engine` on a GPU: Transformer Engine itself against torch and against fp32."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from msa_pretrain.model.grouped_product import TorchGroupedProduct
from msa_pretrain.model.te_grouped_product import TEGroupedProduct
from msa_pretrain.training.machine import transformer_engine_problem

PROBLEM = transformer_engine_problem()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(PROBLEM is not None, reason=f"this machine {PROBLEM}")]
SCRIPT = Path(__file__).parents[1] / "stand_in" / "compare_backends.py"
LOADS = {"uneven": [513, 0, 64, 1, 2000, 0, 130, 388], "one expert": [0, 0, 0, 0, 0, 3096, 0, 0], "even": [387] * 8}
CUTLASS = "NVTE_USE_CUTLASS_GROUPED_GEMM"


def results(product, counts, dtype):
    """Output, and gradients of tokens and weights."""
    generator = torch.Generator("cuda").manual_seed(0)
    options = dict(generator=generator, device="cuda")
    tokens, weights = torch.randn(sum(counts), 256, **options), torch.randn(8, 384, 256, **options)
    grad = torch.randn(sum(counts), 384, **options)
    tokens, weights, grad = (value.bfloat16().to(dtype) for value in (tokens, weights, grad))
    leaves = [tokens.requires_grad_(), weights.requires_grad_()]
    output = product(torch.tensor(counts), tokens.device)(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


def loop(counts, device):
    def product(tokens, weights):
        parts = zip(tokens.split(counts.tolist()), weights, strict=True)
        return torch.cat([part @ weight.T for part, weight in parts])

    return product


@pytest.mark.parametrize("cutlass", ["0", "1"], ids=["cuBLAS", "CUTLASS"])
@pytest.mark.parametrize("counts", LOADS.values(), ids=LOADS)
def test_grouped_product(counts, cutlass, monkeypatch):
    """No further from fp32 than twice torch's distance, in the norm; the same bits when it runs again."""
    monkeypatch.setenv(CUTLASS, cutlass)
    ours, again = (results(TEGroupedProduct, counts, torch.bfloat16) for _ in range(2))
    torchs, truth = results(TorchGroupedProduct, counts, torch.bfloat16), results(loop, counts, torch.float64)
    for name, mine, mine_again, its, exact in zip(("y", "dx", "dw"), ours, again, torchs, truth, strict=True):
        error, allowed = (float((value - exact).norm() / exact.norm()) for value in (mine, its))
        print(f"{name}: {error:.2e}, torch {allowed:.2e}")
        assert error <= 2 * allowed + 1e-4, name
        assert torch.equal(mine, mine_again), name
    empty = [count == 0 for count in counts]
    assert not ours[2][empty].any()


SIZES = ["model.hidden_size=256", "model.num_query_heads=8", "model.num_kv_heads=4", "model.head_dim=32"]
SIZES += ["model.rotary_dim=16", "attention.index_dim=16", "moe.expert_hidden_size=128", "moe.dense_hidden_size=256"]
# bf16 decides near ties either way: experts are taken in turn, and the warm-up selects no blocks
SIZES += ["moe.shared_hidden_size=64", "moe.force_balance=true"]


def test_model_and_checkpoints(tmp_path):
    """Parameters, marks and checkpoints as torch's; losses and gradients within bf16; each loads the other's files."""
    overrides = ["training.precision=bf16", "model.mtp_layers=1", *SIZES]
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(tmp_path), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    seen = json.loads((tmp_path / "rank0.json").read_text())
    for what in ("parameters", "checkpoint", "groups"):
        assert seen[f"transformer_engine {what}"] == seen[f"torch {what}"], what
    assert {"TERMSNorm", "TEColumnLinear", "TERowLinear"} <= set(seen["types"])
    numbers = {key: value for key, value in seen.items() if isinstance(value, float) or key.startswith("losses")}
    print(json.dumps(numbers))
    if "RESULTS" in os.environ:
        Path(os.environ["RESULTS"], "te_model.json").write_text(json.dumps(numbers))
    assert seen["initial weights"] == 0.0
    assert seen["losses"][1] == pytest.approx(seen["losses"][0], rel=2e-3)
    assert seen["gradients"] <= 0.03 * seen["largest gradient"]
    ours, theirs = seen["losses after loading"]
    assert theirs == pytest.approx(ours, rel=5e-3) and ours < seen["losses"][0]
