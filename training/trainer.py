"""The training loop."""

import logging
import time
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from ..data.loader import DataExhaustedError, TrainingStream
from ..data.packing import PackedBatch
from ..kernels import raise_if_not_finite
from ..model.config import Phase
from ..model.flops import step_flops
from ..model.gpt import build_model
from .balance import balance_experts
from .checkpoint import TrainState, find_checkpoint, load_checkpoint, save_checkpoint
from .config import InitOptimizer, TrainConfig, to_dict
from .console import ProgressLine
from .curriculum import Stage
from .datasets import EvaluationSet, build_datasets
from .evaluation import evaluate, evaluation_metrics, indexer_metrics, loss_metrics
from .init_from import find_source, init_weights, keep_optimizer
from .optim import LearningRates, build_optimizer, clip_and_step, wrap_with_ddp
from .phases import phase_at
from .run_folder import RunFolder
from .sinks import JsonlSink, MetricsWriter, WandbSink
from .step import StepPlan, run_micro_batches

logger = logging.getLogger(__name__)

# Dense bf16 matrix rate without sparsity, TFLOP/s, from the vendor's data sheets.
PEAK_TFLOPS = {"H100": 989.5, "H200": 989.5, "B200": 2250.0, "A100": 312.0}


def peak_tflops(gpu: str) -> float | None:
    """Peak of a GPU by the name that torch reports; None for one that is not in the table."""
    return next((peak for model, peak in PEAK_TFLOPS.items() if model in gpu), None)


