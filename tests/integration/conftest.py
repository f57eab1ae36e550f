"""A one-process Megatron world, tiny configs and packed batches for tests of the model and of training."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module

from msa_pretrain.data.dataset import Sample
from msa_pretrain.data.packing import PackedBatch, collate
from msa_pretrain.model.gpt import build_model
from msa_pretrain.model.parallel import distributed, model_parallel
from msa_pretrain.training.checkpoint import TrainState, save_checkpoint
from msa_pretrain.training.config import TrainConfig, load_config
from msa_pretrain.training.optim import build_optimizer, release, wrap_with_ddp
from msa_pretrain.training.step import StepPlan, StepSums, run_micro_batches

# All dimensions differ, so that a swapped axis shows: h 24, n 6, g 3, d 8, i 4, l 4, k 2, e 5.
TINY = [
    "experiment=cpu_smoke",
    "dry_run=true",
    "run.name=tiny",
    "model.num_layers=2",
    "model.hidden_size=24",
    "model.num_query_heads=6",
    "model.num_kv_heads=3",
    "model.head_dim=8",
    "model.rotary_dim=4",
    "model.vocab_size=40",
    "attention.block_size=4",
    "attention.top_k=2",
    "attention.index_dim=4",
    "moe.num_experts=5",
    "moe.top_k=2",
    "moe.expert_hidden_size=16",
    "moe.dense_hidden_size=32",
    "training.seq_length=20",
    "training.micro_batch_size=1",
    "training.global_batch_size=2",
    "training.total_tokens=400",
    "training.warmup_tokens=200",
    "training.eval_samples=2",
    "training.num_threads=1",
    "optim.lr_warmup_tokens=0",
    "tracking.wandb='off'",
]


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., TrainConfig]:
    def build(*overrides: str, world_size: int | None = None) -> TrainConfig:
        with initialize_config_module("msa_pretrain.configs", version_base="1.3"):
            return load_config(compose("pretrain", [*TINY, *overrides]), world_size=world_size)

    return build


def packed_batch(seed: int, *documents: int, vocab_size: int = 40, masked_every: int = 0) -> PackedBatch:
    """One micro-batch of whole documents of these lengths; each last label is masked, as every n-th one on request."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, vocab_size, (sum(documents) + 1,), generator=generator)
    loss_mask = torch.ones(sum(documents), dtype=torch.bool)
    loss_mask[torch.tensor(documents).cumsum(0) - 1] = False
    if masked_every:
        loss_mask[::masked_every] = False
    ids = tuple(range(100 * seed, 100 * seed + len(documents)))
    return collate([Sample(text[:-1], text[1:], loss_mask, tuple(documents), ids)])


class Rig:
    """A model with its optimizer in a world of one process."""

    def __init__(self, config: TrainConfig) -> None:
        self.config, self.spec = config, config.spec
        self.chunks = wrap_with_ddp(build_model(self.spec, config.training.seq_length))
        self.optimizer = build_optimizer(self.chunks, self.spec, config.optim)
        self.model = self.chunks[0].module

    def backward(self, *batches: PackedBatch, phase, kl_coef: float = 1.0, sample_rows: int = 0) -> StepSums:
        """Gradients of one step, divided by the LM tokens, in `gradients()`."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        plan = StepPlan(phase=phase, kl_coef=kl_coef, sample_rows=sample_rows)
        return run_micro_batches(self.chunks, self.spec, list(batches), plan)

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: parameter.main_grad.clone() for name, parameter in self.model.named_parameters()}

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    def save(self, folder: Path, **counters: int) -> Path:
        """A checkpoint in `folder`."""
        return save_checkpoint(
            folder,
            self.chunks,
            self.optimizer,
            TrainState(**counters),
            phase="",
            data_record={},
            config_yaml="",
            wandb_run_id=None,
            keep_last=1,
        )

    def split(self, tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """(backbone, index branch)."""
        index = {name: value for name, value in tensors.items() if ".indexer." in name}
        return {name: value for name, value in tensors.items() if name not in index}, index


@pytest.fixture
def rig() -> Iterator[Callable[[TrainConfig], Rig]]:
    """Builds a Rig; all of a test's rigs share one world."""
    with ExitStack() as stack:
        stack.enter_context(distributed())
        rigs: list[Rig] = []

        def build(config: TrainConfig) -> Rig:
            if not rigs:
                torch.set_num_threads(1)
                stack.enter_context(model_parallel(config.parallel, config.training.seed))
            rigs.append(Rig(config))
            return rigs[-1]

        yield build
        release(chunk for one in rigs for chunk in one.chunks)


@pytest.fixture
def batch_of():
    return packed_batch
