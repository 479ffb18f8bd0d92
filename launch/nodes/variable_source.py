"""The node that serves the weights to the actors."""

from collections.abc import Sequence

import acme
import numpy as np

from headrace.agents.types import Array
from headrace.launch.nodes.supervision import supervise


class VariableSource(acme.VariableSource):
    """Holds the newest snapshot of the weights; every public method is an RPC.

    A node of its own, so that it answers fast while the learner's process is busy. It never
    unpacks the weights.
    """

    def __init__(self) -> None:
        # One tuple, replaced as a whole: a reader on another thread sees one version or the next.
        self._snapshot: tuple[int, bytes] | None = None

    def publish(self, version: int, flat: bytes) -> None:
        """See `WeightsSource.publish`."""
        # A call that was made twice since its answer was late may arrive after the next one.
        if self._snapshot is None or version > self._snapshot[0]:
            self._snapshot = (version, flat)

    def fetch(self, known_version: int) -> tuple[int, bytes] | None:
        """See `WeightsSource.fetch`."""
        snapshot = self._snapshot
        return None if snapshot is None or snapshot[0] == known_version else snapshot

    def get_variables(self, names: Sequence[str]) -> list[Array]:
        """Acme's view: one flat float32 array, whatever the names; empty before the first."""
        snapshot = self._snapshot
        return [] if snapshot is None else [np.frombuffer(snapshot[1], "<f4")]

    def run(self) -> None:
        """Serves until the program stops."""
        supervise(lambda stop: stop.wait())
