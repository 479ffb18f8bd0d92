"""The queue: first in, first out, each item once, bounded, and never a wait without an end."""

import os
import tempfile
import threading
import time

import numpy as np
import pytest
from acme import specs

from headrace.agents import replay
from headrace.agents.environments import EnvironmentSpec
from headrace.agents.types import Stopped, Unroll

SPEC = EnvironmentSpec(specs.Array((3,), np.float32), specs.DiscreteArray(2, dtype=np.int64), False)
LENGTH, ENVS = 2, 2


def make_block(number, envs=ENVS):
    rows = (LENGTH, envs)
    return Unroll(
        observation=np.full((LENGTH + 1, envs, 3), number, np.float32),
        action=np.zeros(rows, np.int64),
        reward=np.full(rows, number, np.float32),
        terminated=np.zeros(rows, bool),
        truncated=np.zeros(rows, bool),
        valid=np.ones(rows, bool),
        behaviour_log_prob=np.zeros(rows, np.float32),
        final_observation=(),
        weights_version=np.int64(number),
        actor_id=np.int64(0),
        sequence=np.int64(0),
    )


class Pipe:
    """A queue with its writer and reader."""

    def __init__(self, max_items=4, items_per_batch=2, in_flight=2):
        self.stop = threading.Event()
        signature = replay.unroll_signature(SPEC, LENGTH, ENVS)
        self.queue = replay.Queue(signature, max_items)
        self.writer = replay.UnrollWriter(self.queue.address, ENVS, in_flight, self.stop)
        self.reader = replay.UnrollReader(self.queue, items_per_batch, self.stop)

    def close(self):
        self.writer.close()
        self.stop.set()  # The reader then stops the queue.
        self.reader.close(timeout_s=10)


@pytest.fixture
def make_pipe():
    pipes = []

    def make(**kwargs):
        pipes.append(Pipe(**kwargs))
        return pipes[-1]

    yield make
    for pipe in pipes:
        pipe.close()


def in_thread(function):
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def wait_until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def test_starving_reader_loses_nothing_and_keeps_the_order(make_pipe):
    """Among the gaps is one longer than Reverb's own wake-ups, every 3 s."""
    pipe = make_pipe(items_per_batch=4)
    gaps = np.random.default_rng(0).random(60) * 0.03
    gaps[30] = 3.2

    def write():
        for number, gap in enumerate(gaps):
            time.sleep(gap)
            pipe.writer.write(make_block(number))
        pipe.writer.flush()

    in_thread(write)
    got = np.concatenate([pipe.reader.next().unrolls.reward.numpy()[:, 0, 0] for _ in range(15)])
    np.testing.assert_array_equal(got, np.arange(60))
    assert pipe.reader.waiting() == 0


def test_fast_writer_loses_nothing_and_keeps_the_order(make_pipe):
    pipe = make_pipe(max_items=3, items_per_batch=2)

    def write():
        block = make_block(0)
        for number in range(200):
            # The same arrays each time: the writer has copied them when it returns.
            block.reward.fill(number)
            block.observation.fill(number)
            pipe.writer.write(block._replace(weights_version=np.int64(number)))
        pipe.writer.flush()

    in_thread(write)
    batches = [pipe.reader.next().unrolls for _ in range(100)]
    for field in ("weights_version", "sequence"):
        values = np.concatenate([getattr(batch, field).numpy() for batch in batches])
        np.testing.assert_array_equal(values, np.arange(200))
    rewards = np.concatenate([batch.reward.numpy() for batch in batches])
    np.testing.assert_array_equal(rewards, np.arange(200)[:, None, None] * np.ones((LENGTH, ENVS)))


def test_full_queue_blocks_the_writer_without_spinning(make_pipe):
    pipe = make_pipe(max_items=3, items_per_batch=1, in_flight=2)
    written = []

    def write():
        for number in range(12):
            pipe.writer.write(make_block(number))
            written.append(number)
        pipe.writer.flush()

    thread = in_thread(write)
    # One item is in the reader's hand, 3 are in the table, 2 unconfirmed; the write of the
    # seventh does not return.
    wait_until(lambda: len(written) == 6)
    cpu, wall = time.process_time(), time.monotonic()
    time.sleep(1.0)
    assert len(written) == 6
    assert pipe.queue.inserted == 4
    assert (time.process_time() - cpu) / (time.monotonic() - wall) < 0.2
    got = [int(pipe.reader.next().unrolls.weights_version[0]) for _ in range(12)]
    assert got == list(range(12))
    thread.join(10)
    assert not thread.is_alive()


