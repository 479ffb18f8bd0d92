"""The learner's in-queue: a Reverb FIFO table of unrolls, its writers and its reader.

Beside it may stand a replay table, from which unrolls are mixed in that were trained on before.
"""

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import reverb
import tensorflow as tf
from reverb.platform import checkpointers_lib

from headrace.agents.environments import EnvironmentSpec
from headrace.agents.types import Stopped, TrainBatch, Unroll

QUEUE, REPLAY = "queue", "replay"
"""Names of the tables."""

NOBODY = -1
"""Actor id of a blank item, whose rows are all invalid."""

_POLL_MS = 200
"""Longest wait, in ms, before a blocked writer looks at its stop event."""

_LOOK_MS = 20
_TIMEOUT_POLL_S = 1.0
_DRAIN_POLL_S = 0.01
_STOP_S = 0.5

_LAST = 1
"""Sequence number of the blank items after which nothing follows."""


def unroll_signature(spec: EnvironmentSpec, unroll_length: int, envs: int) -> Unroll:
    """Tensor specs of one queue item, an `Unroll` of `envs` environments."""
    rows = (unroll_length, envs)

    def observation(*rows: int) -> Any:
        return tf.nest.map_structure(
            lambda s: tf.TensorSpec((*rows, *s.shape), s.dtype), spec.observation
        )

    return Unroll(
        observation=observation(unroll_length + 1, envs),
        action=tf.TensorSpec(rows, tf.int64),
        reward=tf.TensorSpec(rows, tf.float32),
        terminated=tf.TensorSpec(rows, tf.bool),
        truncated=tf.TensorSpec(rows, tf.bool),
        valid=tf.TensorSpec(rows, tf.bool),
        behaviour_log_prob=tf.TensorSpec(rows, tf.float32),
        final_observation=observation(*rows) if spec.separate_final_observation else (),
        weights_version=tf.TensorSpec((), tf.int64),
        actor_id=tf.TensorSpec((), tf.int64),
        sequence=tf.TensorSpec((), tf.int64),
    )


class Queue:
    """A Reverb server with the FIFO table; every item is sampled once, and a full table blocks.

    Args:
      signature: tensor specs of one item.
      max_items: items that the table holds.
      port: to serve on; None picks one.
      replay_slots: newest items that the replay table holds; 0 is no such table. It blocks no one.
    """

    def __init__(
        self, signature: Unroll, max_items: int, port: int | None = None, replay_slots: int = 0
    ) -> None:
        self._table = reverb.Table.queue(QUEUE, max_items, signature=signature)
        tables = [self._table]
        if replay_slots:
            tables.append(
                reverb.Table(
                    REPLAY,
                    sampler=reverb.selectors.Uniform(),
                    remover=reverb.selectors.Fifo(),
                    max_size=replay_slots,
                    rate_limiter=reverb.rate_limiters.MinSize(1),
                    signature=signature,
                )
            )
        # Reverb would make a temporary folder for checkpoints and leave it behind. This queue is
        # never saved: unrolls of a past run are no longer on-policy.
        nowhere = checkpointers_lib.DefaultCheckpointer(os.path.join(os.devnull, QUEUE))
        self._server = reverb.Server(tables, port, nowhere)
        self._tables = tuple(table.name for table in tables)
        self.signature = signature
        self.address = f"localhost:{self._server.port}"

    @property
    def inserted(self) -> int:
        """Items that the FIFO table has taken in since the start, blank ones included."""
        return int(self._table.info.rate_limiter_info.insert_stats.completed)

    def put_blanks(self, items: int, sequence: int = 0) -> None:
        """Adds blank items, as far as there is room, so that a waiting reader wakes up."""
        writer = reverb.Client(self.address).trajectory_writer(num_keep_alive_refs=1)
        zeros = tf.nest.map_structure(lambda s: np.zeros(s.shape, s.dtype.name), self.signature)
        blank = zeros._replace(actor_id=np.int64(NOBODY), sequence=np.int64(sequence))
        for _ in range(items):
            writer.append(blank)
            _create_items(writer, self._tables)
        with contextlib.suppress(reverb.errors.DeadlineExceededError):
            writer.flush(timeout_ms=_POLL_MS)
        writer.close()

    def stop(self) -> None:
        """Stops the server; waits up to 5 s for writers to hang up."""
        try:
            self._server.stop()
        except RuntimeError as error:
            # Those that have not by then are cut off.
            if "Deadline Exceeded" not in str(error):
                raise


