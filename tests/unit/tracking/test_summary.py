"""The summary's numbers, from handmade records whose answers can be checked by hand."""

import json
import math

import pytest

from msa_pretrain.training.console import format_summary
from msa_pretrain.training.summary import History, PhaseChange, summarize, summarize_run


def record(step, **metrics):
    """tokens = 1000 a step, one step in 2 s; `__` stands for the slash."""
    values = {name.replace("__", "/"): value for name, value in metrics.items()}
    return {"step": step, "consumed_tokens": 1000 * step, "time": 50.0 + 2 * step, **values}


def phased_records():
    """Steps 1..40, warm-up up to 30; loss 41 - step; KL sampled everywhere, its uniform value every 10 steps."""
    records = []
    for step in range(1, 41):
        phase = "warmup" if step <= 30 else "sparse"
        values = {"train__phase": phase, "train__lm_loss": float(41 - step), "indexer__kl": 1.0 / step}
        values["perf__tokens_per_s_per_gpu"] = 100.0 + step
        if step % 10 == 0:
            values["indexer__kl_uniform"] = 2.0 + step / 100
        records.append(record(step, **values))
    return records


def test_numbers_of_a_run_with_both_phases():
    records = phased_records()
    records[0] |= {"eval/valid/lm_loss": 9.0, "eval/other/lm_loss": 8.0}
    records[29] |= {"eval/valid/lm_loss_dense": 4.0, "eval/valid/lm_loss_sparse": 4.2, "eval/valid/lm_loss": 4.0}
    records[39] |= {"eval/valid/lm_loss": 3.0}
    records[34] |= {"indexer/score_recall": 0.8, "indexer/captured_mass": 0.6}
    records[19] |= {"indexer/score_recall": 0.7, "indexer/block_recall": 0.9}
    s = summarize(History(records))
    assert (s.steps, s.tokens, s.wall_time_s, s.phase) == (40, 40_000, 78.0, "sparse")
    assert s.tokens_per_s_per_gpu == 120.5  # median of 101..140
    assert s.switch == PhaseChange(tokens=31_000, step=31, before="warmup", after="sparse")
    assert (s.train_window, s.train_loss_first, s.train_loss_last) == (2, 39.5, 1.5)
    assert (s.eval_set, s.eval_loss_first, s.eval_loss_last) == ("valid", 9.0, 3.0)
    assert (s.kl_first, s.kl_switch, s.kl_last) == (1.0, 1 / 30, 1 / 40)
    # nearest sampled step of the same phase: 10, 30 and 40
    assert (s.kl_uniform_first, s.kl_uniform_switch, s.kl_uniform_last) == (2.1, 2.3, 2.4)
    assert (s.switch_eval_step, s.switch_dense_loss, s.switch_sparse_loss) == (30, 4.0, 4.2)
    assert s.switch_relative_difference == pytest.approx(0.05)
    r = s.recall
    assert (r.source, r.score_recall, r.captured_mass, r.block_recall) == ("training, step 35", 0.8, 0.6, None)


def test_uniform_is_never_taken_from_the_other_phase():
    records = [
        record(1, train__phase="warmup", indexer__kl=1.0),
        record(2, train__phase="sparse", indexer__kl=0.5, indexer__kl_uniform=3.0),
    ]
    s = summarize(History(records))
    assert (s.kl_uniform_first, s.kl_uniform_switch, s.kl_uniform_last) == (None, None, 3.0)


@pytest.mark.parametrize(
    "phase, losses, expected",
    [
        ("warmup", {"lm_loss": 2.0, "lm_loss_sparse": 2.5}, (2.0, 2.5, 0.25)),
        ("sparse", {"lm_loss": 2.5, "lm_loss_dense": 2.0}, (2.0, 2.5, 0.25)),
        ("sparse", {"lm_loss_warmup": 2.0, "lm_loss_sparse": 1.0}, (2.0, 1.0, -0.5)),
        ("warmup", {"lm_loss": 2.0}, (None, None, None)),
        ("warmup", {"lm_loss": 2.0, "lm_loss_dense": 2.0}, (None, None, None)),
        ("warmup", {"lm_loss_dense": 2.0, "lm_loss_sparse": math.nan}, (None, None, None)),
    ],
)
def test_dense_and_sparse_loss_at_the_switch(phase, losses, expected):
    values = {f"eval__valid__{name}": value for name, value in losses.items()}
    s = summarize(History([record(3, train__phase=phase, **values)]))
    assert (s.switch_dense_loss, s.switch_sparse_loss, s.switch_relative_difference) == expected


