"""Documents -> prepare -> verify -> training steps, through the benchmark; the slow tests at its full size."""

import pytest

from msa_pretrain.scripts import bench_data

pytest.importorskip("datasets")
SHORT = [
    "training.total_tokens=8192",
    "training.warmup_tokens=4096",
    "training.eval_every=4",
    "optim.lr_warmup_tokens=2048",
]


def test_a_small_corpus_goes_all_the_way(tmp_path, capsys):
    path = bench_data.write_documents(tmp_path, 2 * 2**20)
    peaks = bench_data.run_end_to_end(path, 2, "bpe", SHORT, held_out=0.05)
    assert list(peaks) == ["prepare", "verify", "train"] and min(peaks.values()) > 10 * 2**20
    assert "step 4/4" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_two_gigabytes_need_less_memory_than_they_are(tmp_path, tokenizer):
    path = bench_data.write_documents(tmp_path, 2 * 2**30)
    peaks = bench_data.run_end_to_end(path, 2, tokenizer)
    assert max(peaks.values()) < 2 * 2**30, peaks


@pytest.mark.slow
def test_preparation_is_nearly_as_fast_as_its_tokenizer(tmp_path):
    path = bench_data.write_documents(tmp_path, 4 * 2**20)
    medians = bench_data.bench_preparation(path, rounds=12, num_workers=2)
    assert min(medians.values()) >= 0.9, medians


@pytest.mark.slow
def test_one_core_loads_for_more_than_twenty_gpus(tmp_path):
    assert bench_data.bench_loading(tmp_path, rounds=5) >= 20 * bench_data.GPU_TOKENS_PER_S
