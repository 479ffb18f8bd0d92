"""The learner's in-queue: a Reverb FIFO table of unrolls, its writers and its reader."""

import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import reverb
import tensorflow as tf
from reverb.platform import checkpointers_lib

from headrace.agents.environments import EnvironmentSpec
from headrace.agents.types import Stopped, Unroll

QUEUE = "queue"
"""Name of the table."""

_POLL_MS = 200
"""Longest wait, in ms, before a blocked writer or reader looks at its stop event."""


def unroll_signature(spec: EnvironmentSpec, unroll_length: int, envs: int) -> Unroll:
    """Tensor specs of one queue item, an `Unroll` of `envs` environments."""
    rows = (unroll_length, envs)
    shape, dtype = spec.observation.shape, spec.observation.dtype
    return Unroll(
        observation=tf.TensorSpec((unroll_length + 1, envs, *shape), dtype),
        action=tf.TensorSpec(rows, tf.int64),
        reward=tf.TensorSpec(rows, tf.float32),
        terminated=tf.TensorSpec(rows, tf.bool),
        truncated=tf.TensorSpec(rows, tf.bool),
        valid=tf.TensorSpec(rows, tf.bool),
        behaviour_log_prob=tf.TensorSpec(rows, tf.float32),
        final_observation=(
            tf.TensorSpec((*rows, *shape), dtype) if spec.separate_final_observation else ()
        ),
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
        self.address = f"localhost:{self._server.port}"

    @property
    def inserted(self) -> int:
        """Items that the table has taken in since the start."""
        return int(self._table.info.rate_limiter_info.insert_stats.completed)

    def stop(self) -> None:
        """Stops the server."""
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
            trajectory = tf.nest.map_structure(lambda column: column[-1], self._writer.history)
            self._writer.create_item(QUEUE, 1.0, trajectory)
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


class UnrollReader:
    """Assembles train batches from the queue, in FIFO order, losing nothing while it waits.

    One Reverb worker keeps at most a batch of items in flight, beyond the batch in hand.

    Args:
      address: `host:port` of the queue's server. A server of this process is read without gRPC.
      signature: tensor specs of one item.
      items_per_batch: items in a train batch.
      stop: ends every wait.
    """

    def __init__(
        self, address: str, signature: Unroll, items_per_batch: int, stop: threading.Event
    ) -> None:
        self._address = address
        self._signature = signature
        self._items = items_per_batch
        self._stop = stop
        self._batches: Iterator[Any] = iter(())
        self._left_over: list[Unroll] = []
        self.batches = 0
        """Batches handed out so far."""

    def next(self) -> Unroll:
        """Waits for the next batch: tensors [items, T, E, ...].

        Raises:
          Stopped: before the batch was complete.
        """
        parts, self._left_over = self._left_over, []
        count = sum(_items(part) for part in parts)
        while count < self._items:
            if self._stop.is_set():
                self._left_over = parts
                raise Stopped
            try:
                part = next(self._batches).data
            except StopIteration:
                # The queue was empty for the time-out: that ends Reverb's iterator.
                self._batches = self._make_iterator()
                continue
            parts.append(part)
            count += _items(part)
        self.batches += 1
        if len(parts) == 1 and count == self._items:
            return parts[0]
        joined = tf.nest.map_structure(lambda *xs: tf.concat(xs, axis=0), *parts)
        if count > self._items:
            self._left_over = [tf.nest.map_structure(lambda x: x[self._items :], joined)]
        batch: Unroll = tf.nest.map_structure(lambda x: x[: self._items], joined)
        return batch

    def waiting(self, queue: Queue) -> float:
        """Train batches that the queue has taken in and `next` has not yet handed out."""
        return queue.inserted / self._items - self.batches

    def _make_iterator(self) -> Iterator[Any]:
        dataset = reverb.TrajectoryDataset(
            self._address,
            QUEUE,
            dtypes=tf.nest.map_structure(lambda s: s.dtype, self._signature),
            shapes=tf.nest.map_structure(lambda s: s.shape, self._signature),
            max_in_flight_samples_per_worker=self._items,
            num_workers_per_iterator=1,
            rate_limiter_timeout_ms=_POLL_MS,
        )
        # A short batch at the time-out is topped up by the next iterator; dropping it would lose
        # unrolls.
        return iter(dataset.batch(self._items, drop_remainder=False))


def _items(part: Unroll) -> int:
    return int(part.sequence.shape[0])
