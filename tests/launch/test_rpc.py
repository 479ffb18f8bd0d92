"""Calls between nodes, and the records that they carry, over real Courier servers."""

import json
import threading
import time

import courier
import numpy as np
import pytest

from headrace.agents.types import Episode, Stopped
from headrace.launch.nodes import rpc
from headrace.launch.nodes.reporter import Reporter, ReporterConfig
from headrace.launch.nodes.reporting import ReportSender
from headrace.launch.nodes.rpc import Remote, RemoteWeightsSource
from headrace.launch.nodes.variable_source import VariableSource

TIMEOUT_S = 0.3


@pytest.fixture
def serve():
    """Serves functions by name; returns a client with a time-out, as `bounded` makes them."""
    servers = []

    def start(**functions):
        server = courier.Server("test")
        for name, function in functions.items():
            server.Bind(name, function)
        server.Start()
        servers.append(server)
        return courier.Client(f"localhost:{server.port}", call_timeout=TIMEOUT_S)

    yield start
    for server in servers:
        server.Stop()


def nowhere():
    """A client whose server is gone."""
    server = courier.Server("gone")
    server.Start()
    client = courier.Client(f"localhost:{server.port}", call_timeout=TIMEOUT_S)
    server.Stop()
    return client


def test_call_passes_plain_values_both_ways(serve):
    remote = Remote(serve(echo=lambda *xs: list(xs)), "node", threading.Event())
    values = [True, 1, 2.5, "text", b"bytes", None]
    assert remote.call("echo", *values) == values


@pytest.mark.parametrize("bad", [np.float32(1), np.zeros(3), np.int64(2), [1], {"a": 1}])
def test_argument_on_which_courier_would_hang_is_refused(serve, bad):
    remote = Remote(serve(echo=lambda x: x), "node", threading.Event())
    with pytest.raises(TypeError, match=r"echo: argument .* must be a plain value"):
        remote.call("echo", bad)


def test_remote_error_holds_its_text(serve):
    def fail():
        raise ValueError("original error")

    remote = Remote(serve(fail=fail), "the_node", threading.Event())
    with pytest.raises(RuntimeError, match=r"(?s)the_node.fail failed: .*original error"):
        remote.call("fail")


def test_unknown_method_is_an_error_and_no_wait(serve):
    remote = Remote(serve(echo=lambda x: x), "node", threading.Event())
    with pytest.raises(RuntimeError, match="nope"):
        remote.call("nope")


def test_slow_node_is_asked_again(serve):
    asked = []

    def slow():
        asked.append(1)
        if len(asked) < 3:
            time.sleep(2 * TIMEOUT_S)
        return "late"

    remote = Remote(serve(slow=slow), "node", threading.Event())
    assert remote.call("slow") == "late"
    assert len(asked) == 3


def test_stop_ends_the_wait_for_a_node_that_is_away():
    stop = threading.Event()
    remote = Remote(nowhere(), "node", stop)
    threading.Timer(0.5, stop.set).start()
    start = time.monotonic()
    with pytest.raises(Stopped):
        remote.call("anything")
    assert 0.4 < time.monotonic() - start < 0.5 + 2 * TIMEOUT_S + 0.5


def test_node_that_stays_away_is_named(monkeypatch):
    monkeypatch.setattr(rpc, "GIVE_UP_S", 1.0)
    with pytest.raises(ConnectionError, match="the_node has not answered for 1 s"):
        Remote(nowhere(), "the_node", threading.Event()).call("anything")


def test_weights_through_the_variable_source(serve):
    source = VariableSource()
    client = serve(publish=source.publish, fetch=source.fetch)
    remote = RemoteWeightsSource(client, threading.Event())
    assert remote.fetch(-1) is None
    assert source.get_variables([]) == []
    flat = np.arange(100_000, dtype=np.float32)
    remote.publish(3, flat.tobytes())
    assert remote.fetch(3) is None
    remote.publish(2, b"late")  # a repeated call that arrives after a newer one
    for known in (-1, 2, 4):
        version, data = remote.fetch(known)
        assert version == 3
        np.testing.assert_array_equal(np.frombuffer(data, np.float32), flat)
    np.testing.assert_array_equal(source.get_variables([])[0], flat)