class Trainer:
    """One run: model, optimizer, data and metrics of this rank, from a checked config.

    Process groups exist already (`model.parallel`); `run` trains to `training.total_tokens` and writes the last
    checkpoint.
    """

    def __init__(self, config: TrainConfig, folder: RunFolder) -> None:
        self.config, self.spec, self.folder = config, config.spec, folder
        torch.set_num_threads(config.training.num_threads)
        if config.training.deterministic:
            torch.use_deterministic_algorithms(True)
            # its default also fills every new tensor, which costs 7% here and only shows reads of unwritten memory
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # no stub
        self.chunks = wrap_with_ddp(build_model(self.spec, max(stage.seq_length for stage in config.stages)))
        checkpoint = self._checkpoint_to_resume()
        source = self._source() if checkpoint is None else None
        if source:
            init_weights(source, self.chunks, self.spec)
        self.optimizer = build_optimizer(self.chunks, self.spec, config.optim)
        if source and config.training.init_optimizer is InitOptimizer.keep:
            keep_optimizer(source, self.chunks, self.optimizer)
        elif source:
            logger.info("optimizer reset: all moments start at zero")
        self.rates = LearningRates(self.optimizer, config.optim, config.training)
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.dp_size = parallel_state.get_data_parallel_world_size()
        self.data = build_datasets(config)
        self.state, self.wandb_run_id = self._resume(checkpoint)
        self.total_steps = config.total_steps
        if config.moe.force_balance:
            logger.warning("moe.force_balance=true: experts are chosen in turn, not by the router. For speed alone.")
        self._step_s: float | None = None  # running mean, for the time left
        self._validated: tuple[tuple[int, Phase, Stage], dict[str, float]] | None = None
        self.metrics: MetricsWriter | None = self._build_metrics() if torch.distributed.get_rank() == 0 else None
        self.console = ProgressLine(self.total_steps, num_gpus=torch.distributed.get_world_size())

    def run(self) -> None:
        """Train from the current state to the end of the token budget.

        Raises DataExhaustedError, with a checkpoint saved, on every rank when the data end before.
        """
        training, state = self.config.training, self.state
        stream = TrainingStream(
            self.data.train,
            consumed_samples=state.consumed_samples,
            global_batch_size=self.config.batch_size_at,
            micro_batch_size=lambda consumed: self.config.stage_at(consumed).micro_batch_size,
            dp_rank=self.dp_rank,
            dp_size=self.dp_size,
            num_workers=self.config.data.num_workers,
        )
        with stream:
            if state.step == 0:
                self._log(self._validate(self._phase(), self._stage()))
            while state.consumed_tokens < training.total_tokens:
                phase, stage = self._phase(), self._stage()
                if phase is not self._phase_before():
                    self._log(self._validate_at_switch(phase, stage))
                elif stage is not self.config.stage_at(max(state.consumed_samples - 1, 0)):
                    self._log(self._validate(phase, stage))  # the same weights on samples of the new length
                try:
                    batches = stream.next_step()
                except DataExhaustedError as err:  # on every rank at the same step
                    raise DataExhaustedError(f"{err} {self.save()} holds the run so far.") from None
                self._train_step(batches, phase)
                last = state.consumed_tokens >= training.total_tokens
                if last or (training.eval_every and state.step % training.eval_every == 0):
                    self._log(self._validate(phase, stage))
                if last:
                    self._log(self._evaluate("test", self.data.test, phase, stage))
                every = self.config.checkpoint.every_steps
                if last or (every and state.step % every == 0):
                    self.save()
        self.console.close()
        if self.metrics:
            self.metrics.close()

    def save(self) -> Path:
        return save_checkpoint(
            self.folder.checkpoints,
            self.chunks,
            self.optimizer,
            self.state,
            phase=self._phase().name,
            data_record=self.data.record(self.config, self.state.consumed_samples),
            config_yaml=self.folder.config_yaml,
            wandb_run_id=self.wandb_run_id,
            keep_last=self.config.checkpoint.keep_last,
        )

    def _train_step(self, batches: list[PackedBatch], phase: Phase) -> None:
        start, config, state = time.perf_counter(), self.config, self.state
        tracking = config.tracking
        step = state.step + 1
        measured = tracking.recall_every and step % tracking.recall_every == 0 and self.spec.msa_layers
        plan = StepPlan(
            phase=phase,
            kl_coef=config.training.kl_coef,
            mtp_coef=config.training.mtp_coef,
            sample_rows=tracking.recall_rows if measured else 0,
        )
        num_samples, seq_length = config.batch_size_at(state.consumed_samples), self._stage().seq_length
        num_tokens = num_samples * seq_length
        rates = self.rates.set(state.consumed_tokens + num_tokens)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        sums = run_micro_batches(self.chunks, self.spec, batches, plan)
        limits = {"backbone": config.optim.clip_norm, "indexer": config.optim.indexer_clip_norm}
        outcome = clip_and_step(self.optimizer, limits)
        raise_if_not_finite()  # the index scores of this step, where the norms have waited for the GPU anyway
        load = balance_experts(
            self.chunks,
            self.spec,
            applied=outcome.applied,
            valid_rows=sums.valid_rows,
            num_layers_logged=tracking.moe_layers,
        )
        state.step = step
        state.tokens_before_step = state.consumed_tokens
        state.consumed_tokens += num_tokens
        state.consumed_samples += num_samples
        if not outcome.applied:
            state.skipped_steps += 1
            logger.warning("step %d skipped: gradient norms %s are not finite", step, outcome.norms)
        if step % tracking.log_every and not measured:
            return
        values: dict[str, Any] = {
            **loss_metrics(
                sums,
                self.spec,
                kl_coef=config.training.kl_coef,
                mtp_coef=config.training.mtp_coef,
                balance=load.get("moe/weighted_losses", 0.0),
            ),
            "train/phase": phase.name,
            "train/seq_length": seq_length,
            "optim/lr": rates["backbone"],
            "optim/grad_norm": outcome.norms["backbone"],
            "optim/skipped_steps": state.skipped_steps,
            **load,
            **self._speed(time.perf_counter() - start, num_tokens, batches, phase),
        }
        if self.spec.msa_layers:
            values |= {
                "optim/indexer_lr": rates["indexer"],
                "optim/indexer_grad_norm": outcome.norms["indexer"],
                **indexer_metrics(sums, self.spec),
            }
        if load.get("moe/aux_loss", 1.0) < 0.9:
            logger.warning(
                "step %d: moe/aux_loss is %.3f; 1 is balance: scores lean away from the loads they make.",
                step,
                load["moe/aux_loss"],
            )
        self._log(values)

    def _speed(self, seconds: float, num_tokens: int, batches: list[PackedBatch], phase: Phase) -> dict[str, float]:
        world = torch.distributed.get_world_size()
        lengths = [row[1] for batch in batches for row in batch.segments.rows]
        # this rank's documents stand for those of every data-parallel rank; pipeline stages share them
        tflops = step_flops(self.spec, lengths, phase) * self.dp_size / world / seconds / 1e12
        self._step_s = seconds if self._step_s is None else 0.9 * self._step_s + 0.1 * seconds
        steps_left = self.total_steps - self.state.step
        values = {
            "perf/step_s": seconds,
            "perf/tokens_per_s_per_gpu": num_tokens / seconds / world,
            "perf/tflops_per_gpu": tflops,
            "perf/time_left_s": steps_left * self._step_s,
        }
        if torch.cuda.is_available():
            values["memory/peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
            peak = peak_tflops(torch.cuda.get_device_name())
            values |= {"perf/mfu": tflops / peak} if peak else {}
        return values

    def _validate(self, phase: Phase, stage: Stage) -> dict[str, float]:
        """Once for the same weights, phase and length of samples."""
        key = (self.state.step, phase, stage)
        if self._validated is None or self._validated[0] != key:
            self._validated = (key, self._evaluate("valid", self.data.valid, phase, stage))
        return self._validated[1]

    def _evaluate(self, name: str, sets: list[EvaluationSet], phase: Phase, stage: Stage) -> dict[str, float]:
        number = self.config.stages.index(stage)
        sums = {
            one.label: evaluate(
                self.chunks,
                self.spec,
                dataset,
                phase=phase,
                num_samples=stage.eval_samples,
                sample_rows=self.config.tracking.recall_rows,
                micro_batch_size=stage.micro_batch_size,
                dp_rank=self.dp_rank,
                dp_size=self.dp_size,
            )
            for one in sets
            if (dataset := one.datasets[number]) is not None
        }
        return evaluation_metrics(name, sums, {one.label: one.share for one in sets}, self.spec) if sums else {}

    def _validate_at_switch(self, phase: Phase, stage: Stage) -> dict[str, float]:
        """The same weights in the phase that ends and in the one that begins."""
        before = self._phase_before()
        ending, beginning = self._validate(before, stage), self._validate(phase, stage)
        if not ending:
            return {}
        loss = "eval/valid/lm_loss"
        return {**ending, f"{loss}_{before.name}": ending[loss], f"{loss}_{phase.name}": beginning[loss]}

    def _stage(self) -> Stage:
        return self.config.stage_at(self.state.consumed_samples)

    def _phase(self) -> Phase:
        return self._phase_of(self.state.consumed_tokens)

    def _phase_before(self) -> Phase:
        """Phase of the step before; at the start, that of the first step."""
        return self._phase_of(self.state.tokens_before_step)

    def _phase_of(self, consumed_tokens: int) -> Phase:
        return phase_at(
            consumed_tokens, kind=self.config.attention.kind, warmup_tokens=self.config.training.warmup_tokens
        )

    def _log(self, values: dict[str, Any]) -> None:
        if self.metrics is None or not values:
            return
        state = self.state
        values = {**values, "train/tokens": state.consumed_tokens, "train/samples": state.consumed_samples}
        self.metrics.log(state.step, state.consumed_tokens, values)
        self.console.update(state.step, values)

    def _checkpoint_to_resume(self) -> Path | None:
        resume = self.config.training.resume
        if resume == "auto":
            return find_checkpoint(self.folder.checkpoints)
        return None if resume == "none" else Path(resume)

    def _source(self) -> Path | None:
        """The other run's checkpoint that a new run starts from."""
        training = self.config.training
        return find_source(Path(training.init_from), training.init_optimizer) if training.init_from else None

    def _resume(self, path: Path | None) -> tuple[TrainState, str | None]:
        if path is None:
            return TrainState(), None
        loaded = load_checkpoint(
            path,
            self.chunks,
            self.optimizer,
            check_data=lambda stored, consumed: self.data.check(stored, self.config, consumed),
        )
        logger.info("continuing from %s: step %d", path, loaded.state.step)
        return loaded.state, loaded.wandb_run_id

    def _build_metrics(self) -> MetricsWriter:
        config = self.config
        resumed = self.state.step or None
        wandb = WandbSink(
            config.tracking.wandb.name,
            config.tracking.project,
            config.run.name,
            self.folder.path.resolve(),
            to_dict(config),
            self.wandb_run_id,
        )
        self.wandb_run_id = wandb.run_id
        return MetricsWriter([JsonlSink(self.folder.metrics, resumed), wandb])
