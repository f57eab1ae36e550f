"""Both layer backends in one job: `compare_backends.py DIR KEYS...`. Without a GPU, with the stand-in beside this file.

Writes DIR/rank<r>.json: what parameters and checkpoints look like, losses, and the largest differences of gradients and
weights after steps, with a checkpoint of each loaded by the other.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).parent
MARKS = ("allreduce", "sequence_parallel", "tensor_model_parallel", "partition_dim", "partition_stride")
MARKS += ("is_indexer", "is_fp32_param")
LIMITS = {"backbone": 1.0, "indexer": 1.0}


def main() -> None:
    import torch

    stand_in = not torch.cuda.is_available()
    sys.path[:0] = [str(HERE.parent / "integration"), *([str(HERE)] if stand_in else [])]
    import torch.distributed as dist
    from conftest import TINY, Rig, packed_batch
    from hydra import compose, initialize_config_module
    from transformer_engine.pytorch import Linear, RMSNorm

    from msa_pretrain.model.config import LayerBackend, Phase
    from msa_pretrain.model.parallel import distributed, model_parallel
    from msa_pretrain.training.checkpoint import TrainState, load_checkpoint, model_state, save_checkpoint
    from msa_pretrain.training.config import load_config
    from msa_pretrain.training.optim import clip_and_step

    folder = Path(sys.argv[1])

    class BackendRig(Rig):
        def __init__(self, config, backend: LayerBackend) -> None:
            self.backend = backend
            super().__init__(config)

        @property
        def spec(self):
            return replace(self._spec, model=replace(self._spec.model, backend=self.backend))

        @spec.setter
        def spec(self, spec) -> None:
            self._spec = spec

        def step(self, *batches) -> tuple[float, dict]:
            sums = self.backward(*batches, phase=Phase.warmup)
            gradients = self.gradients()
            assert clip_and_step(self.optimizer, LIMITS).applied
            return float(sums.lm_loss), gradients

        def save(self, name: str) -> Path:
            texts = dict(phase="warmup", data_record={}, config_yaml="", wandb_run_id=None)
            state = TrainState(step=1, consumed_tokens=1, consumed_samples=1)
            return save_checkpoint(folder / name, self.chunks, self.optimizer, state, keep_last=1, **texts)

    def differences(left: dict, right: dict) -> float:
        return float(torch.stack([(value - right[name]).abs().max() for name, value in left.items()]).max())

    with distributed(), initialize_config_module("msa_pretrain.configs", version_base="1.3"):
        config = load_config(compose("pretrain", [*TINY, *sys.argv[2:]]), world_size=dist.get_world_size())
        torch.set_num_threads(1)
        batches = packed_batch(0, 20), packed_batch(1, 13, 7)
        with model_parallel(config.parallel, config.training.seed):
            rigs = {backend.name: BackendRig(config, backend) for backend in LayerBackend}
            ours, theirs = rigs["torch"], rigs["transformer_engine"]
            seen: dict = {"types": sorted({type(module).__name__ for module in theirs.model.modules()})}
            for name, rig in rigs.items():
                seen[f"{name} parameters"] = {
                    key: [list(value.shape), str(value.dtype), *(getattr(value, mark, None) for mark in MARKS)]
                    for key, value in rig.model.named_parameters()
                }
                seen[f"{name} checkpoint"] = {
                    str(value.key): [list(value.global_shape), list(value.global_offset), list(value.replica_id)]
                    for value in flat(model_state(rig.chunks))
                }
                seen[f"{name} groups"] = [
                    sorted((key, str(value)) for key, value in group.items() if key not in ("params", "step"))
                    for group in rig.optimizer.param_groups
                ]
            seen["initial weights"] = differences(ours.weights(), theirs.weights())
            (mine, my_gradients), (its, its_gradients) = ours.step(*batches), theirs.step(*batches)
            seen["losses"] = [mine, its]
            seen["gradients"] = differences(my_gradients, its_gradients)
            seen["largest gradient"] = max(float(value.abs().max()) for value in my_gradients.values())
            layers = [module for module in theirs.model.modules() if isinstance(module, Linear | RMSNorm)]
            seen["layers"] = len(layers)
            if stand_in:
                from transformer_engine.pytorch.cpp_extensions import CALLS

                seen["uncalled layers"] = sum(layer.calls == 0 for layer in layers)
                seen["layouts"] = [call["layout"] for call in CALLS]
            # each reads the other's checkpoint, and both then take the same step
            saved = {name: rig.save(name) for name, rig in rigs.items()}
            for rig, path in ((theirs, saved["torch"]), (ours, saved["transformer_engine"])):
                with torch.no_grad():
                    for parameter in rig.model.parameters():
                        parameter.fill_(7.0)
                load_checkpoint(path, rig.chunks, rig.optimizer, check_data=lambda *_: None)
            seen["losses after loading"] = [rig.step(*batches)[0] for rig in (ours, theirs)]
            seen["weights after loading"] = differences(ours.weights(), theirs.weights())
            (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(seen))
            dist.barrier()


def flat(state) -> list:
    """Sharded tensors of a nested state; factories (of gate and up) by what they make."""
    if isinstance(state, dict):
        return [leaf for value in state.values() for leaf in flat(value)]
    if isinstance(state, list):
        return [leaf for value in state for leaf in flat(value)]
    if hasattr(state, "build"):
        return flat(state.build())
    return [state]


if __name__ == "__main__":
    main()
