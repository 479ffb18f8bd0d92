"""The weight path: fetched when it is time, whole, and the newest."""

import threading
import time

import numpy as np
import pytest

from headrace.agents.types import Stopped, Weights
from headrace.agents.variables import (
    VariableClient,
    VariablePublisher,
    encode,
    load_weights,
    save_weights,
)


class Source:
    """Holds a snapshot, counts the calls, and can be slow or broken."""

    def __init__(self):
        self.snapshot = None
        self.fetched = 0
        self.published = []
        self.gate = threading.Event()
        self.gate.set()
        self.error = None

    def publish(self, version, flat):
        self.gate.wait()
        if self.error:
            raise self.error
        self.published.append((version, flat))
        self.snapshot = version, flat

    def fetch(self, known_version):
        self.fetched += 1
        if self.snapshot is None or self.snapshot[0] == known_version:
            return None
        return self.snapshot


def put(source, version):
    source.publish(version, encode(np.array([version, 0.5])))


def test_weights_arrive_as_they_were_sent():
    source = Source()
    flat = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    source.publish(3, encode(flat))
    weights = VariableClient(source, 1).wait_for_first(threading.Event())
    assert weights.version == 3
    np.testing.assert_array_equal(weights.flat, flat)
    with pytest.raises(ValueError, match="read-only"):
        weights.flat[0] = 1


def test_weights_travel_as_little_endian_float32():
    assert encode(np.array([1.0, -2.0])) == bytes.fromhex("0000803f000000c0")
    assert encode(np.arange(6.0).reshape(2, 3).T[1]) == encode(np.array([1.0, 4.0]))


@pytest.mark.parametrize("period", [1, 3])
def test_update_period_is_in_unrolls(period):
    source = Source()
    put(source, 0)
    client = VariableClient(source, period)
    client.wait_for_first(threading.Event())
    got = []
    for unroll in range(1, 10):
        put(source, unroll)
        weights = client.poll()
        got.append(weights.version if weights else None)
    assert got == [unroll if unroll % period == 0 else None for unroll in range(1, 10)]
    assert source.fetched == 1 + 9 // period
    assert client.fetches == 1 + 9 // period
    assert client.version == max(v for v in got if v)


def test_unchanged_version_costs_no_weights():
    source = Source()
    put(source, 0)
    client = VariableClient(source, 1)
    client.wait_for_first(threading.Event())
    assert client.poll() is None
    assert client.fetches == 1
    assert client.version == 0


def test_first_weights_are_waited_for():
    source = Source()
    client = VariableClient(source, 1)
    threading.Timer(0.2, put, (source, 0)).start()
    assert client.wait_for_first(threading.Event(), poll_s=0.01).version == 0
    assert source.fetched > 3


def test_wait_for_first_weights_ends_with_the_run():
    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()
    with pytest.raises(Stopped):
        VariableClient(Source(), 1).wait_for_first(stop)


def weights(version):
    return Weights(version, np.full(3, version, np.float32))


def test_every_snapshot_is_sent_while_the_source_keeps_up():
    source = Source()
    publisher = VariablePublisher(source, threading.Event())
    for version in range(5):
        publisher.publish(weights(version))
        while publisher.publishes < version + 1:
            time.sleep(0.001)
    assert publisher.close(1)
    assert [v for v, _ in source.published] == [0, 1, 2, 3, 4]
    assert source.published[4][1] == encode(np.full(3, 4))


def test_slow_source_never_holds_the_learner_and_gets_the_newest():
    source = Source()
    source.gate.clear()
    publisher = VariablePublisher(source, threading.Event())
    start = time.monotonic()
    for version in range(100):
        publisher.publish(weights(version))
        time.sleep(0.001)
    assert time.monotonic() - start < 2
    source.gate.set()
    assert publisher.close(2)
    assert [v for v, _ in source.published] == [0, 99]
    assert publisher.publishes == 2


def test_close_gives_up_on_a_source_that_hangs():
    source = Source()
    source.gate.clear()
    publisher = VariablePublisher(source, threading.Event())
    publisher.publish(weights(0))
    assert not publisher.close(0.1)
    source.gate.set()


def test_error_of_the_source_ends_the_run_and_surfaces():
    """Also if it is the first or the last publication, which no other follows."""
    source, stop = Source(), threading.Event()
    source.error = ConnectionError("gone")
    publisher = VariablePublisher(source, stop)
    publisher.publish(weights(0))
    assert stop.wait(5)
    with pytest.raises(ConnectionError, match="gone"):
        publisher.publish(weights(1))
    with pytest.raises(ConnectionError, match="gone"):
        publisher.close(1)
    assert publisher.publishes == 0


def test_saved_weights_come_back(tmp_path):
    path = tmp_path / "weights.npz"
    save_weights(path, weights(7))
    loaded = load_weights(path)
    assert loaded.version == 7
    np.testing.assert_array_equal(loaded.flat, weights(7).flat)
    assert [p.name for p in tmp_path.iterdir()] == ["weights.npz"]
