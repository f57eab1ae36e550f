"""Runs the trainer in many layouts, one after another, in one job: `torchrun --nproc_per_node=2 walker.py DIR PLAN`.

PLAN is a JSON list of runs; each names its folder, its layout overrides and what happens to it (`Run` below). Process
groups are destroyed and made anew between runs. Every rank writes what it saw of a run to DIR/<name>.rank<r>.json.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

# Everything else is imported in main(): saving starts processes that import this file again.

TINY = [
    "experiment=cpu_smoke",
    "model.num_layers=4",
    "model.hidden_size=24",
    "model.num_query_heads=12",
    "model.num_kv_heads=4",
    "model.head_dim=8",
    "model.rotary_dim=4",
    "model.vocab_size=40",
    "attention.block_size=4",
    "attention.top_k=2",
    "attention.index_dim=4",
    "moe.num_experts=4",
    "moe.top_k=2",
    "moe.expert_hidden_size=16",
    "moe.dense_hidden_size=32",
    "moe.aux_loss_coef=0.01",
    "moe.z_loss_coef=0.001",
    "training.seq_length=20",
    "training.micro_batch_size=1",
    "training.global_batch_size=4",
    "training.eval_every=0",
    "training.eval_samples=0",
    "training.num_threads=1",
    "optim.lr_warmup_tokens=160",
    "checkpoint.keep_last=9",
    "tracking.wandb='off'",
    "tracking.recall_every=5",
]


@dataclass
class Run:
    """One training run of a plan."""

    name: str
    overrides: list[str] = field(default_factory=list)
    folder: str = ""
    """Run folder; runs of the same folder continue each other. Empty: `name`."""
    steps: int = 10
    """Length of the run in its config."""
    warmup_steps: int = 5
    stop_before: int = 0
    """Kill this job with SIGKILL, or leave the run, when this step is about to begin. 0: run to the end."""
    kill: bool = False
    save_at: list[int] = field(default_factory=list)
    """Steps after which to save; also at once, if the run starts at one of them."""
    load: str = ""
    """A checkpoint folder to load before training."""
    nan_at: int = 0
    """Step at which the last rank's first micro-batch gets a NaN loss. 0: none."""
    padded: bool = False
    """Turn the last document part of each micro-batch into padding."""
    documents: list[list[int]] = field(default_factory=list)
    """Train every step on these micro-batches of document lengths instead of the data; below 0: padding."""
    favour_first_half: bool = False
    """Set every router's bias so that only the first half of the experts gets tokens."""
    batched_p2p: bool = False
    """Take away the remedy of Megatron's pipeline messages with two stages."""


def main() -> None:
    directory, plan = Path(sys.argv[1]), [Run(**run) for run in json.loads(Path(sys.argv[2]).read_text())]
    import torch.distributed as dist

    from msa_pretrain.model.parallel import distributed, model_parallel

    with distributed():
        for run in plan:
            config = config_of(directory, run)
            with own_groups(), model_parallel(config.parallel, config.training.seed):
                seen = execute(config, run, directory)
                path = directory / f"{run.name}.rank{dist.get_rank()}.json"
                path.write_text(json.dumps(seen))
                dist.barrier()


@contextlib.contextmanager
def own_groups():
    """Destroys the process groups that were made inside; Megatron only forgets them, with 48 threads a layout."""
    import torch.distributed as dist

    groups = dist.distributed_c10d._world.pg_map
    before = set(groups)
    yield
    for group in [group for group in groups if group not in before]:
        dist.destroy_process_group(group)


def config_of(directory: Path, run: Run):
    import torch.distributed as dist
    from hydra import compose, initialize_config_module

    from msa_pretrain.training.config import load_config

    data = f"[{directory / 'data'}]"
    overrides = [
        *TINY,
        f"run.name={run.folder or run.name}",
        f"run.dir={directory / 'runs'}",
        f"data.train={data}",
        f"data.valid={data}",
        f"data.cache_dir={directory / 'cache'}",
        f"training.total_tokens={80 * run.steps}",
        f"training.warmup_tokens={80 * run.warmup_steps}",
        *([f"training.resume={run.load}"] if run.load else []),
        *run.overrides,
    ]
    with initialize_config_module("msa_pretrain.configs", version_base="1.3"):
        return load_config(compose("pretrain", overrides), world_size=dist.get_world_size())