def test_waiting_counts_what_was_taken_in_and_not_handed_out(make_pipe):
    pipe = make_pipe(max_items=8, items_per_batch=2)
    for number in range(5):
        pipe.writer.write(make_block(number))
    pipe.writer.flush()
    assert pipe.reader.waiting() == 2.5
    pipe.reader.next()
    assert pipe.reader.waiting() == 1.5
    pipe.reader.next()
    assert pipe.reader.waiting() == 0.5


def raises_stopped(function):
    """Runs it in a thread; returns the thread and a list that gets whether it raised Stopped."""
    outcome = []

    def run():
        try:
            function()
            outcome.append(False)
        except Stopped:
            outcome.append(True)

    return in_thread(run), outcome


def test_stop_ends_a_blocked_write(make_pipe):
    pipe = make_pipe(max_items=1, items_per_batch=1, in_flight=1)
    thread, outcome = raises_stopped(lambda: [pipe.writer.write(make_block(n)) for n in range(9)])
    wait_until(lambda: pipe.queue.inserted == 2)
    time.sleep(0.3)
    assert thread.is_alive()
    pipe.stop.set()
    thread.join(2)
    assert outcome == [True]


def test_stop_ends_a_blocked_read_at_once(make_pipe):
    pipe = make_pipe(items_per_batch=2)
    pipe.writer.write(make_block(0))
    pipe.writer.flush()
    thread, outcome = raises_stopped(pipe.reader.next)
    thread.join(0.5)
    assert thread.is_alive()
    pipe.stop.set()
    thread.join(1)
    assert outcome == [True]
    with pytest.raises(Stopped):
        pipe.reader.next()
    assert pipe.reader.waiting() == 0.5


def test_stop_ends_a_read_whose_first_waking_fails(make_pipe, monkeypatch):
    pipe = make_pipe(items_per_batch=2)
    put_blanks, calls = pipe.queue.put_blanks, []
    monkeypatch.setattr(
        pipe.queue, "put_blanks", lambda n: calls.append(n) if len(calls) < 3 else put_blanks(n)
    )
    thread, outcome = raises_stopped(pipe.reader.next)
    wait_until(lambda: pipe.reader._reading)
    pipe.stop.set()
    thread.join(5)
    assert outcome == [True]
    assert len(calls) == 3


def test_block_is_split_into_items(make_pipe):
    pipe = make_pipe(items_per_batch=1)
    block = make_block(0, envs=3 * ENVS)
    block.reward[:] = np.arange(3 * ENVS)
    pipe.writer.write(block)
    got = [pipe.reader.next().unrolls for _ in range(3)]
    np.testing.assert_array_equal(
        np.concatenate([x.reward.numpy()[0, 0] for x in got]), range(3 * ENVS)
    )
    assert [int(x.sequence[0]) for x in got] == [0, 1, 2]


@pytest.mark.parametrize(
    "change",
    [
        {"reward": np.zeros((LENGTH, ENVS), np.float64)},
        {"reward": np.zeros((LENGTH + 1, ENVS), np.float32)},
        {"action": np.zeros((LENGTH, ENVS), np.int32)},
        {"observation": np.zeros((LENGTH + 1, ENVS, 4), np.float32)},
    ],
)
def test_wrong_block_is_refused_where_it_is_written(make_pipe, change):
    pipe = make_pipe()
    with pytest.raises(ValueError, match=r"[Rr]eward|[Aa]ction|[Oo]bservation|column"):
        pipe.writer.write(make_block(0)._replace(**change))


def test_queue_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    replay.Queue(replay.unroll_signature(SPEC, LENGTH, ENVS), 2).stop()
    assert os.listdir(tmp_path) == []


def test_signature_has_final_observations_only_where_needed():
    signature = replay.unroll_signature(SPEC, 5, 7)
    assert signature.final_observation == ()
    assert signature.observation.shape == (6, 7, 3)
    assert signature.action.shape == (5, 7)
    separate = SPEC._replace(separate_final_observation=True)
    assert replay.unroll_signature(separate, 5, 7).final_observation.shape == (5, 7, 3)
