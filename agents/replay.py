"""The learner's in-queue: a Reverb FIFO table of unrolls, its writers and its reader."""

import contextlib
import os
import threading
from typing import Any

import numpy as np
import reverb
import tensorflow as tf
from reverb.platform import checkpointers_lib

from headrace.agents.environments import EnvironmentSpec
from headrace.agents.types import Stopped, TrainBatch, Unroll

QUEUE = "queue"
"""Name of the table."""

_POLL_MS = 200
"""Longest wait, in ms, before a blocked writer looks at its stop event."""


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
    """

    def __init__(self, signature: Unroll, max_items: int, port: int | None = None) -> None:
        self._table = reverb.Table.queue(QUEUE, max_items, signature=signature)
        # Reverb would make a temporary folder for checkpoints and leave it behind. This queue is
        # never saved: unrolls of a past run are no longer on-policy.
        nowhere = checkpointers_lib.DefaultCheckpointer(os.path.join(os.devnull, QUEUE))
        self._server = reverb.Server([self._table], port, nowhere)
        self._inserted: int | None = None
        self.signature = signature
        self.address = f"localhost:{self._server.port}"

    @property
    def inserted(self) -> int:
        """Items that the table has taken in since the start, until the first blank."""
        if self._inserted is not None:
            return self._inserted
        return int(self._table.info.rate_limiter_info.insert_stats.completed)

    def put_blanks(self, items: int) -> None:
        """Adds items of zeros, as far as there is room, so that a waiting reader wakes up."""
        self._inserted = self.inserted
        writer = reverb.Client(self.address).trajectory_writer(num_keep_alive_refs=1)
        blank = tf.nest.map_structure(lambda s: np.zeros(s.shape, s.dtype.name), self.signature)
        for _ in range(items):
            writer.append(blank)
            _create_item(writer)
        with contextlib.suppress(reverb.errors.DeadlineExceededError):
            writer.flush(timeout_ms=_POLL_MS)
        writer.close()

    def stop(self) -> None:
        """Stops the server; waits up to 5 s for writers to hang up."""
        self._server.stop()


class UnrollWriter:
    """Writes one actor's blocks to the queue, in order, and blocks while the queue is full.

    A block is one packed step per item: appending T steps one by one costs fifty times more.

    Args:
      address: `host:port` of the queue's server, which must be up.
      envs: environments per item; a block holds one or more items.
      max_in_flight_items: items that may be written and not yet be confirmed by the server.
      stop: ends every wait.
    """

    def __init__(
        self, address: str, envs: int, max_in_flight_items: int, stop: threading.Event
    ) -> None:
        self._writer = reverb.Client(address).trajectory_writer(num_keep_alive_refs=1)
        self._envs = envs
        self._max_in_flight_items = max_in_flight_items
        self._stop = stop
        self.sequence = 0
        """Number of the next item."""

    def write(self, block: Unroll) -> None:
        """Writes a block [T, E, ...] and waits until it is confirmed but for the allowed items.

        The block's arrays may be reused at once.

        Raises:
          Stopped: while the queue was full; the last items may be lost.
        """
        for first in range(0, block.action.shape[1], self._envs):
            part = slice(first, first + self._envs)
            item = tf.nest.map_structure(lambda x, p=part: x[:, p] if x.ndim else x, block)
            self._writer.append(item._replace(sequence=np.int64(self.sequence)))
            _create_item(self._writer)
            self.sequence += 1
        self._wait_for_confirmation(self._max_in_flight_items)

    def flush(self) -> None:
        """Waits until every item is confirmed.

        Raises:
          Stopped: before that.
        """
        self._wait_for_confirmation(0)

    def close(self) -> None:
        """Drops what is not confirmed."""
        self._writer.close()

    def _wait_for_confirmation(self, in_flight: int) -> None:
        while not self._stop.is_set():
            try:
                self._writer.flush(in_flight, timeout_ms=_POLL_MS)
            except reverb.errors.DeadlineExceededError:
                continue
            return
        raise Stopped


def _create_item(writer: reverb.TrajectoryWriter) -> None:
    """Makes the writer's last step an item of its own."""
    trajectory = tf.nest.map_structure(lambda column: column[-1], writer.history)
    writer.create_item(QUEUE, 1.0, trajectory)


class UnrollReader:
    """Assembles train batches from a queue of this process, in FIFO order, losing nothing.

    It reads without gRPC. One Reverb worker keeps at most a batch of items in flight, beyond the
    batch in hand.

    Args:
      queue: what to read. Setting `stop` stops it too.
      items_per_batch: items in a train batch.
      stop: ends every wait.
    """

    def __init__(self, queue: Queue, items_per_batch: int, stop: threading.Event) -> None:
        self._queue = queue
        self._items = items_per_batch
        self._stop = stop
        self.batches = 0
        """Batches handed out so far."""
        # A wait without a time-out: a sampler that times out can drop the item that it has just
        # taken from the table. What ends the wait is blank items.
        dataset = reverb.TrajectoryDataset(
            queue.address,
            QUEUE,
            dtypes=tf.nest.map_structure(lambda s: s.dtype, queue.signature),
            shapes=tf.nest.map_structure(lambda s: s.shape, queue.signature),
            max_in_flight_samples_per_worker=items_per_batch,
            num_workers_per_iterator=1,
        )
        self._iterator = iter(dataset.batch(items_per_batch, drop_remainder=True))
        self._reading = False
        self._waker = threading.Thread(target=self._wake_at_stop, name="reader-stop", daemon=True)
        self._waker.start()

    def next(self) -> TrainBatch:
        """Waits for the next batch, of tensors [items, T, E, ...].

        Raises:
          Stopped: before the batch was complete.
        """
        self._reading = True
        try:
            # The waker looks at the two in the opposite order, so none can miss the other.
            if not self._stop.is_set():
                unrolls: Unroll = next(self._iterator).data
        finally:
            self._reading = False
        if self._stop.is_set():
            raise Stopped
        self.batches += 1
        return TrainBatch(unrolls, np.zeros(self._items, bool))

    def close(self, timeout_s: float) -> None:
        """Waits until the queue has stopped, after the stop event was set.

        Python must not end while a thread is inside Reverb: that aborts the process.
        """
        self._waker.join(timeout_s)

    def waiting(self) -> float:
        """Train batches that the queue has taken in and `next` has not yet handed out."""
        return self._queue.inserted / self._items - self.batches

    def _wake_at_stop(self) -> None:
        self._stop.wait()
        # A batch ends the wait. One more keeps the sampler from waiting for the table, for which
        # its destructor would wait in turn.
        self._queue.put_blanks(2 * self._items)
        while self._reading:
            self._queue.put_blanks(self._items)
        self._queue.stop()