def test_of_several_evaluations_in_both_phases_the_nearest_to_the_switch_counts():
    records = phased_records()
    for step, dense in ((5, 1.0), (29, 2.0), (38, 4.0)):
        records[step - 1] |= {"eval/valid/lm_loss_dense": dense, "eval/valid/lm_loss_sparse": 2 * dense}
    s = summarize(History(records))
    assert (s.switch_eval_step, s.switch_dense_loss) == (29, 2.0)


def test_recall_of_the_evaluation_set_goes_first():
    values = {"indexer__score_recall": 0.7, "eval__valid__lm_loss": 1.0, "eval__valid__score_recall": 0.9}
    values |= {"eval__valid__random_score_recall": 0.6, "eval__valid__score_recall_skill": 0.75}
    r = summarize(History([record(5, **values)])).recall
    assert (r.source, r.score_recall, r.random_score_recall, r.skill) == ("valid set, step 5", 0.9, 0.6, 0.75)


def test_windows_grow_with_the_run_and_skip_nonfinite_losses():
    losses = [float(i) for i in range(200)]
    losses[0] = math.nan
    losses[199] = math.inf
    s = summarize(History(record(i + 1, train__lm_loss=loss) for i, loss in enumerate(losses)))
    assert (s.train_window, s.nonfinite_losses) == (9, 2)  # 198 // 20
    assert (s.train_loss_first, s.train_loss_last) == (5.0, 194.0)
    assert summarize(History(record(i, train__lm_loss=1.0) for i in range(3000))).train_window == 50


def test_lines_of_one_step_are_one_record():
    history = History([record(2, eval__valid__lm_loss=3.0), record(1, optim__lr=1.0), record(2, optim__lr=2.0)])
    assert [r["step"] for r in history.records] == [1, 2]
    assert history.series("optim/lr") == [(1000, 1.0), (2000, 2.0)]
    assert history.series("eval/valid/lm_loss") == [(2000, 3.0)]


def test_what_was_not_logged_reads_not_available():
    s = summarize(History([{"step": 3, "consumed_tokens": 30}]))
    numbers = {name: value for name, value in vars(s).items() if name not in ("recall", "train_window")}
    assert {name for name, value in numbers.items() if value} == {"steps", "tokens"}
    table = dict(line.split("  ", 1) for line in format_summary(s).splitlines() if not line.startswith(" "))
    assert table["wall time"].strip() == "n/a"
    assert table["train LM loss, first -> last record"].strip() == "n/a -> n/a"
    assert table["KL, first -> at the switch -> last"].strip() == "n/a -> n/a -> n/a"
    assert table["dense -> sparse loss at the switch"].strip() == "n/a"
    assert table["score recall (random selection, skill)"].strip() == "n/a (n/a, n/a)"


def test_table_is_aligned_and_reads_well():
    records = phased_records()
    records[29] |= {"eval/valid/lm_loss_dense": 4.0, "eval/valid/lm_loss_sparse": 4.2}
    records[7]["train/lm_loss"] = math.nan
    text = format_summary(summarize(History(records)))
    starts = {len(line) - len(line[38:].lstrip()) for line in text.splitlines()}
    assert starts == {len("score recall (random selection, skill)") + 2}
    for line in (
        "tokens                                  40.0K (40,000)",
        "wall time                               1m 18s",
        "switch to sparse                        step 31, 31.0K tokens",
        "KL, first -> at the switch -> last      1.0000 -> 0.0333 -> 0.0250",
        "  of a uniform index                    2.1000 -> 2.3000 -> 2.4000",
        "dense -> sparse loss at the switch      4.0000 -> 4.2000 (+5.00%, step 30)",
        "records with a non-finite loss          1",
    ):
        assert line in text.splitlines()


def test_run_folder(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record(1, train__lm_loss=2.0)) + '\n{"step": 2, "cons')
    assert summarize_run(tmp_path).train_loss_last == 2.0


def test_folder_without_records(tmp_path):
    with pytest.raises(ValueError, match=r"holds no metrics\.jsonl\. Give the folder of a run\."):
        summarize_run(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match=r"metrics\.jsonl holds no records yet\."):
        summarize_run(tmp_path)