def test_no_fetch_ever_mixes_two_versions(serve):
    source = VariableSource()
    client = serve(publish=source.publish, fetch=source.fetch)
    publisher, fetcher = (RemoteWeightsSource(client, threading.Event()) for _ in range(2))

    def publish():
        for version in range(300):
            publisher.publish(version, np.full(20_000, version, np.float32).tobytes())

    thread = threading.Thread(target=publish)
    thread.start()
    seen = set()
    while thread.is_alive():
        if answer := fetcher.fetch(-1):
            version, data = answer
            assert set(np.frombuffer(data, np.float32)) == {version}
            seen.add(version)
    assert len(seen) > 10


# Records.


class FlakyReporter:
    """A real reporter whose first answers get lost after the call, or whose calls never arrive."""

    def __init__(self, lost_answers=0):
        config = ReporterConfig("", time.time(), 1.0, None, None)
        self.reporter = Reporter(config)
        self.lost_answers = lost_answers
        self.calls = 0

    def record(self, sender, sequence, payload):
        self.calls += 1
        answer = self.reporter.record(sender, sequence, payload)
        if self.lost_answers:
            self.lost_answers -= 1
            time.sleep(2 * TIMEOUT_S)
        return answer

    def state(self):
        return json.loads(self.reporter.status())


def wait_until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


@pytest.mark.parametrize("lost_answers", [0, 2])
def test_episodes_are_neither_lost_nor_counted_twice(serve, lost_answers):
    flaky = FlakyReporter(lost_answers)
    sender = ReportSender(serve(record=flaky.record), "actor_0", threading.Event(), period_s=0.02)
    for step in range(1, 51):
        sender.post({"env_steps_sampled": step}, [Episode(float(step), 1), Episode(0.0, 1)])
        time.sleep(0.01)
    wait_until(lambda: flaky.state()["episodes"] == 100)
    assert flaky.state()["env_steps_sampled"] == 50
    sender.close()
    state = flaky.state()
    assert state["episodes"] == 100
    assert state["mean_return"] == sum(range(51)) / 100
    assert flaky.calls > 2 + lost_answers


def test_answer_that_is_lost_while_stopping_doubles_nothing(serve):
    flaky, stop = FlakyReporter(lost_answers=1), threading.Event()
    sender = ReportSender(serve(record=flaky.record), "actor_0", stop, period_s=0.02)
    sender.post({"env_steps_sampled": 3}, [Episode(1.0, 1)] * 3)
    wait_until(lambda: flaky.calls == 1)
    stop.set()
    sender.post({"env_steps_sampled": 5}, [Episode(1.0, 1)] * 2)
    sender.close()
    state = flaky.state()
    assert state["episodes"] == 5
    assert state["env_steps_sampled"] == 5


def test_close_sends_what_is_left(serve):
    flaky = FlakyReporter()
    sender = ReportSender(serve(record=flaky.record), "learner", threading.Event(), period_s=100)
    sender.post({"learner_steps": 7}, metrics={"loss": 1.0, "steps": 7})
    sender.close()
    state = flaky.state()
    assert state["learner_steps"] == 7
    assert state["loss"] == 1.0


def test_end_of_the_run_sets_the_stop_event(serve):
    flaky = FlakyReporter()
    stop = threading.Event()
    sender = ReportSender(serve(record=flaky.record), "learner", stop, period_s=0.02)
    sender.post({"learner_steps": 1})
    assert not stop.wait(0.3)
    sender.post({"budget_used": True})
    assert stop.wait(5)
    sender.close()
    assert flaky.state()["stop_reason"] == "max_env_steps"


def test_reporter_that_stays_away_is_an_error_of_the_next_post(monkeypatch):
    monkeypatch.setattr(rpc, "GIVE_UP_S", 0.5)
    stop = threading.Event()
    sender = ReportSender(nowhere(), "actor_0", stop, period_s=0.01)
    assert stop.wait(10)
    wait_until(lambda: sender._error is not None)
    with pytest.raises(ConnectionError, match="reporter has not answered"):
        sender.post({})
    with pytest.raises(ConnectionError, match="reporter has not answered"):
        sender.close()


def test_reporter_that_rejects_a_record_is_an_error(serve):
    def record(sender, sequence, payload):
        raise KeyError("no such total")

    stop = threading.Event()
    sender = ReportSender(serve(record=record), "actor_0", stop, period_s=0.01)
    assert stop.wait(10)
    with pytest.raises(RuntimeError, match="no such total"):
        sender.close()
