"""The node that gathers what the others report, writes it down, and ends the run."""

import collections
import dataclasses
import json
import threading
import time
from pathlib import Path
from typing import Any

from acme.utils import loggers

from headrace.launch.nodes.supervision import supervise

METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
WINDOW = 100
"""Episodes over which the mean return is taken."""

_RATE_WINDOW_S = 5.0
_POLL_S = 0.1


@dataclasses.dataclass(frozen=True)
class ReporterConfig:
    """Settings of the reporter.

    Attributes:
      run_dir: folder to write to.
      started_at: Unix time at which the command started.
      report_interval: seconds between two lines of metrics.
      target_return: mean return that ends the run; None is no target.
      time_limit: seconds after `started_at` that end the run; None is no limit.
    """

    run_dir: str
    started_at: float
    report_interval: float
    target_return: float | None
    time_limit: float | None


class Reporter:
    """Gathers the nodes' records. `record`, `status` and `open_writers` are RPCs.

    Every `report_interval` it writes a line to `metrics.jsonl`, and at the end `summary.json`.

    Args:
      config: settings.
    """

    def __init__(self, config: ReporterConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._statistics = Statistics(config)
        self._sequences: dict[str, int] = {}

    def record(self, sender: str, sequence: int, payload: str) -> bool:
        """Takes a record from `ReportSender`; True if the run is to end.

        A record that comes again, since its answer was lost, is not counted again.
        """
        with self._lock:
            if sequence > self._sequences.get(sender, 0):
                self._sequences[sender] = sequence
                self._statistics.add(sender, json.loads(payload), time.time())
            return bool(self._statistics.stop_reason)

    def status(self) -> str:
        """The run's state now, a JSON object."""
        with self._lock:
            return json.dumps(self._statistics.report(time.time(), self._statistics.latest))

    def open_writers(self) -> int:
        """Actors that have begun to write to the queue and have not yet closed."""
        with self._lock:
            return self._statistics.total("open_writers")

    def run(self) -> None:
        """Reports until the program stops."""
        supervise(self._report)

    def _report(self, stop: threading.Event) -> None:
        run_dir = Path(self._config.run_dir)
        logger = JSONLinesLogger(run_dir / METRICS_FILE)
        next_line = time.monotonic() + self._config.report_interval
        while not stop.wait(_POLL_S):
            with self._lock:
                self._statistics.check_time(time.time())
            if time.monotonic() >= next_line:
                next_line += self._config.report_interval
                self._write_line(logger)
        self._write_line(logger)
        logger.close()
        with self._lock:
            summary = self._statistics.summary(time.time())
        partial = run_dir / (SUMMARY_FILE + ".partial")
        partial.write_text(json.dumps(summary, indent=2) + "\n")
        partial.replace(run_dir / SUMMARY_FILE)

    def _write_line(self, logger: loggers.Logger) -> None:
        with self._lock:
            line = self._statistics.report(time.time(), self._statistics.interval.take())
        logger.write(line)


class JSONLinesLogger(loggers.Logger):
    """Writes each record as a line of JSON, at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")

    def write(self, data: dict[str, Any]) -> None:
        """Appends a line."""
        self._file.write(json.dumps(data) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class Statistics:
    """The state of a run, computed from the records of its nodes.

    Args:
      config: settings.
    """

    def __init__(self, config: ReporterConfig) -> None:
        self._config = config
        self._totals: dict[str, dict[str, Any]] = {}
        self._returns: collections.deque[float] = collections.deque(maxlen=WINDOW)
        self._lengths: collections.deque[int] = collections.deque(maxlen=WINDOW)
        self._episodes = 0
        self._target_at: tuple[float, int] | None = None
        self._recent: collections.deque[tuple[float, int]] = collections.deque()
        self._whole_run = _Means()
        self.interval = _Means()
        """The learner's metrics since the last line."""
        self.latest: dict[str, float] = {}
        """The learner's metrics in its last record."""
        self.stop_reason = ""
        """Why the run ends; empty while it goes on."""

    def add(self, sender: str, record: dict[str, Any], now: float) -> None:
        """Takes in a node's record, received at Unix time `now`."""
        self._totals[sender] = record["totals"]
        for metrics in record["metrics"]:
            self._whole_run.add(metrics)
            self.interval.add(metrics)
            self.latest = {k: v for k, v in metrics.items() if k != "steps"}
        for episode_return, length in record["episodes"]:
            self._episodes += 1
            if self._target_at is None:
                # Later ones, of actors that still stop, would blur the mean that ended the run.
                self._returns.append(episode_return)
                self._lengths.append(length)
                self._check_target(now)
        if record["totals"].get("budget_used"):
            self._end("max_env_steps")
        self._recent.append((now, self.total("env_steps_trained")))
        while now - self._recent[0][0] > _RATE_WINDOW_S:
            self._recent.popleft()

    def check_time(self, now: float) -> None:
        """Ends the run if its time is up."""
        limit = self._config.time_limit
        if limit is not None and now - self._config.started_at >= limit:
            self._end("time_limit")

    def report(self, now: float, metrics: dict[str, float]) -> dict[str, Any]:
        """Counters and means now, with the given learner metrics."""
        return {
            "wall_time_s": now - self._config.started_at,
            "train_time_s": self._train_time(now),
            "env_steps_sampled": self.total("env_steps_sampled"),
            "env_steps_trained": self.total("env_steps_trained"),
            "env_steps_replayed": self.total("env_steps_replayed"),
            "env_steps_in_hand": self.total("env_steps_in_hand"),
            "env_steps_consumed": self.total("env_steps_consumed"),
            "env_steps_dropped": self.total("env_steps_dropped"),
            "env_steps_too_old": self.total("env_steps_too_old"),
            "learner_steps": self.total("learner_steps"),
            "episodes": self._episodes,
            "mean_return": _mean(self._returns),
            "mean_episode_length": _mean(self._lengths),
            "env_steps_per_second": self._rate(),
            "weight_publishes": self.total("weight_publishes"),
            "weight_fetches": self.total("weight_fetches"),
            "learner_queue_timeouts": self.total("learner_queue_timeouts"),
            "stop_reason": self.stop_reason,
            **metrics,
        }

    def summary(self, now: float) -> dict[str, Any]:
        """The whole run: means over all learner steps, and whether the target was reached."""
        train_time = self._train_time(now)
        # The clock starts when the first step ends, so its env steps do not count.
        trained = self.total("env_steps_trained") - self.total("first_step_env_steps")
        time_to_target, steps_to_target = self._target_at or (None, None)
        means = self._whole_run.take()
        queue_size = means.pop("queue_size", None)
        return self.report(now, means) | {
            "policy_lag_mean": means.get("policy_lag_mean"),
            "policy_lag_max": means.get("policy_lag_max"),
            "queue_size_mean": queue_size,
            # What the actors have written and the learner did not get to.
            "env_steps_queued": self.total("env_steps_queued"),
            "reached_target": self._target_at is not None,
            "env_steps_per_second": trained / train_time if train_time else 0.0,
            "time_to_target_s": time_to_target,
            "env_steps_to_target": steps_to_target,
            "stop_reason": self.stop_reason or "stopped",
        }

    def _check_target(self, now: float) -> None:
        target = self._config.target_return
        if target is None or len(self._returns) < WINDOW:
            return
        if sum(self._returns) / WINDOW >= target:
            self._target_at = (self._train_time(now), self.total("env_steps_sampled"))
            self._end("target_return")

    def _end(self, reason: str) -> None:
        self.stop_reason = self.stop_reason or reason

    def total(self, name: str) -> int:
        """The sum of a counter over all nodes."""
        return sum(totals.get(name, 0) for totals in self._totals.values())

    def _train_time(self, now: float) -> float:
        """Seconds from the end of the first learner step to the last record of the learner."""
        learner = self._totals.get("learner", {})
        start = learner.get("first_step_at")
        return 0.0 if start is None else max(0.0, min(now, learner["reported_at"]) - start)

    def _rate(self) -> float:
        if not self._recent:
            return 0.0
        (t0, n0), (t1, n1) = self._recent[0], self._recent[-1]
        return (n1 - n0) / (t1 - t0) if t1 > t0 else 0.0


class _Means:
    """Means of metrics, weighted by the learner steps that they stand for.

    Names that end in `_max` keep the maximum.
    """

    def __init__(self) -> None:
        self._weights: dict[str, float] = {}
        self._values: dict[str, float] = {}

    def add(self, metrics: dict[str, float]) -> None:
        """Adds metrics that are means over `metrics["steps"]` learner steps."""
        weight = metrics["steps"]
        for name, value in metrics.items():
            if name == "steps":
                continue
            if name.endswith("_max"):
                self._values[name] = max(value, self._values.get(name, value))
                continue
            total = self._weights[name] = self._weights.get(name, 0.0) + weight
            mean = self._values.get(name, 0.0)
            self._values[name] = mean + (value - mean) * weight / total

    def take(self) -> dict[str, float]:
        """The means so far; the next call starts anew."""
        values, self._values, self._weights = self._values, {}, {}
        return values


def _mean(values: collections.deque[Any]) -> float | None:
    return sum(values) / len(values) if values else None
