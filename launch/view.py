"""Shows the progress of a run: live on a terminal, else a plain line now and then."""

import abc
import collections
import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from courier.python.client import StatusNotOk
from launchpad import CourierHandle
from rich.console import Console
from rich.live import Live
from rich.table import Table

from headrace.launch.config import RunConfig

LOOK_TIMEOUT_S = 0.5
"""Longest wait for the reporter's answer."""

_LIVE_PERIOD_S = 0.5
_LINE_PERIOD_S = 10.0
_SPARKS = "▁▂▃▄▅▆▇█"


class View(abc.ABC):
    """Asks the reporter for the run's state every `period_s` and shows it.

    Args:
      period_s: seconds between two looks.
    """

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._next_look = time.monotonic() + period_s
        self._client: Any = None

    def poll(self, reporter: CourierHandle) -> None:
        """Shows the state if it is time.

        Args:
          reporter: handle whose clients give up after `LOOK_TIMEOUT_S`. While the reporter does
            not answer, nothing is shown: its end is for the supervisor to notice.
        """
        if time.monotonic() < self._next_look:
            return
        if self._client is None:
            self._client = reporter.dereference()
        try:
            state = json.loads(self._client.status())
        except StatusNotOk:
            state = None
        if state is not None:
            self._show(state)
        self._next_look = time.monotonic() + self._period_s

    @abc.abstractmethod
    def _show(self, state: dict[str, Any]) -> None:
        """Shows a state, as from `Statistics.report`."""

    def __enter__(self) -> "View":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None


class LineView(View):
    """A line of text every ten seconds."""

    def __init__(self, config: RunConfig, period_s: float = _LINE_PERIOD_S) -> None:
        super().__init__(period_s)
        self._config = config

    def _show(self, state: dict[str, Any]) -> None:
        parts = [
            f"{state['wall_time_s']:6.0f} s",
            f"{state['env_steps_trained']:,} env steps ({state['env_steps_per_second']:,.0f}/s)",
            f"{state['learner_steps']:,} learner steps",
            f"mean return {format_return(state['mean_return'])}",
            f"queue {state.get('queue_size', 0.0):.1f}",
            f"lag {state.get('policy_lag_mean', 0.0):.1f}",
        ]
        left = time_left(state, self._config)
        if left is not None:
            parts.append(f"{left:,.0f} s left")
        print(" | ".join(parts), flush=True)


class LiveView(View):
    """A table that is redrawn in place."""

    def __init__(self, config: RunConfig, run_dir: Path, console: Console) -> None:
        super().__init__(_LIVE_PERIOD_S)
        self._config = config
        self._run_dir = run_dir
        self._returns: collections.deque[float] = collections.deque(maxlen=40)
        self._live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> "LiveView":
        self._live.start()
        self._live.update(f"Starting {self._config.actors} actors and the learner …", refresh=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def _show(self, state: dict[str, Any]) -> None:
        if not state["learner_steps"]:
            return
        if state["mean_return"] is not None:
            self._returns.append(state["mean_return"])
        self._live.update(self._table(state), refresh=True)

    def _table(self, state: dict[str, Any]) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold")
        table.add_column(justify="right")
        table.add_column()
        steps, rate = state["env_steps_trained"], state["env_steps_per_second"]
        budget = self._config.max_env_steps
        target = self._config.target_return
        table.add_row("env steps", f"{steps:,}", f"{rate:,.0f}/s" + _of(budget, " of {:,}"))
        table.add_row("learner steps", f"{state['learner_steps']:,}", "")
        mean = format_return(state["mean_return"])
        table.add_row(
            "mean return", mean, sparkline(list(self._returns)) + _of(target, " target {:g}")
        )
        table.add_row("episodes", f"{state['episodes']:,}", "")
        table.add_row(
            "queue", f"{state.get('queue_size', 0.0):.1f}", "train batches waiting for the learner"
        )
        lag = state.get("policy_lag_mean", 0.0), state.get("policy_lag_max", 0.0)
        table.add_row("policy lag", f"{lag[0]:.1f}", f"learner steps, at most {lag[1]:.0f}")
        left = time_left(state, self._config)
        elapsed = f"{state['wall_time_s']:,.0f} s"
        table.add_row("time", elapsed, "" if left is None else f"{left:,.0f} s left")
        table.add_row("run", "", str(self._run_dir))
        return table


def make_view(config: RunConfig, run_dir: Path) -> View:
    """The live view on a terminal, else plain lines."""
    console = Console()
    return LiveView(config, run_dir, console) if console.is_terminal else LineView(config)


def time_left(state: dict[str, Any], config: RunConfig) -> float | None:
    """Seconds until the first budget is used up at the present rate; None without a budget."""
    candidates = []
    if config.time_limit is not None:
        candidates.append(config.time_limit - state["wall_time_s"])
    if config.max_env_steps is not None and state["env_steps_per_second"]:
        steps = config.max_env_steps - state["env_steps_trained"]
        candidates.append(steps / state["env_steps_per_second"])
    return max(0.0, min(candidates)) if candidates else None


def format_return(mean_return: float | None) -> str:
    """A mean return, or a dash before the first episode has ended."""
    return "-" if mean_return is None else f"{mean_return:.1f}"


def sparkline(values: list[float]) -> str:
    """The values as a row of bars, from their lowest to their highest."""
    if len(values) < 2:
        return ""
    low, span = min(values), max(values) - min(values) or 1.0
    top = len(_SPARKS) - 1
    return "".join(_SPARKS[round((value - low) / span * top)] for value in values)


def _of(limit: float | None, text: str) -> str:
    return "" if limit is None else text.format(limit)
