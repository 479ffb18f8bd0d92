"""What happens when a part dies, hangs or is told to stop. Parts are really killed."""

import os
import random
import signal
import time

import psutil
import pytest
from command import SMALL, is_running

NODES = ["actor_1", "learner", "variable_source", "reporter"]
PROMISED_S = 10.0


@pytest.mark.parametrize("launch_type", ["processes", "threads"])
def test_environment_that_raises_shows_its_traceback(start, launch_type):
    run = start(*SMALL, "--env", "envs:Raises-v0", "--launch-type", launch_type)
    assert run.wait() == 1
    error = run.stderr()
    assert "ValueError: the environment is broken" in error
    assert "envs.py" in error
    assert "error: actor_" in error
    run.assert_nothing_left()


def test_environment_that_cannot_be_reset(start):
    run = start(*SMALL, "--env", "envs:RaisesAtReset-v0")
    assert run.wait() == 1
    assert "OSError: no such level" in run.stderr()
    run.assert_nothing_left()


def test_environment_that_ends_its_process(start):
    run = start(*SMALL, "--env", "envs:Exits-v0")
    assert run.wait() == 1
    assert "error: actor_" in run.stderr()
    assert "failed (7)" in run.stderr()
    run.assert_nothing_left()


@pytest.mark.parametrize("node", NODES)
def test_killed_node_ends_the_run(start, node):
    run = start(*SMALL)
    run.wait_for_training()
    run.node(node).kill()
    killed = time.monotonic()
    assert run.wait() == 1
    assert time.monotonic() - killed < PROMISED_S
    assert f"error: {node} was killed by SIGKILL" in run.stderr()
    run.assert_nothing_left()


def test_worker_process_of_an_environment_shows_its_traceback(start):
    run = start(*SMALL, "--env", "envs:Raises-v0", "--vectorization", "async")
    assert run.wait() == 1
    assert 'raise ValueError("the environment is broken")' in run.stderr()
    run.assert_nothing_left()


def test_learner_that_is_stopped_alone_is_no_success(start):
    run = start(*SMALL)
    run.wait_for_training()
    run.node("learner").terminate()
    assert run.wait() == 1
    assert "error: learner was stopped from outside" in run.stderr()
    run.assert_nothing_left()


def test_slow_environments_stop_between_two_steps(start):
    run = start(*SMALL, "--env", "envs:Slow-v0", "--time-limit", "10")
    assert run.wait() == 0
    assert run.summary()["wall_time_s"] < 15
    assert run.stderr() == ""
    run.assert_nothing_left()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("launch_type", ["processes", "threads"])
def test_signal_ends_the_run_in_order(start, launch_type, signum):
    run = start(*SMALL, "--launch-type", launch_type)
    run.wait_for_training()
    run.process.send_signal(signum)
    sent = time.monotonic()
    assert run.wait() == 128 + signum
    assert time.monotonic() - sent < PROMISED_S
    assert f"stopped by {signal.Signals(signum).name}" in run.stderr()
    assert "Traceback" not in run.stderr()
    summary = run.summary()
    assert summary["stop_reason"] == "stopped"
    assert summary["env_steps_trained"] > 0
    assert (run.run_dir / "weights.npz").exists()
    assert "env steps trained" in run.stdout()
    assert f"{run.run_dir}/ holds the summary" in run.stdout()
    run.assert_nothing_left()


# Fixed seed: the same moments each time, from before the first import to well into the training.
_RANDOM = random.Random(0)
MOMENTS = sorted(_RANDOM.uniform(0.02, 9.0) for _ in range(10))


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_signal_at_any_moment_leaves_nothing(start, moment):
    signum = signal.SIGINT if MOMENTS.index(moment) % 2 else signal.SIGTERM
    run = start(*SMALL)
    deadline = time.monotonic() + moment
    while time.monotonic() < deadline:
        run.children()
        time.sleep(0.02)
    run.process.send_signal(signum)
    sent = time.monotonic()
    # While Python itself starts, it is the system that ends the process: -signum.
    assert run.wait() in (128 + signum, -signum)
    assert time.monotonic() - sent < PROMISED_S
    run.assert_nothing_left()


def test_environment_that_hangs_does_not_hold_up_the_end(start):
    run = start(*SMALL, "--env", "envs:Hangs-v0")
    run.wait_for_training(steps=1)
    time.sleep(2)
    run.process.send_signal(signal.SIGINT)
    sent = time.monotonic()
    assert run.wait() == 130
    assert time.monotonic() - sent < PROMISED_S
    assert "warning: actor_0 did not stop in time" in run.stderr()
    run.assert_nothing_left()


def test_starved_learner_may_end_the_run(start):
    timeout = ("--learner-queue-timeout-s", "4", "--learner-queue-timeout-action", "fail")
    run = start(*SMALL, "--env", "envs:Hangs-v0", *timeout)
    assert run.wait() == 1
    assert "TimeoutError: no train batch for 4 s" in run.stderr()
    assert "error: learner failed" in run.stderr()
    run.assert_nothing_left()


def test_starved_learner_says_so_and_goes_on(start):
    run = start(
        *SMALL, "--env", "envs:Hangs-v0", "--learner-queue-timeout-s", "1", "--time-limit", "12"
    )
    assert run.wait() == 0
    summary = run.summary()
    assert summary["stop_reason"] == "time_limit"
    assert summary["learner_queue_timeouts"] >= 2
    said = (
        (run.run_dir / "logs" / "learner.log").read_text().count("warning: no train batch for 1 s")
    )
    assert said == summary["learner_queue_timeouts"]
    run.assert_nothing_left()


def test_nodes_end_with_a_killed_launcher(start):
    run = start(*SMALL)
    run.wait_for_training()
    nodes = run.children()
    assert len(nodes) >= 5
    run.process.kill()
    _, alive = psutil.wait_procs(nodes, timeout=PROMISED_S)
    assert not [node for node in alive if is_running(node)]
    assert os.listdir(run.run_dir / "logs")


def test_no_port_stays_open(start):
    run = start(*SMALL)
    run.wait_for_training()
    ports = {
        connection.laddr.port
        for node in run.children()
        for connection in node.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert len(ports) >= 3
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    still = {
        connection.laddr.port
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert not ports & still
