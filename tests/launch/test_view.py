"""The progress that people see."""

import io

import pytest
from courier.python.client import StatusNotOk
from rich.console import Console

from headrace.launch.config import RunConfig
from headrace.launch.nodes.reporter import ReporterConfig, Statistics
from headrace.launch.view import (
    LineView,
    LiveView,
    format_return,
    make_view,
    sparkline,
    time_left,
)

CONFIG = RunConfig(target_return=475.0, max_env_steps=1_000_000, time_limit=600.0)


def state(**changes):
    return {
        "wall_time_s": 12.0,
        "env_steps_trained": 250_000,
        "env_steps_per_second": 50_000.0,
        "learner_steps": 390,
        "mean_return": 123.45,
        "episodes": 1234,
        "queue_size": 1.5,
        "policy_lag_mean": 2.25,
        "policy_lag_max": 7.0,
        **changes,
    }


def empty_state():
    """What the reporter says before anything has happened."""
    config = ReporterConfig("", 0.0, 1.0, None, None)
    return Statistics(config).report(1.0, {})


class FakeReporter:
    """A handle whose client answers from a list; None is a call that timed out."""

    def __init__(self, answers):
        self._answers = answers
        self.calls = 0

    def dereference(self):
        return self

    def status(self):
        self.calls += 1
        answer = self._answers.pop(0)
        if answer is None:
            raise StatusNotOk("CANCELLED: gone")
        return answer


def test_line_shows_progress(capsys):
    LineView(CONFIG)._show(state())
    line = capsys.readouterr().out
    for part in (
        "12 s",
        "250,000 env steps (50,000/s)",
        "390 learner steps",
        "mean return 123.5",
        "queue 1.5",
        "lag 2.2",
        "15 s left",
    ):
        assert part in line
    assert line.count("\n") == 1


def test_line_before_anything_happened(capsys):
    LineView(CONFIG)._show(empty_state())
    assert "mean return -" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "changes", "left"),
    [
        (CONFIG, {}, 15.0),
        (CONFIG, {"env_steps_per_second": 0.0}, 588.0),
        (CONFIG, {"wall_time_s": 599.0}, 1.0),
        (CONFIG, {"env_steps_trained": 2_000_000}, 0.0),
        (RunConfig(), {}, None),
        (RunConfig(max_env_steps=10), {"env_steps_per_second": 0.0}, None),
    ],
)
def test_time_left_is_that_of_the_first_budget(config, changes, left):
    assert time_left(state(**changes), config) == left


def test_live_view_shows_everything(tmp_path):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, color_system=None)
    with LiveView(CONFIG, tmp_path / "run", console) as view:
        assert "Starting 2 actors" in screen.getvalue()
        view._show(empty_state())
        for mean in (10.0, 200.0, 123.45):
            view._show(state(mean_return=mean))
    text = screen.getvalue()
    for part in (
        "env steps",
        "250,000",
        "50,000/s of 1,000,000",
        "390",
        "123.5",
        "▁█▅",
        "target 475",
        "1,234",
        "1.5",
        "2.2",
        "at most 7",
        "12 s",
        "15 s left",
    ):
        assert part in text, part


@pytest.mark.parametrize(
    ("values", "bars"),
    [([], ""), ([1.0], ""), ([1.0, 1.0], "▁▁"), ([0.0, 7.0], "▁█"), ([-1.0, 0.0, 1.0], "▁▅█")],
)
def test_sparkline(values, bars):
    assert sparkline(values) == bars


def test_return_before_the_first_episode():
    assert format_return(None) == "-"


def test_terminal_gets_the_live_view_and_a_pipe_lines(tmp_path, monkeypatch):
    assert isinstance(make_view(CONFIG, tmp_path), LineView)
    monkeypatch.setattr(Console, "is_terminal", True)
    assert isinstance(make_view(CONFIG, tmp_path), LiveView)


def test_view_looks_once_per_period_and_lives_through_silence(capsys):
    import json

    reporter = FakeReporter([json.dumps(state(learner_steps=1)), None, json.dumps(state())])
    view = LineView(CONFIG, period_s=0.0)
    for _ in range(3):
        view.poll(reporter)
    assert capsys.readouterr().out.count("\n") == 2
    slow = LineView(CONFIG, period_s=100.0)
    slow.poll(reporter)
    assert reporter.calls == 3