class UnrollWriter:
    """Writes one actor's blocks to the queue, in order, and blocks while the queue is full.

    A block is one packed step per item: appending T steps one by one costs fifty times more.

    Args:
      address: `host:port` of the queue's server, which must be up.
      envs: environments per item; a block holds one or more items.
      max_in_flight_items: items that may be written and not yet be confirmed by the server.
      stop: ends every wait of `write`.
      replay: write to the replay table as well.
    """

    def __init__(
        self,
        address: str,
        envs: int,
        max_in_flight_items: int,
        stop: threading.Event,
        *,
        replay: bool = False,
    ) -> None:
        self._writer = reverb.Client(address).trajectory_writer(num_keep_alive_refs=1)
        self._envs = envs
        self._max_in_flight_items = max_in_flight_items
        self._stop = stop
        # The queue first: what it has, the replay table is about to have.
        self._tables = (QUEUE, REPLAY) if replay else (QUEUE,)
        self._unconfirmed_env_steps: list[int] = []
        self.sequence = 0
        """Number of the next item."""

    def write(self, block: Unroll) -> None:
        """Writes a block [T, E, ...] and waits until it is confirmed but for the allowed items.

        The block's arrays may be reused at once.

        Raises:
          Stopped: while the queue was full.
        """
        for first in range(0, block.action.shape[1], self._envs):
            part = slice(first, first + self._envs)
            item = tf.nest.map_structure(lambda x, p=part: x[:, p] if x.ndim else x, block)
            self._writer.append(item._replace(sequence=np.int64(self.sequence)))
            _create_items(self._writer, self._tables)
            self._unconfirmed_env_steps.append(int(np.count_nonzero(item.valid)))
            self.sequence += 1
        while not self._stop.is_set():
            if self._confirmed(self._max_in_flight_items, _POLL_MS):
                del self._unconfirmed_env_steps[: -self._max_in_flight_items]
                return
        raise Stopped

    def flush(self, timeout_s: float) -> int:
        """Waits until every item is confirmed, whether stopped or not.

        Returns:
          Env steps of the items that are not, since that took longer than `timeout_s`. With a
          replay table these are an upper bound.
        """
        if self._confirmed(0, math.ceil(1000 * timeout_s)):
            return 0
        in_flight, written = 1, self._unconfirmed_env_steps
        while in_flight < len(written) and not self._confirmed(in_flight, timeout_ms=_LOOK_MS):
            in_flight += 1
        return sum(written[-in_flight:])

    def close(self) -> None:
        """Drops what is not confirmed."""
        self._writer.close()

    def _confirmed(self, in_flight: int, timeout_ms: int) -> bool:
        """Waits until so many items are unconfirmed; False if that takes longer.

        Those of the replay table count too. It takes them in at once, but the server may read them
        only after the one that the queue has no room for.
        """
        try:
            self._writer.flush(in_flight, timeout_ms=timeout_ms)
        except reverb.errors.DeadlineExceededError:
            return False
        return True


def _create_items(writer: reverb.TrajectoryWriter, tables: Sequence[str]) -> None:
    """Makes the writer's last step an item of its own, in each of the tables."""
    trajectory = tf.nest.map_structure(lambda column: column[-1], writer.history)
    for table in tables:
        writer.create_item(table, 1.0, trajectory)


