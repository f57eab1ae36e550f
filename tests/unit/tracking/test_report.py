"""report.html: one file that fetches nothing, escapes what it shows, and marks the switch at the right place."""

import json
import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from msa_pretrain.scripts.report import main
from msa_pretrain.training.figures import build_plots, thin, tick_text
from msa_pretrain.training.report import write_report
from msa_pretrain.training.sinks import JsonlSink
from msa_pretrain.training.summary import History

SWITCH_STEP, LAST_STEP, TOKENS_A_STEP = 30, 48, 2_000_000


def values_of(step):
    values = {
        "train/phase": "warmup" if step < SWITCH_STEP else "sparse",
        "train/lm_loss": 5.0 - step / 20,
        "indexer/kl": 1.0 / step,
        "indexer/kl/layer_0": 0.5 / step,
        "indexer/kl/layer_3": 1.5 / step,
        "optim/grad_norm": 1.0 + step % 3,
        "optim/lr": 1e-3,
        "moe/max_over_mean_load": 1.5,
    }
    if step % 6 == 0:
        values |= {"indexer/kl_uniform": 1.1, "indexer/score_recall": 0.8, "indexer/score_recall_skill": 0.5}
        values |= {"eval/valid/lm_loss": 5.2 - step / 20}
    return values


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "<b>run & co"
    sink = JsonlSink(path / "metrics.jsonl", None)
    for step in range(1, LAST_STEP + 1):
        sink.log(step, step * TOKENS_A_STEP, values_of(step))
    sink.close()
    (path / "config.yaml").write_text("data:\n  train: https://example.org/x?<script>alert(1)</script>&y\n")
    (path / "versions.json").write_text('{"torch": "2.13", "commit": "abc"}')
    return path


@pytest.fixture(scope="module")
def page(run_dir):
    path = write_report(run_dir)
    assert path == run_dir / "report.html" and not list(run_dir.glob("*.tmp"))
    return path.read_text()


@pytest.fixture(scope="module")
def plots(run_dir):
    return {plot.title: plot.figure for plot in build_plots(History.load(run_dir))}


def test_page_fetches_nothing(page):
    targets = re.findall(r"""(?:src|href|url|@import)\s*[=(]\s*["']?([^"')>\s]*)""", page)
    assert targets and all(target.startswith("#") for target in targets)
    assert re.findall(r"https?://[^\s<]*", page) == [
        "https://example.org/x?&lt;script&gt;alert(1)&lt;/script&gt;&amp;y"
    ]
    assert "<script" not in page and "<link" not in page and "default-src 'none'" in page


def test_text_is_escaped(page):
    assert "<title>&lt;b&gt;run &amp; co</title>" in page
    assert "<b>" not in page and "&lt;script&gt;alert(1)&lt;/script&gt;&amp;y" in page
    assert "&quot;commit&quot;: &quot;abc&quot;" in page


def test_inline_figures_are_sound_and_share_no_id(page):
    figures = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(figures) == 5
    seen = set()
    for figure in figures:
        root = ElementTree.fromstring(figure)
        ids = {node.get("id") for node in root.iter() if node.get("id")}
        assert not ids & seen
        seen |= ids
        used = re.findall(r'(?:href="|url\()#([^")]*)', figure)
        assert used and set(used) <= ids
        assert any("phase-sparse-30" in name for name in ids)


def test_page_shows_the_summary(page):
    assert "<td>switch to sparse</td><td>step 30, 60.0M tokens</td>" in page
    assert "<td>dense -&gt; sparse loss at the switch</td><td>n/a</td>" in page
    titles = ["Loss", "Indexer KL by layer", "Index recall", "Gradient norms and learning rate", "Expert load"]
    assert re.findall("<h2>(.*?)</h2>", page) == ["Summary", *titles]


def test_the_switch_is_marked_on_every_plot_at_its_tokens(plots):
    for title, figure in plots.items():
        marks = [line for line in figure.axes[0].lines if (line.get_gid() or "").startswith("phase-")]
        assert [list(mark.get_xdata()) for mark in marks] == [[SWITCH_STEP * TOKENS_A_STEP] * 2], title
        assert [text.get_text().strip() for text in figure.axes[0].texts] == ["sparse"]
        low, high = figure.axes[0].get_xlim()
        assert low < SWITCH_STEP * TOKENS_A_STEP < high


def curve(axes, label):
    (line,) = [line for line in axes.lines if line.get_label() == label]
    return list(zip(line.get_xdata(), line.get_ydata(), strict=True))


def test_curves_hold_the_logged_values(plots):
    steps = range(1, LAST_STEP + 1)
    loss, kl = plots["Loss"].axes[0], plots["Indexer KL by layer"].axes[0]
    assert curve(loss, "train") == [(s * TOKENS_A_STEP, values_of(s)["train/lm_loss"]) for s in steps]
    assert curve(loss, "valid") == [(s * TOKENS_A_STEP, 5.2 - s / 20) for s in steps if s % 6 == 0]
    assert curve(kl, "layer 3") == [(s * TOKENS_A_STEP, 1.5 / s) for s in steps]
    assert curve(kl, "uniform index") == [(s * TOKENS_A_STEP, 1.1) for s in steps if s % 6 == 0]
    assert kl.get_yscale() == "log"
    assert curve(plots["Index recall"].axes[0], "skill")[0] == (6 * TOKENS_A_STEP, 0.5)
    assert curve(plots["Gradient norms and learning rate"].axes[1], "backbone LR")[-1] == (96_000_000, 1e-3)


def test_thinning_keeps_the_ends_and_every_spike():
    points = [(x, 1.0) for x in range(10_000)]
    points[7_777] = (7_777, 50.0)
    points[123] = (123, -3.0)
    kept = thin(points, 600)
    assert len(kept) <= 600 and kept == sorted(kept)
    assert {(7_777, 50.0), (123, -3.0), points[0]} <= set(kept)
    assert thin(points[:600], 600) == points[:600]


def test_tick_texts():
    assert [tick_text(x) for x in (0, 100, 1.5e6, 3e6, 300e3, 12.3e9)] == ["0", "100", "1.5M", "3M", "300K", "12.3B"]


def test_a_bare_run_still_gets_a_page(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps({"step": 1, "consumed_tokens": 10, "train/phase": "dense"}) + "\n"
    )
    page = write_report(tmp_path).read_text()
    assert "<svg" not in page and "<details" not in page and "<td>last phase</td><td>dense</td>" in page


def test_values_that_a_log_axis_cannot_show_are_left_out(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl", None)
    for step, kl in enumerate((0.0, math.nan, 0.5, math.inf), start=1):
        sink.log(step, step, {"indexer/kl": kl, "optim/grad_norm": 0.0})
    sink.close()
    (plot,) = build_plots(History.load(tmp_path))
    assert curve(plot.figure.axes[0], "mean") == [(3, 0.5)]


def test_script_writes_the_report_and_prints_the_summary(run_dir, capsys):
    main([str(run_dir)])
    output = capsys.readouterr().out
    assert output.splitlines()[0].split() == ["steps", "48"]
    assert output.endswith(f"\n\n{run_dir / 'report.html'}\n")


def test_script_refuses_a_folder_without_a_run(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path)])
    assert "holds no metrics.jsonl. Give the folder of a run." in capsys.readouterr().err
