"""The run on wandb, told beside the training: whatever becomes of that, the training neither waits for it nor ends.

wandb is optional (requirements-dashboard.txt), and all that is asked of it happens in one thread. `metrics.jsonl` holds
the same.
"""

import json
import logging
import math
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

ROOM = 10_000  # rows and events that may wait, while wandb starts or its server is slow
END_SECONDS = 8.0  # that the end of the process waits for what is not sent yet,
HURRY_SECONDS = 1.0  # and that of one for which the other workers wait, to form the world anew
_PROBE_SECONDS = 3.0
_START_SECONDS = 10.0
_END = None


def _load() -> Any:
    import wandb

    return wandb


class Dashboard:
    """One wandb run for one training run, through any number of starts: its id is `run_id`.

    mode: `online` or `offline`; without an answer of `server`, or without wandb, one warning tells what becomes of it.
    Files go into `folder`/wandb. began: unix time of the run's first start. earlier: its rows and events before this
    one, for tables and for what was best.
    """

    def __init__(
        self,
        run_id: str,
        *,
        name: str,
        project: str,
        folder: Path,
        mode: str,
        server: str,
        began: float,
        earlier: Iterable[Mapping[str, Any]] = (),
        load: Callable[[], Any] = _load,
    ) -> None:
        self._identity = {"id": run_id, "name": name, "project": project, "dir": str(folder)}
        self._mode, self._server = mode, server
        self._began, self._at = began, -1
        self._best = math.inf
        self._events: list[list[Any]] = []
        self._samples: list[list[Any]] = []
        for entry in earlier:
            self._keep(entry)
        self._load = load
        self._told = False
        self._entries: queue.Queue[dict[str, Any] | None] = queue.Queue(ROOM)
        self._thread = threading.Thread(target=self._run, name="wandb", daemon=True)
        self._thread.start()

    def put(self, entry: Mapping[str, Any]) -> None:
        """Takes a row or an event of `metrics.jsonl`; never waits."""
        if not self._thread.is_alive():
            return
        try:
            self._entries.put_nowait(dict(entry))
        except queue.Full:
            self._warn(f"wandb is too slow: {ROOM} rows wait, and newer ones are not told there")

    def close(self, seconds: float = END_SECONDS) -> None:
        """Ends the run there; what is not sent in so many `seconds` stays in its files."""
        with suppress(queue.Full, queue.Empty):
            if self._entries.full():
                self._entries.get_nowait()
            self._entries.put_nowait(_END)
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._warn(f"wandb has not taken everything in {seconds:g} s")

    def _warn(self, what: str) -> None:
        """Once: nobody wants to read of it at every step."""
        if not self._told:
            self._told = True
            later = f"wandb sync --yes --include-online {self._identity['dir']}/wandb/*run-*"
            log.warning(
                "warning: %s; the training does without, metrics.jsonl has it all, and what is here can be sent later: "
                "%s", " ".join(what.split())[:300], later,
            )  # fmt: skip

    def _run(self) -> None:
        try:
            wandb = self._load()
            wandb.setup(wandb.Settings(silent=True))
            run = self._start(wandb)
            while (entry := self._entries.get()) is not _END:
                self._tell(wandb, run, entry)
            run.finish()
        except ImportError:
            self._warn("wandb is not installed: pip install -r requirements-dashboard.txt")
        except Exception as error:  # noqa: BLE001  # its own kinds are many, and none is worth a training
            self._warn(f"wandb does not work here ({type(error).__name__}: {error})")

    def _start(self, wandb: Any) -> Any:
        """The wandb run, offline where online cannot be."""
        if self._mode == "online" and (problem := _silence(self._server)):
            self._warn(f"{self._server} does not answer ({problem}): wandb is offline")
            self._mode = "offline"
        try:
            run = self._init(wandb)
        except Exception as error:
            if self._mode != "online":
                raise
            self._warn(f"{self._server} does not take the run ({error}): wandb is offline")
            self._mode = "offline"
            run = self._init(wandb)
        # Its own counter cannot go back, as steps do after a restart: with an axis of their own none is lost.
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        log.info("wandb           %s", run.url if self._mode == "online" else f"offline, in {run.settings.sync_dir}")
        return run

    def _init(self, wandb: Any) -> Any:
        settings = wandb.Settings(
            console="off",  # the console is ours
            silent=True,
            init_timeout=_START_SECONDS,
            finish_timeout=END_SECONDS - 2,
            x_transaction_log_flush_interval=1,  # seconds of rows that a kill may cost; 15 by default
            x_disable_meta=True,  # the command line may hold a secret
            x_save_requirements=False,
            disable_git=True,
            disable_code=True,
        )
        return wandb.init(**self._identity, mode=self._mode, resume="allow", allow_val_change=True, settings=settings)

    def _tell(self, wandb: Any, run: Any, entry: dict[str, Any]) -> None:
        # The counter goes on from start to start, and on another machine too: milliseconds since the run began.
        self._at = max(self._at + 1, round(1000 * (entry["time"] - self._began)))
        step = entry["step"]
        if "event" not in entry:
            values = {key: value for key, value in entry.items() if "/" in key}
            run.log({"step": step, **values}, step=self._at)
            if (loss := values.get("val/loss", math.inf)) < self._best:
                self._best = loss
                run.summary.update({"best_val_loss": loss, "best_step": step})
            return
        self._keep(entry)
        match entry["event"]:
            case "start":
                run.config.update(entry["config"], allow_val_change=True)
            case "snapshot":
                run.summary.update({"snapshot": entry["uri"], "snapshot_step": step})
                return  # the table shows it with the next other event: each time it is sent as a whole
            case "stop" | "end":
                run.summary.update({key: entry[key] for key in ("best_val_loss", "goodput")})
        shown, columns, rows = "events", ["step", "generation", "event", "facts"], self._events
        if entry["event"] == "sample":
            shown, columns, rows = "samples", ["step", "text"], self._samples
        run.log({"step": step, shown: wandb.Table(columns=columns, data=[*rows])}, step=self._at)

    def _keep(self, entry: Mapping[str, Any]) -> None:
        """As a row of the table that it belongs to."""
        name = entry.get("event")
        if name == "sample":
            self._samples.append([entry["step"], entry["text"]])
        elif name:
            known = ("event", "step", "generation", "time", "config")
            facts = {key: value for key, value in entry.items() if key not in known}
            self._events.append([entry["step"], entry["generation"], name, json.dumps(facts)])
        elif isinstance(loss := entry.get("val/loss"), float):
            self._best = min(self._best, loss)


def _silence(server: str) -> str:
    """Why nobody answers there; empty where somebody does, whatever the answer is."""
    try:
        urllib.request.urlopen(server, timeout=_PROBE_SECONDS).close()
    except urllib.error.HTTPError:
        return ""
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", "") or error) or type(error).__name__
    return ""
