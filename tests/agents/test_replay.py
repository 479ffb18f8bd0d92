"""The queue: first in, first out, each item once, bounded, and never a wait without an end."""

import contextlib
import itertools
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

    def __init__(self, max_items=4, items_per_batch=2, in_flight=2, slots=0, **reading):
        self.stop = threading.Event()
        signature = replay.unroll_signature(SPEC, LENGTH, ENVS)
        self.queue = replay.Queue(signature, max_items, replay_slots=slots)
        self.writer = replay.UnrollWriter(
            self.queue.address, ENVS, in_flight, self.stop, replay=slots > 0
        )
        self.reader = replay.UnrollReader(self.queue, items_per_batch, self.stop, **reading)
        self.closed = False
        self.writers = []

    def write_for_ever(self):
        """Writes numbered blocks from a thread until the pipe is closed."""

        def write():
            with contextlib.suppress(Stopped):
                for number in itertools.count():
                    self.writer.write(make_block(number))

        self.writers.append(in_thread(write))

    def close(self):
        """Returns the env steps that were left in the queue."""
        if self.closed:
            return None
        self.closed = True
        self.stop.set()
        for thread in self.writers:
            thread.join(5)
        self.writer.close()
        return self.reader.close(lambda: True, timeout_s=10)


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
        pipe.writer.flush(timeout_s=30)

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
        pipe.writer.flush(timeout_s=30)

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
        pipe.writer.flush(timeout_s=30)

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
    pipe.writer.flush(timeout_s=30)
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


def check_stop_ends(pipe, function):
    """It waits, until the stop, then soon raises Stopped."""
    thread, outcome = raises_stopped(function)
    thread.join(0.5)
    assert thread.is_alive()
    pipe.stop.set()
    thread.join(1)
    assert outcome == [True]


def test_stop_ends_a_blocked_write(make_pipe):
    pipe = make_pipe(max_items=1, items_per_batch=1, in_flight=1)
    check_stop_ends(pipe, lambda: [pipe.writer.write(make_block(n)) for n in range(9)])
    assert pipe.queue.inserted == 2


def test_stop_ends_a_blocked_read_at_once(make_pipe):
    pipe = make_pipe(items_per_batch=2)
    pipe.writer.write(make_block(0))
    pipe.writer.flush(timeout_s=30)
    check_stop_ends(pipe, pipe.reader.next)
    with pytest.raises(Stopped):
        pipe.reader.next()
    assert pipe.close() == LENGTH * ENVS


def test_stop_ends_a_read_whose_first_waking_fails(make_pipe, monkeypatch):
    pipe = make_pipe(items_per_batch=2)
    put_blanks, calls = pipe.queue.put_blanks, []
    monkeypatch.setattr(
        pipe.queue, "put_blanks", lambda n: calls.append(n) if len(calls) < 3 else put_blanks(n)
    )
    thread, outcome = raises_stopped(pipe.reader.next)
    wait_until(lambda: pipe.reader._waiting_since is not None)
    pipe.stop.set()
    thread.join(5)
    assert outcome == [True]
    assert len(calls) == 3


@pytest.mark.parametrize("slots", [0, 3])
@pytest.mark.parametrize("written", [0, 1, 2, 5, 6, 11])
def test_close_counts_what_is_left(make_pipe, slots, written):
    pipe = make_pipe(max_items=12, items_per_batch=4, slots=slots, replay_proportion=slots / 3)
    for number in range(written):
        block = make_block(number)
        block.valid[0, 0] = False
        pipe.writer.write(block)
    assert pipe.writer.flush(timeout_s=30) == 0
    got = 0
    if written > 4:
        batch = pipe.reader.next()
        got = np.count_nonzero(batch.unrolls.valid.numpy()[~batch.replayed])
        assert 0 < got < 3 * written
    assert pipe.close() + got == 3 * written


def test_close_counts_what_woke_a_read(make_pipe):
    pipe = make_pipe(items_per_batch=4)
    thread, outcome = raises_stopped(pipe.reader.next)
    pipe.writer.write(make_block(0))
    pipe.writer.flush(timeout_s=30)
    pipe.stop.set()
    thread.join(5)
    assert outcome == [True]
    assert pipe.close() == LENGTH * ENVS


def test_close_makes_room_for_writers_until_they_have_closed(make_pipe):
    pipe = make_pipe(max_items=2, items_per_batch=2, in_flight=1)
    dropped, written, closed = [], [0], threading.Event()

    def write():
        with contextlib.suppress(Stopped):
            while True:
                written[0] += 1
                pipe.writer.write(make_block(0))
        dropped.append(pipe.writer.flush(timeout_s=5))
        closed.set()

    in_thread(write)
    wait_until(lambda: pipe.queue.inserted > 2)
    pipe.stop.set()
    left = pipe.reader.close(closed.is_set, timeout_s=10)
    pipe.closed = True
    assert dropped == [0]
    assert left == written[0] * LENGTH * ENVS
    pipe.writer.close()


