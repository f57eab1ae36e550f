"""metrics.jsonl: whole after a crash, each step once after a resume, valid JSON whatever the values."""

import json
import math

import pytest

from msa_pretrain.training.sinks import JsonlSink, MetricsWriter, read_metrics


def write(path, steps, resume_step=None):
    sink = JsonlSink(path, resume_step)
    for step in steps:
        sink.log(step, step * 100, {"train/lm_loss": float(step)})
    return sink


def test_one_object_a_line_on_disk_before_log_returns(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    sink = write(path, [1, 2])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [{k: v for k, v in line.items() if k != "time"} for line in lines] == [
        {"step": 1, "consumed_tokens": 100, "train/lm_loss": 1.0},
        {"step": 2, "consumed_tokens": 200, "train/lm_loss": 2.0},
    ]
    assert 1.6e9 < lines[0]["time"] <= lines[1]["time"]
    sink.close()


def test_crash_at_212_with_checkpoint_200(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 213)).close()
    sink = JsonlSink(path, resume_step=200)
    for step in range(201, 221):
        sink.log(step, step * 100, {"train/lm_loss": -float(step)})
    sink.close()
    records = read_metrics(path)
    assert [r["step"] for r in records] == list(range(1, 221))
    assert all((r["train/lm_loss"] < 0) == (r["step"] > 200) for r in records)
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    "tail", [b'{"step": 4, "train/lm', b'{"step": 4, "train/phase": "\xc3', b"[1]\n", b'{"time": 1.0}\n', b"12"]
)
def test_torn_last_line(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2, 3]).close()
    with path.open("ab") as file:
        file.write(tail)
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3]
    write(path, [4], resume_step=3).close()
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3, 4]


def test_damage_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, \n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl line 2 is damaged: .*Remove that line to go on"):
        read_metrics(path)
    with pytest.raises(ValueError, match="line 2 is damaged"):
        JsonlSink(path, resume_step=5)
    path.write_text('{"step": "1"}\n{"step": 3}\n')
    with pytest.raises(ValueError, match='line 1 is damaged: it is no object with an integer "step"'):
        read_metrics(path)


def test_nonfinite_values_are_valid_json_and_come_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    values = {"train/lm_loss": math.nan, "train/loss": math.inf, "indexer/kl": -math.inf, "optim/lr": 0.5}
    writer = MetricsWriter([JsonlSink(path, None)])
    writer.log(1, 10, values)
    writer.close()

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    record = json.loads(path.read_text(), parse_constant=refuse)
    assert record["train/lm_loss"] is None and record["optim/lr"] == 0.5
    assert record["nonfinite"] == {"train/lm_loss": "nan", "train/loss": "inf", "indexer/kl": "-inf"}
    (back,) = read_metrics(path)
    assert math.isnan(back["train/lm_loss"]) and back["train/loss"] == math.inf and back["indexer/kl"] == -math.inf
    assert "nonfinite" not in back
    write(path, [], resume_step=1).close()  # the markers survive a resume
    assert math.isnan(read_metrics(path)[0]["train/lm_loss"])


def test_a_fresh_start_sets_earlier_records_aside(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2]).close()
    write(path, [1], resume_step=None).close()
    assert [r["step"] for r in read_metrics(path)] == [1]
    (aside,) = tmp_path.glob("metrics.until_*.jsonl")
    assert [r["step"] for r in read_metrics(aside)] == [1, 2]
    assert f"held records of an earlier start, which are now in {aside.name}" in caplog.text


def test_resume_without_a_file_starts_one(tmp_path):
    write(tmp_path / "metrics.jsonl", [6], resume_step=5).close()
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [6]


def test_writer_refuses_a_typo_before_any_sink_sees_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter([JsonlSink(path, None)])
    with pytest.raises(ValueError, match=r"'train/lm_los' is not registered\. Did you mean 'train/lm_loss'\?"):
        writer.log(1, 10, {"optim/lr": 0.1, "train/lm_los": 2.0})
    writer.close()
    assert path.read_text() == ""
