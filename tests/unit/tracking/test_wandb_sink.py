"""W&B works offline with the real library, and whatever it does wrong, training goes on after one warning."""

import logging
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from msa_pretrain.training.sinks import JsonlSink, MetricsWriter, WandbSink, read_metrics
from msa_pretrain.training.wandb_sink import has_login

wandb = pytest.importorskip("wandb")


@pytest.fixture(autouse=True)
def no_login(monkeypatch, tmp_path):
    """No test may find a login of the machine, and none may leave wandb's environment behind."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "WANDB_SERVICE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_SILENT", "true")


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING)
    return lambda: [r.getMessage() for r in caplog.records if r.name == "msa_pretrain.training.wandb_sink"]


class FakeRun:
    """Records what the sink calls."""

    def __init__(self, log_error=None, finish_wait_s=0.0):
        self.calls, self.log_error, self.finish_wait_s = [], log_error, finish_wait_s

    def define_metric(self, *args, **kwargs):
        self.calls.append(("define_metric", args, kwargs))

    def log(self, *args, **kwargs):
        if self.log_error:
            raise self.log_error
        self.calls.append(("log", args, kwargs))

    def finish(self):
        time.sleep(self.finish_wait_s)
        self.calls.append(("finish", (), {}))


@pytest.fixture
def fake(monkeypatch):
    """Make wandb.init return a given run, or raise or sleep first; gives the keyword arguments it got."""

    def install(run=None, error=None, wait_s=0.0):
        seen = {}

        def init(**kwargs):
            seen.update(kwargs, thread=threading.current_thread())
            time.sleep(wait_s)
            if error:
                raise error
            path = Path(kwargs["dir"], "wandb", f"run-0-{kwargs['id']}")
            path.mkdir(parents=True)
            (path / f"run-{kwargs['id']}.wandb").touch()
            return run

        monkeypatch.setattr(wandb, "init", init)
        return seen

    return install


def train(tmp_path, sink, steps=4):
    """A training loop in miniature; returns the seconds that logging took."""
    writer = MetricsWriter([JsonlSink(tmp_path / "metrics.jsonl", None), sink])
    start = time.monotonic()
    for step in range(1, steps + 1):
        writer.log(step, step * 100, {"train/lm_loss": 1.0})
    took = time.monotonic() - start
    writer.close()
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, steps + 1))
    return took


def test_real_offline_run_leaves_a_file_without_secrets(tmp_path, warnings):
    config = {"optim": {"lr": 1e-3}, "hub": {"hf_token": "not-to-be-seen"}}
    sink = WandbSink("offline", "project", "name", tmp_path / "run", config, None)
    sink.log(1, 100, {"train/lm_loss": 2.0, "train/phase": "warmup"})
    sink.log(2, 200, {"train/lm_loss": float("nan"), "train/phase": "sparse"})
    sink.log(3, 300, {"train/lm_loss": 1.0})
    sink.close()
    wandb.teardown()  # its service process
    (file,) = (tmp_path / "run" / "wandb").glob(f"offline-run-*-{sink.run_id}/run-{sink.run_id}.wandb")
    content = file.read_bytes()
    assert b"train/lm_loss" in content and b"train/tokens" in content and b"sparse" in content
    assert b"<redacted>" in content and b"not-to-be-seen" not in content
    assert warnings() == []


def test_own_axis_no_step_and_the_checkpoints_run_id(tmp_path, fake, warnings):
    run = FakeRun()
    seen = fake(run)
    sink = WandbSink("offline", "p", "n", tmp_path, {"a": {"password": "x"}}, "abcd1234")
    sink.log(7, 700, {"train/lm_loss": 1.5})
    sink.close()
    assert run.calls == [
        ("define_metric", ("train/tokens",), {}),
        ("define_metric", ("*",), {"step_metric": "train/tokens"}),
        ("log", ({"train/lm_loss": 1.5, "train/tokens": 700, "train/step": 7},), {}),
        ("finish", (), {}),
    ]
    assert sink.run_id == seen["id"] == "abcd1234"
    assert (seen["resume"], seen["mode"], seen["dir"]) == ("allow", "offline", str(tmp_path))
    assert seen["config"] == {"a": {"password": "<redacted>"}}
    settings = seen["settings"]
    assert (settings.silent, settings.console, settings.save_code, settings.disable_git) == (True, "off", False, True)
    assert warnings() == []


def test_a_relative_folder_becomes_absolute(tmp_path, fake, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = fake(FakeRun())
    WandbSink("offline", "p", "n", "runs/x", {}, None).close()
    assert seen["dir"] == str(tmp_path / "runs" / "x")


def test_new_runs_get_an_id_before_wandb_answers(tmp_path, fake):
    fake(error=TimeoutError("no"))
    ids = {WandbSink("offline", "p", "n", tmp_path, {}, None).run_id for _ in range(3)}
    assert len(ids) == 3 and all(len(i) == 8 for i in ids)


def test_off_touches_nothing(tmp_path, fake, warnings):
    seen = fake(FakeRun())
    assert train(tmp_path, sink := WandbSink("off", "p", "n", tmp_path / "w", {}, None)) < 1
    assert sink.run_id is None and seen == {} and not (tmp_path / "w").exists() and warnings() == []
    assert WandbSink("off", "p", "n", tmp_path, {}, "kept0000").run_id == "kept0000"


def test_unknown_mode(tmp_path):
    with pytest.raises(ValueError, match=r"tracking\.wandb \(on\) must be one of online, offline, off\."):
        WandbSink("on", "p", "n", tmp_path, {}, None)


def test_online_without_a_login_records_offline_and_says_how_to_upload(tmp_path, fake, warnings):
    seen = fake(FakeRun())
    sink = WandbSink("online", "p", "n", tmp_path, {}, None)
    sink.close()
    assert seen["mode"] == "offline"
    (text,) = warnings()
    assert "No W&B login (WANDB_API_KEY, or a netrc entry for api.wandb.ai): recording offline." in text
    assert text.endswith(f"wandb sync {tmp_path}/wandb/offline-run-*-{sink.run_id}")


def test_online_with_a_login_stays_online(tmp_path, fake, warnings, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "made-up")
    seen = fake(FakeRun())
    WandbSink("online", "p", "n", tmp_path, {}, None).close()
    assert seen["mode"] == "online" and warnings() == []


def test_login_is_looked_up_per_host(tmp_path, monkeypatch):
    assert not has_login()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password made-up\n")
    (tmp_path / "netrc").chmod(0o600)
    assert has_login()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not has_login()
    (tmp_path / "netrc").write_text("machine\n")  # broken: as good as none
    assert not has_login()


@pytest.mark.parametrize(
    "error", [wandb.errors.CommError("endpoint unreachable"), TimeoutError("timed out"), RuntimeError("surprise")]
)
def test_a_failing_start_costs_one_warning(tmp_path, fake, warnings, error):
    fake(error=error)
    train(tmp_path, WandbSink("offline", "p", "n", tmp_path, {}, None))
    (text,) = warnings()
    assert text.startswith(f"W&B is off for the rest of this run: {type(error).__name__}: {error}")
    assert text.endswith("Training goes on; metrics.jsonl has it all.")


def test_a_start_that_hangs_is_given_up(tmp_path, fake, warnings):
    fake(FakeRun(), wait_s=10.0)
    start = time.monotonic()
    took = train(tmp_path, WandbSink("offline", "p", "n", tmp_path, {}, None, init_timeout_s=0.2))
    assert took < 5 and time.monotonic() - start < 8
    assert len(warnings()) == 1 and "it did not start within 0.2 s" in warnings()[0]


def test_a_failing_log_costs_one_warning(tmp_path, fake, warnings):
    fake(FakeRun(log_error=OSError("broken pipe")))
    train(tmp_path, WandbSink("offline", "p", "n", tmp_path, {}, None))
    assert len(warnings()) == 1 and "OSError: broken pipe" in warnings()[0]


def test_a_finish_that_hangs_is_given_up(tmp_path, fake, warnings):
    fake(FakeRun(finish_wait_s=10.0))
    start = time.monotonic()
    train(tmp_path, WandbSink("offline", "p", "n", tmp_path, {}, "abcd1234", finish_timeout_s=0.2))
    assert time.monotonic() - start < 8
    (text,) = warnings()
    assert "it did not finish within 0.2 s" in text and "/wandb/*run-*-abcd1234 may help" in text


def test_a_backlog_is_given_up(tmp_path, fake, warnings, monkeypatch):
    monkeypatch.setattr("msa_pretrain.training.wandb_sink.QUEUE_SIZE", 3)
    stuck, run = threading.Event(), FakeRun()
    run.log = lambda record: stuck.wait(10)
    fake(run)
    assert train(tmp_path, WandbSink("offline", "p", "n", tmp_path, {}, None), steps=20) < 5
    stuck.set()
    assert len(warnings()) == 1 and "it takes no records; 3 are waiting" in warnings()[0]


def test_a_run_that_writes_no_file_is_reported(tmp_path, monkeypatch, warnings):
    monkeypatch.setattr(wandb, "init", lambda **kwargs: FakeRun())
    train(tmp_path, WandbSink("offline", "p", "n", tmp_path, {}, None))
    assert len(warnings()) == 1 and "FileNotFoundError: wandb made no run file under" in warnings()[0]


def test_no_wandb_installed(tmp_path, monkeypatch, warnings):
    monkeypatch.setitem(sys.modules, "wandb", None)
    train(tmp_path, WandbSink("offline", "p", "n", tmp_path, {}, None))
    assert len(warnings()) == 1 and "ModuleNotFoundError: import of wandb halted" in warnings()[0]


def test_heavy_libraries_are_imported_only_when_needed():
    code = """
import sys
from msa_pretrain.training import report, sinks
sinks.WandbSink("off", "p", "n", ".", {}, None)
print(sorted({"wandb", "matplotlib", "rich", "megatron", "torch"} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout == "[]\n"