def execute(config, run: Run, directory: Path) -> dict:
    """Train and report: the series of this rank's sums, and digests of everything that makes the state."""
    import torch
    import torch.distributed as dist

    from msa_pretrain.model import gpt
    from msa_pretrain.training import trainer as trainer_module
    from msa_pretrain.training.optim import release
    from msa_pretrain.training.run_folder import RunFolder

    folder = RunFolder(config)
    folder.prepare(config, [])
    series, weights, decisions = [], {}, Decisions()
    if run.batched_p2p:
        translate = gpt.transformer_config

        def batched(spec):
            return dataclasses.replace(translate(spec), overlap_p2p_comm=False, batch_p2p_comm=True)

        gpt.transformer_config = batched

    class Walked(trainer_module.Trainer):
        def _train_step(self, batches, phase):
            if self.state.step + 1 == run.stop_before:
                if run.kill:
                    dist.barrier()
                    os.kill(os.getpid(), signal.SIGKILL)
                raise Left
            if run.padded:
                batches = [padded(batch) for batch in batches]
            if run.documents:
                batches = written(run.documents)
            decisions.begin(self.state.step + 1, batches)
            if self.state.step + 1 == run.nan_at and dist.get_rank() == dist.get_world_size() - 1:
                batches[0].loss_mask[0, 0] = float("nan")
            super()._train_step(batches, phase)
            weights[self.state.step] = digest(
                torch.cat([parameter.detach().flatten() for chunk in self.chunks for parameter in chunk.parameters()])
            )
            if self.state.step in run.save_at:
                self.save()

        def _log(self, values):
            if "train/lm_loss" in values:
                series.append({"step": self.state.step, **{key: values[key] for key in SERIES if key in values}})
            super()._log(values)

    # the values of the series are known to every rank, but only rank 0 keeps them
    torch.manual_seed(config.training.seed)
    walked = Walked(config, folder)
    if run.batched_p2p:
        gpt.transformer_config = translate
    if run.favour_first_half:
        for _, router in gpt.routers(walked.chunks):
            router.expert_bias[: len(router.expert_bias) // 2] = 9.0
    with decisions.recorded(walked.chunks):
        if walked.state.step in run.save_at:
            walked.save()
        with contextlib.suppress(Left):
            walked.run()
    seen = {
        "run": asdict(run),
        "series": series,
        "weights": weights,
        "digests": digests(walked),
        "steps": adam_steps(walked),
        "decisions": decisions.taken,
        "metrics": [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()],
        "checkpoints": sorted(path.name for path in folder.checkpoints.glob("step_*")),
    }
    release(walked.chunks)
    return seen


SERIES = (
    "train/lm_loss",
    "train/mtp_loss",
    "train/loss",
    "indexer/kl",
    "optim/grad_norm",
    "optim/indexer_grad_norm",
    "optim/lr",
    "optim/indexer_lr",
    "moe/max_over_mean_load",
    "moe/dead_experts",
    "moe/bias_range",
    "moe/aux_loss",
    "moe/z_loss",
    "indexer/score_recall",
    "train/phase",
)


def padded(batch):
    """`batch` with the last of its segments, if it has several, outside of any document."""
    from msa_pretrain.kernels import Segments

    rows, size = batch.segments.rows, batch.tokens.numel()
    segments = Segments(rows=rows[: max(1, len(rows) - 1)], num_queries=size, num_keys=size)
    loss_mask = batch.loss_mask * segments.query_mask("cpu")
    return dataclasses.replace(
        batch,
        segments=segments,
        loss_mask=loss_mask,
        num_target_tokens=int(loss_mask.sum()),
        num_valid_rows=segments.num_valid_rows,
    )


def written(documents: list[list[int]]) -> list:
    """Micro-batches of `documents`' lengths: the text of one, and its number, follow from how many came before it."""
    import torch

    from msa_pretrain.data.packing import PADDING, PackedBatch
    from msa_pretrain.kernels import Segments

    batches, number = [], 0
    for lengths in documents:
        size = sum(map(abs, lengths))
        tokens, labels = torch.zeros(2, 1, size, dtype=torch.long)
        loss_mask, ids, rows, start = torch.zeros(1, size), torch.full((size,), PADDING), [], 0
        for length in lengths:
            if length > 0:
                text = torch.randint(39, (length,), generator=torch.Generator().manual_seed(number))
                tokens[0, start : start + length] = text
                labels[0, start : start + length - 1] = text[1:]
                loss_mask[0, start : start + length - 1] = 1
                ids[start : start + length] = number
                rows.append((start, length, start, length))
                number += 1
            start += abs(length)
        segments = Segments(rows=tuple(rows), num_queries=size, num_keys=size)
        batches.append(
            PackedBatch(
                tokens=tokens,
                labels=labels,
                loss_mask=loss_mask,
                segments=segments,
                positions=segments.positions("cpu")[None],
                document_ids=ids,
                num_target_tokens=int(loss_mask.sum()),
                num_valid_rows=segments.num_valid_rows,
            )
        )
    return batches


class Left(Exception):
    """The run stops here without saving, as after a kill."""


class Decisions:
    """Every discrete choice of a run, by step, layer (and KV group), document and position: experts and blocks, with
    their margins. A tensor-parallel rank reports its own tokens' experts and its own groups' blocks.

    The margin is the gap between the last that was chosen and the first that was not: a choice may differ between
    layouts only where it is of the order of rounding.
    """

    def __init__(self) -> None:
        self.taken: dict[str, list] = {}
        self.step = 0
        self.batches: list = []
        self.cursor: dict[str, int] = {}

    def begin(self, step: int, batches: list) -> None:
        from megatron.core import parallel_state

        rank, size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
        self.step, self.batches, self.cursor = step, [batch.share(rank, size) for batch in batches], {}

    def _names(self, where: str) -> list[str]:
        """Row names of the micro-batch that `where` sees now; each module sees the micro-batches in order."""
        number = self.cursor.get(where, 0)
        self.cursor[where] = number + 1
        batch = self.batches[number % len(self.batches)]
        rows = zip(batch.document_ids.tolist(), batch.positions[0].tolist(), strict=True)
        return [f"{self.step}/{where}/{document}/{position}" for document, position in rows]

    def recorded(self, chunks):
        """Context in which routers and index branches of `chunks` report what they choose."""
        import torch
        from megatron.core import parallel_state

        from msa_pretrain.kernels import block_scores
        from msa_pretrain.model.attention import MSAAttention
        from msa_pretrain.model.router import SigmoidRouter

        tp_rank = parallel_state.get_tensor_model_parallel_rank()

        def router_hook(module, inputs, output):
            if module.training and torch.is_grad_enabled():
                where = f"router{module.layer_number - 1}"
                scores = torch.nn.functional.linear(inputs[0].flatten(0, 1).float(), module.weight).sigmoid()
                ranked = (scores + module.expert_bias).sort(dim=-1, descending=True).values
                k = module.moe.top_k
                margins = (ranked[:, k - 1] - ranked[:, k]).tolist()
                names, share = self._names(where), len(margins)
                if share < len(names):  # sequence parallelism
                    names = names[tp_rank * share : (tp_rank + 1) * share]
                for name, row, margin in zip(names, output[1], margins, strict=True):
                    self.taken[name] = [row.nonzero().flatten().tolist(), margin]

        def attention_hook(module, inputs, output):
            *_, index_query, index_key, context = inputs
            if module.training and torch.is_grad_enabled() and context.phase.name == "sparse":
                attention, where = module.spec.attention, f"attention{module.layer}"
                names = self._names(where)
                if not context.segments.rows:  # a context-parallel rank may have nothing but padding
                    return
                options = dict(block_size=attention.block_size)
                scores = block_scores(index_query, index_key, context.segments, **options)  # [t, g, m]
                local = context.segments.positions("cpu") // attention.block_size
                others = scores.scatter(2, local[:, None, None].expand(-1, scores.shape[1], 1), -torch.inf)
                others = torch.nn.functional.pad(others, (0, attention.top_k), value=-torch.inf)  # short batches
                ranked = others.sort(dim=-1, descending=True, stable=True)
                k = attention.top_k - 1
                margins = (ranked.values[..., k - 1] - ranked.values[..., k]).nan_to_num(nan=9.0, posinf=9.0)
                chosen, margins = ranked.indices[..., :k].tolist(), margins.tolist()
                groups = len(chosen[0])
                for name, row, margin in zip(names, chosen, margins, strict=True):
                    for group in range(groups):
                        self.taken[f"{name}/{tp_rank * groups + group}"] = [row[group], margin[group]]

        @contextlib.contextmanager
        def context():
            handles = []
            attended = MSAAttention._attend

            def attend(module, *args):
                output = attended(module, *args)
                attention_hook(module, args, output)
                return output

            MSAAttention._attend = attend
            for chunk in chunks:
                for module in chunk.modules():
                    if isinstance(module, SigmoidRouter):
                        handles.append(module.register_forward_hook(router_hook))
            try:
                yield
            finally:
                MSAAttention._attend = attended
                for handle in handles:
                    handle.remove()

        return context()


def digests(trainer) -> dict[str, str]:
    """SHA-256 of each tensor of this rank's state, bit for bit."""
    import torch

    from msa_pretrain.model.gpt import routers

    found = {}
    for order, chunk in enumerate(trainer.chunks):
        for name, tensor in chunk.module.state_dict().items():
            if isinstance(tensor, torch.Tensor):
                found[f"model{order}.{name}"] = digest(tensor)
    for layer, router in routers(trainer.chunks):
        found[f"counts.{layer}"] = digest(router.tokens_per_expert)
    for part_number, part in enumerate(trainer.optimizer.chained_optimizers):
        if part.is_stub_optimizer:
            continue
        for group_number, group in enumerate(part.optimizer.param_groups):
            for number, parameter in enumerate(group["params"]):
                where = f"optimizer{part_number}.{group_number}.{number}"
                found[f"{where}.main"] = digest(parameter)
                for key, value in part.optimizer.state[parameter].items():
                    found[f"{where}.{key}"] = digest(value)
            found[f"optimizer{part_number}.{group_number}.lr"] = repr(group["lr"])
    found["rng"] = digest(torch.get_rng_state())
    found["counters"] = repr(asdict(trainer.state))
    return found


def digest(tensor) -> str:
    import torch

    return hashlib.sha256(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def adam_steps(trainer) -> list[float]:
    return sorted(
        {
            state["step"].item()
            for part in trainer.optimizer.chained_optimizers
            if not part.is_stub_optimizer
            for state in part.optimizer.state.values()
        }
    )


if __name__ == "__main__":
    main()
