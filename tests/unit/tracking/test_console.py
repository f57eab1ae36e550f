"""The progress line, on a terminal and off it, and its number formats."""

import io
import re

import pytest

from msa_pretrain.training.console import ProgressLine, format_count, format_duration


@pytest.mark.parametrize(
    "value, text",
    [
        (0, "0"),
        (999, "999"),
        (999.7, "1.00K"),
        (1000, "1.00K"),
        (12_345_678, "12.3M"),
        (999_600, "1.00M"),
        (40e9, "40.0B"),
        (2.6e12, "2.60T"),
        (123_456, "123K"),
    ],
)
def test_counts(value, text):
    assert format_count(value) == text


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0, "0s"),
        (59.4, "59s"),
        (59.6, "1m 00s"),
        (80, "1m 20s"),
        (3600, "1h 00m"),
        (11_100, "3h 05m"),
        (187_200, "2d 04h"),
    ],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


VALUES = {
    "train/phase": "warmup",
    "train/tokens": 12_345_678,
    "train/lm_loss": 2.34567,
    "indexer/kl": 0.12345,
    "perf/tokens_per_s_per_gpu": 5_000.0,
    "perf/time_left_s": 80.0,
}


def test_off_a_terminal_one_plain_line_for_each_new_loss():
    stream = io.StringIO()
    line = ProgressLine(1_200, num_gpus=8, stream=stream)
    line.update(119, {})
    line.update(120, VALUES)
    line.update(121, {"perf/step_s": 1.0})
    line.update(130, {"train/lm_loss": 2.0, "train/phase": "sparse"})
    line.close()
    assert stream.getvalue().splitlines() == [
        "step   120/1,200  warmup  12.3M tokens  lm loss 2.3457  KL 0.1235  40.0K tokens/s  1m 20s left",
        "step   130/1,200  sparse  12.3M tokens  lm loss 2.0000  KL 0.1235  40.0K tokens/s  1m 20s left",
    ]


def test_a_dense_run_shows_no_kl_and_nan_is_shown():
    line = ProgressLine(10, stream=io.StringIO())
    line.update(3, {"train/lm_loss": float("nan")})
    assert line.line(3) == "step  3/10  lm loss nan"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("columns, has_bar", [(160, True), (100, False)])
def test_on_a_terminal_one_live_line(monkeypatch, columns, has_bar):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    line = ProgressLine(200, stream=stream)
    line.update(50, VALUES)
    line.update(100, {})
    line.close()
    line.close()  # twice does no harm
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).strip().splitlines()[-1].strip()
    assert text.endswith(
        "50% step 100/200  warmup  12.3M tokens  lm loss 2.3457  KL 0.1235  5.00K tokens/s  1m 20s left"
    )
    assert ("━" in text) == has_bar


def test_lines_are_independent():
    one, other = ProgressLine(10, stream=io.StringIO()), ProgressLine(10, stream=io.StringIO())
    one.update(1, VALUES)
    assert other.line(1) == "step  1/10"