def test_close_does_not_wait_for_a_writer_that_hangs(make_pipe):
    pipe = make_pipe()
    pipe.writer.write(make_block(0))
    pipe.writer.flush(timeout_s=30)
    pipe.stop.set()
    before = time.monotonic()
    assert pipe.reader.close(lambda: False, timeout_s=0.5) == LENGTH * ENVS
    assert 0.5 <= time.monotonic() - before < 2
    pipe.closed = True
    pipe.writer.close()


@pytest.mark.parametrize("slots", [0, 3])
def test_flush_counts_what_is_not_confirmed(make_pipe, slots):
    # Those of the replay table may be in flight too.
    pipe = make_pipe(max_items=2, items_per_batch=2, in_flight=14, slots=slots)
    for number in range(7):
        block = make_block(number)
        block.valid[0, 0] = number % 2 == 0
        pipe.writer.write(block)
    wait_until(lambda: pipe.queue.inserted > 2)
    env_steps = pipe.writer.flush(timeout_s=0.3)
    assert pipe.queue.inserted < 6
    expected = sum(LENGTH * ENVS - n % 2 for n in range(pipe.queue.inserted, 7))
    assert env_steps >= expected if slots else env_steps == expected


@pytest.mark.parametrize("proportion", [0.25, 1.0, 1.5, 2.0])
def test_replay_mixes_in_its_proportion_and_loses_nothing_new(make_pipe, proportion):
    pipe = make_pipe(max_items=4, slots=8, items_per_batch=4, replay_proportion=proportion)
    pipe.write_for_ever()
    new, replayed = [], []
    for _ in range(60):
        batch = pipe.reader.next()
        assert batch.replayed.shape == (4,)
        sequence = batch.unrolls.sequence.numpy()
        for number, again in zip(sequence, batch.replayed, strict=True):
            if again:
                replayed.append(number)
                # One of the newest when it was drawn, at most 4 draws ago.
                assert len(new) - 8 - 4 / proportion - 8 <= number <= len(new) + 12
            else:
                new.append(number)
            # Evenly, never off by a whole item.
            due = (len(new) + len(replayed)) * proportion / (1 + proportion)
            assert abs(len(replayed) - due) < 1
    np.testing.assert_array_equal(new, np.arange(len(new)))
    assert len(set(replayed)) > 10


def test_replay_draws_evenly_from_the_newest_items(make_pipe):
    pipe = make_pipe(max_items=40, slots=10, items_per_batch=5, replay_proportion=4.0)
    for number in range(30):
        pipe.writer.write(make_block(number))
    pipe.writer.flush(timeout_s=30)
    drawn = []
    for _ in range(30):
        batch = pipe.reader.next()
        drawn.extend(batch.unrolls.sequence.numpy()[batch.replayed])
    assert len(drawn) == 120
    # The first were drawn while there was nothing else. 10 slots: 12 draws of each on average.
    counts = np.bincount(drawn[10:], minlength=30)
    assert counts[:20].sum() == 0
    assert counts[20:].min() >= 2
    assert counts[20:].max() <= 30


def test_full_queue_does_not_stop_replay_nor_replay_the_queue(make_pipe):
    pipe = make_pipe(max_items=1, slots=1, items_per_batch=2, replay_proportion=1.0, in_flight=1)
    pipe.write_for_ever()
    for _ in range(50):
        batch = pipe.reader.next()
        assert batch.replayed.tolist() == [False, True]
        time.sleep(0.005)  # The queue fills up in the meantime.


def test_stop_ends_a_read_from_an_empty_replay_table(make_pipe):
    pipe = make_pipe(slots=2, replay_proportion=1.0)
    check_stop_ends(pipe, pipe.reader.next)
    assert pipe.close() == 0


def test_long_wait_is_counted_and_said(make_pipe, capfd):
    pipe = make_pipe(timeout_s=0.2)
    thread = in_thread(pipe.reader.next)
    wait_until(lambda: pipe.reader.timeouts == 2)
    assert thread.is_alive()
    assert "warning: no train batch for 0.2 s" in capfd.readouterr().err
    for number in range(2):
        pipe.writer.write(make_block(number))
    thread.join(10)
    assert not thread.is_alive()
    # Between two reads nobody waits.
    noted = pipe.reader.timeouts
    time.sleep(0.5)
    assert pipe.reader.timeouts == noted


def test_short_waits_are_no_timeouts(make_pipe):
    pipe = make_pipe(timeout_s=0.4, fail_at_timeout=True, items_per_batch=1)

    def write():
        for number in range(8):
            time.sleep(0.1)
            pipe.writer.write(make_block(number))

    in_thread(write)
    for number in range(8):
        assert pipe.reader.next().unrolls.sequence.numpy() == number
    assert pipe.reader.timeouts == 0


def test_long_wait_may_fail(make_pipe):
    pipe = make_pipe(timeout_s=0.3, fail_at_timeout=True)
    pipe.writer.write(make_block(0))
    before = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no train batch for 0\.3 s"):
        pipe.reader.next()
    assert 0.3 <= time.monotonic() - before < 2
    assert pipe.close() == LENGTH * ENVS


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
