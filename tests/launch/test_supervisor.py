"""The supervisor: errors surface, nothing hangs and nothing stays behind. Real processes."""

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import launchpad as lp
import psutil
import pytest

from headrace.launch import supervisor
from headrace.launch.program import ACTOR, LEARNER, REPORTER, VARIABLE_SOURCE

HERE = str(Path(__file__).parent)
sys.path.insert(0, HERE)

from toy_nodes import Toy  # noqa: E402  # as the nodes' processes import it


@pytest.fixture(autouse=True)
def nothing_stays_behind():
    yield
    children = psutil.Process().children(recursive=True)
    assert [child.cmdline() for child in children] == []


def make_program(folder, **behaviours):
    program = lp.Program("toy")
    for group in (REPORTER, VARIABLE_SOURCE, LEARNER, ACTOR):
        behaviour = behaviours.get(group, "wait")
        program.add_node(lp.PyClassNode(Toy, behaviour, str(folder), group), label=group)
    return program


@contextlib.contextmanager
def signals_when_started(folder, *signums, nodes=4, gap_s=0.0):
    """Sends signals to this process once so many nodes work, `gap_s` apart."""

    def send():
        while len(list(folder.glob("*.started"))) < nodes:
            time.sleep(0.02)
        for signum in signums:
            os.kill(os.getpid(), signum)
            time.sleep(gap_s)

    thread = threading.Thread(target=send)
    thread.start()
    yield
    thread.join()


def run(folder, launch_type="processes", **behaviours):
    supervisor.run(make_program(folder, **behaviours), launch_type, folder / "logs")


@pytest.mark.parametrize("launch_type", ["processes", "threads"])
def test_learner_that_finishes_ends_the_run_in_order(tmp_path, launch_type):
    run(tmp_path, launch_type, learner="finish")
    stopped_at = {path.stem: float(path.read_text()) for path in tmp_path.glob("*.stopped")}
    assert sorted(stopped_at, key=stopped_at.get) == [ACTOR, VARIABLE_SOURCE, REPORTER]


@pytest.mark.parametrize("group", [LEARNER, ACTOR, VARIABLE_SOURCE, REPORTER])
def test_node_that_raises_surfaces_its_traceback(tmp_path, group):
    with pytest.raises(supervisor.NodeError) as error:
        run(tmp_path, **{group: "fail"})
    assert error.value.node.startswith(group)
    assert "ValueError: original error" in error.value.details
    assert 'in _fail\n    raise ValueError("original error")' in error.value.details


@pytest.mark.parametrize(
    ("behaviour", "words", "details"),
    [
        ("exit", "failed (3)", ""),
        ("kill", "was killed by SIGKILL", ""),
        ("fail_before_supervision", "failed (1)", "ValueError: broken before supervision"),
        ("fail_twice", "failed (1)", "ValueError: original error"),
    ],
)
def test_node_that_dies_is_named_with_how(tmp_path, behaviour, words, details):
    with pytest.raises(supervisor.NodeError) as error:
        run(tmp_path, actor=behaviour)
    assert str(error.value).startswith(f"actor_0 {words}; its log is ")
    assert details in error.value.details
    assert (tmp_path / "logs" / "actor_0.log").exists()


def test_node_that_leaves_early_is_an_error(tmp_path):
    with pytest.raises(supervisor.NodeError, match="actor_0 ended before the run did"):
        run(tmp_path, actor="exit_well")


@pytest.mark.parametrize("launch_type", ["processes", "threads"])
def test_node_whose_work_is_over_waits_for_the_end(tmp_path, launch_type):
    """As the actors when the reporter has ended the run and the learner is in a long step."""
    run(tmp_path, launch_type, learner="finish_late", actor="return")


def test_cause_before_supervision_is_shown_too(tmp_path):
    with pytest.raises(supervisor.NodeError) as error:
        run(tmp_path, actor="fail_before_supervision")
    assert "OSError: the cause" in error.value.details


class FakeNode:
    """A node that has ended."""

    hung = False

    def __init__(self, group, error=None):
        self.name = self.group = group
        self._error = error

    def is_running(self):
        return False

    def failure(self):
        return self._error


def test_failure_in_the_moment_in_which_the_learner_ends_is_not_lost():
    error = supervisor.NodeError(ACTOR, "failed", "")
    nodes = [FakeNode(LEARNER), FakeNode(ACTOR, error)]
    with pytest.raises(supervisor.NodeError) as raised:
        supervisor._watch(nodes, supervisor._Signals(), lambda: None)
    assert raised.value is error
    assert supervisor._stop(nodes, supervisor._Signals()) == [error]


