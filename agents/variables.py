"""The weight path from the learner to the actors, client side."""

import threading
from pathlib import Path
from typing import Protocol

import numpy as np

from headrace.agents.types import Array, Stopped, Weights


class WeightsSource(Protocol):
    """Where weights are published and fetched. Arguments are plain types, so it can be remote."""

    def publish(self, version: int, flat: bytes) -> None:
        """Serves a snapshot from now on, if it is newer; `flat` holds little-endian float32."""

    def fetch(self, known_version: int) -> tuple[int, bytes] | None:
        """The newest snapshot, or None if there is none or its version is `known_version`."""


class VariableClient:
    """Fetches weights for one actor, every `update_period` unrolls.

    Args:
      source: where to fetch from.
      update_period: unrolls between two fetches.
    """

    def __init__(self, source: WeightsSource, update_period: int) -> None:
        self._source = source
        self._period = update_period
        self._unrolls = 0
        self.fetches = 0
        """Snapshots received so far; answers of "nothing new" do not count."""
        self.version = -1
        """Version of the newest snapshot received, -1 before the first."""

    def wait_for_first(self, stop: threading.Event, poll_s: float = 0.05) -> Weights:
        """Blocks until weights are published.

        Raises:
          Stopped: `stop` was set before.
        """
        while not stop.is_set():
            if weights := self._fetch():
                return weights
            stop.wait(poll_s)
        raise Stopped

    def poll(self) -> Weights | None:
        """To be called before each unroll: newer weights when it is time and there are some."""
        self._unrolls += 1
        return self._fetch() if self._unrolls % self._period == 0 else None

    def _fetch(self) -> Weights | None:
        answer = self._source.fetch(self.version)
        if answer is None:
            return None
        self.fetches += 1
        self.version, data = answer
        return Weights(self.version, np.frombuffer(data, "<f4"))


class VariablePublisher:
    """Publishes snapshots from a thread of its own, so that a learner step never waits for it.

    If the learner outruns the source, snapshots that were not yet sent are replaced by the
    newest: actors want no other.

    Args:
      source: where to publish to.
      stop: set when publishing fails; the error is raised by the next `publish` or `close`.
    """

    def __init__(self, source: WeightsSource, stop: threading.Event) -> None:
        self._source = source
        self._stop = stop
        self._changed = threading.Condition()
        self._next: Weights | None = None
        self._closed = False
        self._error: BaseException | None = None
        self.publishes = 0
        """Snapshots that the source has received."""
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def publish(self, weights: Weights) -> None:
        """Hands over a snapshot, whose array must not change any more.

        Raises:
          Exception: what went wrong when publishing.
        """
        with self._changed:
            if self._error is not None:
                raise self._error
            self._next = weights
            self._changed.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Sends what is pending and ends the thread; False if that took too long.

        Raises:
          Exception: what went wrong when publishing.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if self._error is not None:
            raise self._error
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._closed)
                weights, self._next = self._next, None
            if weights is None:
                return
            try:
                self._source.publish(weights.version, encode(weights.flat))
            except BaseException as error:
                with self._changed:
                    self._error = error
                self._stop.set()
                return
            self.publishes += 1


def encode(flat: Array) -> bytes:
    """The bytes in which weights travel."""
    return np.ascontiguousarray(flat, "<f4").tobytes()


def save_weights(path: Path, weights: Weights) -> None:
    """Writes a snapshot; the file appears whole or not at all."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez(file, version=weights.version, flat=weights.flat)
    partial.replace(path)


def load_weights(path: Path) -> Weights:
    """Reads what `save_weights` wrote."""
    with np.load(path) as data:
        return Weights(int(data["version"]), data["flat"])
