"""How the other nodes report to the reporter."""

import json
import threading
from collections.abc import Iterable
from typing import Any

from launchpad import CourierClient

from headrace.agents.types import Episode, Stopped
from headrace.launch.nodes.rpc import Remote


class ReportSender:
    """Sends one node's records to the reporter, from a thread of its own.

    Counters are totals since the node's start, so a later record replaces an earlier one, and
    episodes are sent until they are acknowledged: a slow or absent reporter loses nothing and
    delays nobody. The reporter's answer says whether the run is to end; then `stop` is set.

    Args:
      client: of the reporter.
      sender: the node's name.
      stop: ends the waits; set when the reporter ends the run.
      period_s: seconds between two records.
    """

    def __init__(
        self, client: CourierClient, sender: str, stop: threading.Event, period_s: float = 0.1
    ) -> None:
        self._remote = Remote(client, "reporter", stop)
        # Goes on after `stop`: the last record is sent then.
        self._last_remote = Remote(client, "reporter", threading.Event())
        self._sender = sender
        self._stop = stop
        self._period_s = period_s
        self._lock = threading.Lock()
        self._totals: dict[str, Any] = {}
        self._metrics: list[dict[str, float]] = []
        self._episodes: list[Episode] = []
        self._sequence = 0
        self._unanswered: tuple[int, str] | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="reporting", daemon=True)
        self._thread.start()

    def post(
        self,
        totals: dict[str, Any],
        episodes: Iterable[Episode] = (),
        metrics: dict[str, float] | None = None,
    ) -> None:
        """Adds to the next record.

        Args:
          totals: counters since the node's start; replace those of the same names.
          episodes: that finished since the last post.
          metrics: as from `Learner.metrics`.

        Raises:
          Exception: what went wrong when the last record was sent.
        """
        if self._error is not None:
            raise self._error
        with self._lock:
            self._totals.update(totals)
            self._episodes.extend(episodes)
            if metrics:
                self._metrics.append(metrics)

    def close(self) -> None:
        """Ends the thread and sends what is left.

        Raises:
          ConnectionError: the reporter did not take it.
        """
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        self._send(self._last_remote)

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._period_s):
                if self._send(self._remote):
                    self._stop.set()
        except Stopped:
            return
        except BaseException as error:
            self._error = error
            self._stop.set()

    def _send(self, remote: Remote) -> bool:
        """Sends a record; first, as it was, one whose answer did not arrive."""
        if self._unanswered is not None:
            self._send_unanswered(remote)
        with self._lock:
            record = {
                "totals": self._totals,
                "episodes": self._episodes,
                "metrics": self._metrics,
            }
            self._sequence += 1
            self._unanswered = self._sequence, json.dumps(record)
            self._episodes, self._metrics = [], []
        return self._send_unanswered(remote)

    def _send_unanswered(self, remote: Remote) -> bool:
        assert self._unanswered is not None
        ends: bool = remote.call("record", self._sender, *self._unanswered)
        self._unanswered = None
        return ends