@pytest.mark.parametrize("node", [ACTOR, VARIABLE_SOURCE])
def test_node_that_hangs_at_the_end_is_a_warning(tmp_path, capsys, node):
    run(tmp_path, learner="finish", **{node: "hang"})
    warning = capsys.readouterr().err
    assert f"warning: {node}" in warning
    assert "did not stop in time; its log is" in warning
    log = next((tmp_path / "logs").glob(f"{node}*.log"))
    assert "in _hang" in log.read_text()


def test_reporter_that_hangs_at_the_end_is_an_error(tmp_path):
    with pytest.raises(supervisor.NodeError, match="reporter did not stop in time"):
        run(tmp_path, learner="finish", reporter="hang")


def test_node_that_is_stopped_from_outside_is_an_error(tmp_path):
    with pytest.raises(supervisor.NodeError, match="learner was stopped from outside"):
        run(tmp_path, learner="terminate")


def test_failures_after_an_interrupt_are_kept(tmp_path):
    with (
        signals_when_started(tmp_path, signal.SIGINT),
        pytest.raises(supervisor.Interrupted) as error,
    ):
        run(tmp_path, reporter="fail_when_stopped")
    assert ["ValueError: error while stopping" in f.details for f in error.value.failures] == [True]


def test_error_while_stopping_is_not_lost(tmp_path):
    with pytest.raises(supervisor.NodeError) as error:
        run(tmp_path, learner="finish", reporter="fail_when_stopped")
    assert "ValueError: error while stopping" in error.value.details


def test_first_error_is_the_one_that_surfaces(tmp_path):
    with pytest.raises(supervisor.NodeError) as error:
        run(tmp_path, learner="fail", reporter="fail_when_stopped")
    assert error.value.node == LEARNER


def test_nodes_that_hang_are_killed_within_ten_seconds(tmp_path):
    start = time.monotonic()
    with pytest.raises(supervisor.NodeError) as error:
        run(tmp_path, learner="exit", actor="hang", variable_source="hang", reporter="hang")
    assert error.value.node == LEARNER
    assert time.monotonic() - start < 10 + 5  # the latter to start them


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("launch_type", ["processes", "threads"])
def test_signal_ends_the_run(tmp_path, launch_type, signum):
    before = signal.getsignal(signum)
    with signals_when_started(tmp_path, signum), pytest.raises(supervisor.Interrupted) as error:
        run(tmp_path, launch_type)
    assert error.value.signum == signum
    assert error.value.failures == []
    assert signal.getsignal(signum) is before


def test_signal_while_nodes_are_being_started(tmp_path):
    program = make_program(tmp_path)
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    start = time.monotonic()
    with pytest.raises(supervisor.Interrupted):
        supervisor.run(program, "processes", tmp_path / "logs")
    assert time.monotonic() - start < 10
    timer.join()


HANGING = dict.fromkeys((LEARNER, ACTOR, VARIABLE_SOURCE, REPORTER), "hang")


def time_to_stop(folder, *signums, gap_s):
    """Seconds from the first of the signals to the end of a program whose every node hangs."""
    with signals_when_started(folder, *signums, gap_s=gap_s):
        with pytest.raises(supervisor.Interrupted) as error:
            run(folder, **HANGING)
        assert [failure.node for failure in error.value.failures] == [LEARNER, REPORTER]
    sent = max(path.stat().st_mtime for path in folder.glob("*.started"))
    return time.time() - sent


def test_second_interrupt_kills_at_once(tmp_path):
    assert time_to_stop(tmp_path, signal.SIGINT, signal.SIGINT, gap_s=1.2) < 3


def test_two_interrupts_at_once_are_one(tmp_path):
    assert time_to_stop(tmp_path, signal.SIGINT, signal.SIGINT, gap_s=0.05) > 5


def test_thread_that_raises_surfaces_its_own_exception(tmp_path):
    with pytest.raises(supervisor.NodeError) as error:
        run(tmp_path, "threads", actor="fail")
    assert isinstance(error.value.__cause__, ValueError)
    assert "original error" in error.value.details


def test_two_runs_in_one_process_keep_their_logs_apart(tmp_path):
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        run(folder, learner="finish")
        assert len(list((folder / "logs").iterdir())) == 4
