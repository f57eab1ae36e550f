"""The planner's activations against the storages that a real forward pass leaves to autograd, to the byte.

Attention goes through the ops of `attention.backend=triton`, whose autograd rules decide what is kept; their kernels
are not launched (Triton's interpreter has no bf16, the library's are the GPU's): outputs are whatever the memory held.
"""

import pytest
import torch

from msa_pretrain.kernels import select_blocks
from msa_pretrain.kernels.block_sparse_attention import launch as sparse_launch
from msa_pretrain.kernels.dense_causal_attention import library
from msa_pretrain.kernels.indexer_loss import dense_kernel, dense_launch
from msa_pretrain.kernels.indexer_loss import sparse_launch as kl_launch
from msa_pretrain.model import attention
from msa_pretrain.model.config import Phase, Recompute
from msa_pretrain.training.planner.activations import Activations
from msa_pretrain.training.planner.stages import Layout, held_by_chunk

TRITON_SIZES = ["attention.backend=triton", "model.head_dim=16", "attention.block_size=16", "attention.index_dim=32"]
DOCUMENTS = (40, 33, 47)  # longer than k * l: shorter ones take the dense route, which saves what the warm-up does


class NoLaunch:
    def __getitem__(self, grid):
        return lambda *arguments, **options: None


class NoLibrary:
    """FlashAttention's forward, without its values."""

    @staticmethod
    def _flash_attention_forward(query, *_, **__):
        return torch.zeros_like(query), torch.zeros(query.shape[1], query.shape[0])


@pytest.fixture(autouse=True)
def no_launches(monkeypatch):
    for module in (sparse_launch, dense_kernel, kl_launch):
        for name in vars(module):
            if name.startswith("_") and name.endswith("_kernel"):
                monkeypatch.setattr(module, name, NoLaunch())
    for module in (sparse_launch, kl_launch, dense_launch):
        monkeypatch.setattr(module, "check_triton", lambda *_: None)
    monkeypatch.setattr(library, "_aten", NoLibrary)

    def dense_attention(query, key, value, segments, *, backend):
        return library.dense_attention_library(query, key, value, segments, softmax_scale=1.0)

    def select(index_query, index_key, segments, *, backend, **sizes):  # ids that later ops accept
        zeros = torch.zeros_like(index_query), torch.zeros_like(index_key)
        return tuple(tensor.clone() for tensor in select_blocks(*zeros, segments, **sizes))

    monkeypatch.setattr(attention, "dense_attention", dense_attention)
    monkeypatch.setattr(attention, "select_blocks", select)


class Recorder:
    """Storages saved for backward while it is on, by their owner, weights and tables of the batch left out."""

    def __init__(self, model):
        self.weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self.owners, self.tensors, self.stack = {}, [], ["model"]
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: self.stack.append(name))
            module.register_forward_hook(self.leave)

    def leave(self, *_):
        self.stack.pop()

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.weights and storage.data_ptr() not in self.owners:
            self.owners[storage.data_ptr()] = (self.stack[-1], storage.nbytes())
            self.tensors.append(tensor.detach())  # alive, or its address would be used again
        return tensor.detach()  # with its graph, the graph would keep itself, the model and its process groups alive

    def total(self, segments):
        parts = [segments, *(part for parts in segments._parts.values() for part in parts)]
        tables = {table.untyped_storage().data_ptr() for part in parts for table in part._cache.values()}
        return sum(size for address, (_, size) in self.owners.items() if address not in tables)


class Stop(Exception):
    """Raised where the backward pass would start."""


@pytest.fixture
def saved_by(rig, tiny_config, batch_of, monkeypatch):
    """(bytes saved by one micro-batch, spec) under a phase and overrides."""

    def stop(*_, **__):
        raise Stop

    monkeypatch.setattr(torch.autograd, "backward", stop)
    monkeypatch.setattr("megatron.core.pipeline_parallel.schedules.backward_step", stop)

    def run(phase, *overrides):
        model = rig(tiny_config(*overrides))
        recorder, batch = Recorder(model.model), batch_of(3, *DOCUMENTS)
        with torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda tensor: tensor), pytest.raises(Stop):
            model.backward(batch, phase=phase)
        return recorder.total(batch.segments), model.spec

    return run


def planned(spec, phase):
    """Bytes of the same micro-batch by arithmetic, norms as the CPU does them."""
    activations = Activations(spec, Layout(spec.parallel, 1), sum(DOCUMENTS), phase, fused_norms=False)
    held = held_by_chunk(spec)[0][0]
    batch = activations.micro_batch()
    # operations keep tokens and loss mask, and the tables unless all of them are run again
    kept = 12 * sum(DOCUMENTS) + batch["rotary tables"] * (spec.recompute is not Recompute.full)
    return activations.chunk(held) - sum(batch.values()) + kept


MSA = {
    "defaults": [],
    "bf16": ["training.precision=bf16"],
    "full-vector norms": ["training.precision=bf16", "model.qk_norm=full_vector"],
    "one group": ["training.precision=bf16", "model.num_kv_heads=1"],
    "one group, full-vector norms": ["model.num_kv_heads=1", "model.qk_norm=full_vector"],
    "no norms": ["training.precision=bf16", "model.qk_norm=none", "attention.index_norm=false"],
    "zero-centred norms": ["training.precision=bf16", "model.zero_centered_norms=true"],
    "zero-centred norms in fp32": ["model.zero_centered_norms=true"],
    "no index rotation": ["attention.index_rope=false", "training.precision=bf16"],
    "shared expert": ["training.precision=bf16", "moe.shared_hidden_size=10"],
    "shared expert in fp32": ["moe.shared_hidden_size=10"],
    "one layer without index": ["attention.full_layers=[1]"],
    "all-gather dispatcher": ["parallel.dispatcher=allgather", "training.precision=bf16"],
    "selective": ["training.recompute=selective", "training.precision=bf16", "moe.shared_hidden_size=10"],
    "full": ["training.recompute=full", "training.precision=bf16"],
    "MTP": ["model.mtp_layers=2", "training.precision=bf16"],
    "MTP in fp32": ["model.mtp_layers=1"],
    "MTP, selective": ["model.mtp_layers=1", "training.recompute=selective", "training.precision=bf16"],
    "MTP, full": ["model.mtp_layers=2", "training.recompute=full", "training.precision=bf16"],
}


@pytest.mark.parametrize("phase", [Phase.warmup, Phase.sparse], ids=lambda phase: phase.name)
@pytest.mark.parametrize("overrides", MSA.values(), ids=MSA)
def test_bytes_of_the_msa_model(saved_by, phase, overrides):
    saved, spec = saved_by(phase, *TRITON_SIZES, *overrides)
    assert saved == planned(spec, phase)


@pytest.mark.parametrize("overrides", [[], ["training.precision=bf16"], ["model.rotary_dim=0"]], ids=str)
def test_bytes_of_the_dense_model(saved_by, overrides):
    saved, spec = saved_by(Phase.dense, "attention=dense", "training.warmup_tokens=0", *TRITON_SIZES, *overrides)
    assert saved == planned(spec, Phase.dense)
