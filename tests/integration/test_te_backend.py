"""`model.backend=transformer_engine` against the torch backend, on a stand-in (tests/stand_in) with its signatures.

The real one is compared in tests/gpu/test_transformer_engine_gpu.py.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from msa_pretrain.model import te_grouped_product
from msa_pretrain.model.experts import GroupedExperts
from msa_pretrain.model.te_grouped_product import TEGroupedProduct

STAND_IN = Path(__file__).parents[1] / "stand_in"
COUNTS = [(3, 0, 4, 1), (0, 0, 8, 0), (5, 2, 1, 0), (0, 0, 0, 0)]
IDENTICAL = ("parameters", "checkpoint", "groups")


@pytest.fixture
def gemm(monkeypatch):
    """The stand-in's grouped GEMM in place of Transformer Engine's."""
    path = STAND_IN / "transformer_engine" / "pytorch" / "cpp_extensions.py"
    spec = importlib.util.spec_from_file_location("stand_in_gemm", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(te_grouped_product, "_general_grouped_gemm", lambda: module.general_grouped_gemm)
    return module


@pytest.mark.parametrize("activation", ["swiglu", "swiglu_oai"])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_experts_equal_those_of_torch(gemm, rig, tiny_config, counts, activation):
    """Values and every gradient, with unequal, empty and no experts' rows; gradients of the unused are zero."""
    one = rig(tiny_config("moe.num_experts=4", f"model.activation={activation}"))
    experts = one.model.decoder.layers[1].mlp.experts
    assert isinstance(experts, GroupedExperts)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(sum(counts), 24, generator=generator, requires_grad=True)
    probs = torch.rand(sum(counts), generator=generator, requires_grad=True)
    leaves = [tokens, probs, *experts.parameters()]
    results = []
    for product in (experts.grouped_product, TEGroupedProduct):
        experts.grouped_product = product
        output, _ = experts(tokens, torch.tensor(counts), probs)
        results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-6)
    weight_gradient = results[1][-1]
    assert not weight_gradient[[count == 0 for count in counts]].any()
    # forward TN twice; backward of each product NN and NT, the second product first
    assert [call["layout"] for call in gemm.CALLS] == (["TN", "TN", "NN", "NT", "NN", "NT"] if sum(counts) else [])


def test_only_what_needs_a_gradient_is_computed(gemm):
    weights = torch.randn(2, 3, 4)
    product = TEGroupedProduct(torch.tensor([1, 2]), torch.device("cpu"))
    product(torch.randn(3, 4, requires_grad=True), weights).sum().backward()
    assert [call["layout"] for call in gemm.CALLS] == ["TN", "NN"]
    product(torch.randn(3, 4), weights.requires_grad_()).sum().backward()
    assert [call["layout"] for call in gemm.CALLS] == ["TN", "NN", "TN", "NT"]


def test_weights_are_neither_copied_nor_saved_twice(gemm, monkeypatch):
    """What the grouped GEMM writes and reads are slices of the parameter and of one gradient."""
    weights = torch.randn(3, 2, 4, requires_grad=True)
    seen, saved = [], []

    def watched(left, right, out, *rest, **options):
        seen.append((left, right, out))
        return gemm.general_grouped_gemm(left, right, out, *rest, **options)

    monkeypatch.setattr(te_grouped_product, "_general_grouped_gemm", lambda: watched)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        output = TEGroupedProduct(torch.tensor([1, 0, 2]), torch.device("cpu"))(torch.randn(3, 4), weights)
    (gradient,) = torch.autograd.grad(output.sum(), [weights])
    (experts, _, _), (_, _, gradients) = seen
    assert [part.data_ptr() for part in experts] == [weights[expert].data_ptr() for expert in range(3)]
    assert [part.data_ptr() for part in gradients] == [gradient[expert].data_ptr() for expert in range(3)]
    assert [tensor.shape for tensor in saved] == [(3, 4), (3, 2, 4)]


def compare(folder, *overrides, processes=1):
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    script = [str(STAND_IN / "compare_backends.py"), str(folder), *overrides]
    command = [sys.executable, "-W", "ignore", *launcher, *script]
    with (folder / "log").open("w") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=300, check=False)
    assert done.returncode == 0, (folder / "log").read_text()[-5000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(processes)]


def check(seen):
    for what in IDENTICAL:
        assert seen[f"transformer_engine {what}"] == seen[f"torch {what}"], what
    assert {"TERMSNorm", "TEColumnLinear", "TERowLinear"} <= set(seen["types"])
    assert seen["uncalled layers"] == 0
    assert seen["initial weights"] == 0.0
    assert seen["losses"][1] == pytest.approx(seen["losses"][0], rel=1e-6)
    assert seen["gradients"] <= 1e-6 * max(1.0, seen["largest gradient"])
    ours, theirs = seen["losses after loading"]
    assert theirs == pytest.approx(ours, rel=1e-5) and ours < 0.999 * seen["losses"][0]
    # Adam's first steps divide small gradients by themselves
    assert seen["weights after loading"] <= 1e-4


def test_model_and_checkpoints_are_those_of_torch(tmp_path):
    """MTP and a shared expert inside: every norm and linear layer of Megatron's wrappers, in one process."""
    (seen,) = compare(tmp_path, "model.mtp_layers=1", "moe.shared_hidden_size=8")
    check(seen)
    # MTP: three norms, a projection; each of three layers: two norms, QKV, output; one plain MLP, two shared experts
    assert seen["layers"] == 4 + 3 * 4 + 3 * 2 + 1
    assert sorted(set(seen["layouts"])) == ["NN", "NT", "TN"]


@pytest.mark.layouts
@pytest.mark.parametrize("overrides", [["parallel.tensor=2", "parallel.sequence=true"], ["parallel.expert=2"]], ids=str)
def test_two_processes_too(tmp_path, overrides):
    sizes = ["model.num_query_heads=8", "model.num_kv_heads=4", "moe.num_experts=4", "moe.shared_hidden_size=8"]
    batch = ["training.global_batch_size=2"]
    for seen in compare(tmp_path, *overrides, *sizes, *batch, processes=2):
        check(seen)