class UnrollReader:
    """Assembles train batches from a queue of this process, in FIFO order, losing nothing.

    It reads without gRPC. One Reverb worker keeps at most a batch of items in flight, beyond the
    batch in hand.

    Args:
      queue: what to read. `close` stops it.
      items_per_batch: items in a train batch.
      stop: ends every wait of `next`.
      replay_proportion: replayed items for each new one, on average, spread evenly. Above 0 the
        queue must have a replay table.
      timeout_s: longest wait for a batch; None is for ever.
      fail_at_timeout: whether a longer wait is an error, or just counted and said on stderr.
    """

    def __init__(
        self,
        queue: Queue,
        items_per_batch: int,
        stop: threading.Event,
        *,
        replay_proportion: float = 0.0,
        timeout_s: float | None = None,
        fail_at_timeout: bool = False,
    ) -> None:
        self._queue = queue
        self._items = items_per_batch
        self._stop = stop
        self._timeout_s = timeout_s
        self._fail_at_timeout = fail_at_timeout
        self._read = 0
        self._left_env_steps = 0
        self.timeouts = 0
        """Waits, or parts of one, of `timeout_s`."""
        batches = self._mixed(replay_proportion) if replay_proportion else self._new()
        self._iterator = iter(batches.batch(items_per_batch, drop_remainder=True))
        self._waiting_since: float | None = None
        self._timed_out = False
        self._waker = threading.Thread(target=self._wake, name="reader-waker", daemon=True)
        self._waker.start()

    def next(self) -> TrainBatch:
        """Waits for the next batch, of tensors [items, T, E, ...].

        Raises:
          Stopped: before the batch was complete.
          TimeoutError: the wait took longer than `timeout_s`, and that is to be an error.
        """
        self._waiting_since = time.monotonic()
        try:
            # The waker looks at the two in the opposite order, so none can miss the other.
            batch = None if self._ended() else self._take()
        finally:
            self._waiting_since = None
        if batch is not None and not self._ended():
            return batch
        if batch is not None:
            self._left_env_steps += _new_env_steps(batch)
        if self._timed_out:
            raise TimeoutError(f"no train batch for {self._timeout_s:g} s")
        raise Stopped

    def waiting(self) -> float:
        """Train batches that the queue has taken in and `next` has not yet handed out.

        Blank items count too, so there is no such number once the run stops.
        """
        return (self._queue.inserted - self._read) / self._items

    def close(self, closed: Callable[[], bool], timeout_s: float) -> int:
        """Reads what is left in the queue, then stops it. To be called when `stop` is set.

        Python must not end while a thread is inside Reverb: that aborts the process.

        Args:
          closed: whether all writers are. Until then they find room.
          timeout_s: longest wait for them.

        Returns:
          Env steps that the queue had taken in and `next` has not handed out.
        """
        deadline = time.monotonic() + timeout_s
        self._waker.join(timeout_s)
        last = None
        while last is None or not last.any():
            if self._queue.inserted - self._read >= self._items:
                batch = self._take()
                self._left_env_steps += _new_env_steps(batch)
                blank = batch.unrolls.actor_id.numpy() == NOBODY
                last = blank & (batch.unrolls.sequence.numpy() == _LAST) & ~batch.replayed
            elif closed() or time.monotonic() > deadline:
                self._queue.put_blanks(self._items, _LAST)
            else:
                time.sleep(_DRAIN_POLL_S)
        # Keeps the sampler from waiting for the table, for which its destructor would wait in turn.
        self._queue.put_blanks(self._items)
        stopping = threading.Thread(target=self._queue.stop, name="queue-stop", daemon=True)
        stopping.start()
        stopping.join(_STOP_S)
        return self._left_env_steps

    def _new(self) -> tf.data.Dataset:
        return self._dataset(QUEUE, self._items).map(_plain(lambda item: (item.data, False)))

    def _mixed(self, proportion: float) -> tf.data.Dataset:
        """New and replayed items in turn, `proportion` of these for each of those.

        Item i is replayed if the number of replayed ones due before i + 1 exceeds that before i, so
        their number is never off by a whole one.
        """

        def due(items: tf.Tensor) -> tf.Tensor:
            return tf.floor(tf.cast(items, tf.float64) * proportion / (1.0 + proportion))

        # More would be older when its turn comes.
        in_flight = math.ceil(self._items * proportion / (1.0 + proportion))

        def turn(item: tf.Tensor) -> tf.Tensor:
            return tf.cast(due(item + 1) - due(item), tf.int64)

        turns = tf.data.Dataset.range(2**53).map(_plain(turn))
        replayed = self._dataset(REPLAY, in_flight).map(_plain(lambda item: (item.data, True)))
        return tf.data.Dataset.choose_from_datasets([self._new(), replayed], turns)

    def _dataset(self, table: str, in_flight: int) -> tf.data.Dataset:
        # A wait without a time-out: a sampler that times out can drop the item that it has just
        # taken from the table. What ends the wait is blank items.
        return reverb.TrajectoryDataset(
            self._queue.address,
            table,
            dtypes=tf.nest.map_structure(lambda s: s.dtype, self._queue.signature),
            shapes=tf.nest.map_structure(lambda s: s.shape, self._queue.signature),
            max_in_flight_samples_per_worker=in_flight,
            num_workers_per_iterator=1,
        )

    def _take(self) -> TrainBatch:
        unrolls, replayed = next(self._iterator)
        batch = TrainBatch(unrolls, replayed.numpy())
        self._read += self._items - np.count_nonzero(batch.replayed)
        return batch

    def _ended(self) -> bool:
        return self._timed_out or self._stop.is_set()

    def _wake(self) -> None:
        """Looks at the time, and ends a wait with blank items when the run stops or it is too long.

        While a wait goes on, `_waiting_since` is set.
        """
        noted_at = 0.0
        while not self._stop.wait(None if self._timeout_s is None else self._time_left(noted_at)):
            if self._waiting_since is not None and self._time_left(noted_at) <= 0.0:
                noted_at = time.monotonic()
                self.timeouts += 1
                if self._fail_at_timeout:
                    self._timed_out = True
                    break
                print(
                    f"warning: no train batch for {self._timeout_s:g} s; {self.waiting():.2f} wait",
                    file=sys.stderr,
                    flush=True,
                )
        while self._waiting_since is not None:
            self._queue.put_blanks(self._items)

    def _time_left(self, noted_at: float) -> float:
        """Seconds until the wait that goes on is too long, at most until the next look."""
        assert self._timeout_s is not None
        since, left = self._waiting_since, self._timeout_s
        if since is not None:
            left -= time.monotonic() - max(since, noted_at)
        return max(0.0, min(left, _TIMEOUT_POLL_S))


def _plain(function: Callable[..., Any]) -> Any:
    """Keeps autograph away, which leaves a file behind where a process ends without ado."""
    return tf.autograph.experimental.do_not_convert(function)


def _new_env_steps(batch: TrainBatch) -> int:
    return int(np.count_nonzero(batch.unrolls.valid.numpy()[~batch.replayed]))
