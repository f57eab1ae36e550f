"""Weights & Biases as a guest of the run: it may be absent, slow or broken, and training goes on."""

import logging
import netrc
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .metrics import MetricValue
from .redaction import redact

logger = logging.getLogger(__name__)

MODES = ("online", "offline", "off")
QUEUE_SIZE = 10_000


class WandbSink:
    """Logs to one W&B run, on an axis of consumed tokens. Build it on rank 0 only.

    Every call into wandb happens on one daemon thread, so a stalled network costs the training loop nothing: `log`
    only fills a queue. Starting and finishing wait at most `init_timeout_s` and `finish_timeout_s`. Whatever fails,
    there is one warning, the sink is off from then on, and `metrics.jsonl` has all the values.

    mode: "online" (without a login it records offline and says how to upload), "offline" or "off".
    directory: the run folder; wandb makes `wandb/` inside.
    config: the resolved config; secrets are redacted here.
    run_id: the id stored in the checkpoint, or None for a new run; `sink.run_id` is what to store.
    """

    def __init__(
        self,
        mode: str,
        project: str,
        run_name: str,
        directory: Path,
        config: dict,
        run_id: str | None,
        *,
        init_timeout_s: float = 60.0,
        finish_timeout_s: float = 120.0,
    ):
        if mode not in MODES:
            raise ValueError(f"tracking.wandb ({mode}) must be one of {', '.join(MODES)}.")
        # chosen here and not by wandb, so that a checkpoint has it even if wandb never answers
        self.run_id = run_id or (None if mode == "off" else secrets.token_hex(4))
        self._directory = Path(directory).absolute()
        self._init_timeout_s, self._finish_timeout_s = init_timeout_s, finish_timeout_s
        self._run: Any = None
        self._records = 0
        self._enabled = mode != "off"
        self._lock = threading.Lock()
        self._jobs: queue.Queue[tuple[Callable[[], None], threading.Event]] = queue.Queue(maxsize=QUEUE_SIZE)
        if not self._enabled:
            return
        if mode == "online" and not has_login():
            mode = "offline"
            logger.warning(
                "No W&B login (WANDB_API_KEY, or a netrc entry for %s): recording offline. Upload with: %s",
                _host(),
                self._sync_command("offline-run"),
            )
        settings = {"mode": mode, "project": project, "name": run_name, "config": redact(config)}
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()
        if not self._wait_for(lambda: self._init(settings), init_timeout_s):
            self._disable(f"it did not start within {init_timeout_s:g} s")

    def log(self, step: int, consumed_tokens: int, values: Mapping[str, MetricValue]) -> None:
        if not self._enabled:
            return
        record = {**values, "train/tokens": consumed_tokens, "train/step": step}
        try:
            self._jobs.put_nowait((lambda: self._log(record), threading.Event()))
        except queue.Full:
            self._disable(f"it takes no records; {QUEUE_SIZE} are waiting")

    def close(self) -> None:
        """Finish the run, waiting at most `finish_timeout_s`."""
        if self._enabled and not self._wait_for(self._finish, self._finish_timeout_s):
            self._disable(
                f"it did not finish within {self._finish_timeout_s:g} s; {self._sync_command('*run')} may help"
            )
        self._enabled = False

    def _init(self, settings: dict[str, Any]) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")  # wandb prints before it has read its settings
        import wandb

        self._directory.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {
            "silent": True,
            "console": "off",
            "save_code": False,
            "disable_git": True,  # a remote's URL may hold a token; the run folder has the commit
            "init_timeout": self._init_timeout_s,
        }
        if "finish_timeout" in wandb.Settings.model_fields:  # newer wandb: bounds its own exit hook too
            options["finish_timeout"] = self._finish_timeout_s
        self._run = wandb.init(
            id=self.run_id,
            resume="allow",
            dir=str(self._directory),
            settings=wandb.Settings(**options),
            **settings,
        )
        # Own axis, no step argument: after a resume wandb drops records whose step it has seen before.
        self._run.define_metric("train/tokens")
        self._run.define_metric("*", step_metric="train/tokens")

    def _log(self, record: dict[str, MetricValue]) -> None:
        self._run.log(record)
        self._records += 1
        if self._records == 2 and not list(self._directory.glob(f"wandb/*/run-{self.run_id}.wandb")):
            raise FileNotFoundError(f"wandb made no run file under {self._directory / 'wandb'}")

    def _finish(self) -> None:
        self._run.finish()

    def _wait_for(self, job: Callable[[], None], timeout_s: float) -> bool:
        """Run a job on the thread, after those queued; False if it has not ended in time."""
        deadline = time.monotonic() + timeout_s
        done = threading.Event()
        try:
            self._jobs.put((job, done), timeout=timeout_s)
        except queue.Full:
            return False
        while self._thread.is_alive():  # it ends at the first failure, which it has reported
            if done.wait(0.05):
                return True
            if time.monotonic() > deadline:
                return False
        return True

    def _work(self) -> None:
        while self._enabled:
            job, done = self._jobs.get()
            try:
                job()
            except Exception as err:  # whatever wandb raises, of any version: it must not end the training
                self._disable(f"{type(err).__name__}: {err}")
            finally:
                done.set()

    def _disable(self, reason: str) -> None:
        with self._lock:
            if not self._enabled:
                return
            self._enabled = False
        logger.warning("W&B is off for the rest of this run: %s. Training goes on; metrics.jsonl has it all.", reason)

    def _sync_command(self, prefix: str) -> str:
        return f"wandb sync {self._directory}/wandb/{prefix}-*-{self.run_id}"


def _host() -> str:
    return urlsplit(os.environ.get("WANDB_BASE_URL", "")).netloc or "api.wandb.ai"


def has_login() -> bool:
    """Whether wandb would find an API key without asking: in the environment or in the netrc file."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    named = os.environ.get("NETRC")
    for path in [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]:
        try:
            entry = netrc.netrc(path).authenticators(_host())
        except (OSError, netrc.NetrcParseError):
            continue
        if entry and entry[2]:
            return True
    return False
