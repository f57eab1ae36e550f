"""The CPU shims: what they replace is really needed, and they are off where CUDA is."""

import threading

import pytest
import torch

from msa_pretrain.model import megatron_compat
from msa_pretrain.model.megatron_compat import CudaMeansCpu, megatron_on_cpu, warn_untested_versions

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the shims are for machines without CUDA")


@no_cuda
def test_cuda_devices_mean_cpu_only_inside_the_context_and_thread():
    with megatron_on_cpu():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        failures = []

        def elsewhere():
            try:
                torch.zeros(2, device="cuda")
            except (AssertionError, RuntimeError) as err:
                failures.append(err)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert len(failures) == 1
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")


@no_cuda
def test_each_name_that_megatron_asks_for_answers():
    with megatron_on_cpu():
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
        from megatron.core.transformer.moe import token_dispatcher

        assert torch.zeros(1, device=torch.cuda.current_device()).device.type == "cpu"
        torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
        assert torch.cuda.Event().query()
        tensor = torch.arange(3)
        assert tensor.cuda() is tensor
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
        assert torch.zeros(1).type(torch.float64).dtype == torch.float64
        assert torch.equal(torch.cuda.get_rng_state(), torch.get_rng_state())
        assert token_dispatcher.maybe_move_tensor_to_cpu(tensor, as_numpy=True).tolist() == [0, 1, 2]
        with get_cuda_rng_tracker().fork():
            pass


def test_nothing_is_replaced_where_cuda_is_available(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(megatron_compat, "_install_shims", lambda: pytest.fail("the shims were installed"))
    with megatron_on_cpu() as entered:
        assert not isinstance(entered, CudaMeansCpu)


def test_untested_versions_warn_and_tested_ones_do_not(monkeypatch):
    with pytest.warns(UserWarning, match=r"megatron-core 0.19.2 is untested with msa-pretrain; tested: 0.16.1."):
        monkeypatch.setattr(
            megatron_compat.importlib.metadata,
            "version",
            lambda package: {"megatron-core": "0.19.2", "torch": "2.13.0+cpu"}.get(package, "1.3.8"),
        )
        monkeypatch.setattr(
            megatron_compat, "TESTED_VERSIONS", {"megatron-core": ("0.16.1",), "torch": ("2.13", "2.11")}
        )
        assert len(warn_untested_versions()) == 1
