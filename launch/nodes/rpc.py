"""Calls to other nodes: bounded, retried, and ended by the stop event."""

import threading
import time
from typing import Any

from courier.python.client import StatusNotOk
from launchpad import CourierClient, CourierHandle

from headrace.agents.types import Stopped

CALL_TIMEOUT_S = 3.0
"""Longest wait in one Courier call. Courier itself would wait for ever for a dead server."""

GIVE_UP_S = 30.0
"""A node that has not answered for so long is taken for dead."""

_AWAY = ("CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE")

_PLAIN = (bool, int, float, str, bytes, type(None))


def bounded(handle: CourierHandle, timeout_s: float = CALL_TIMEOUT_S) -> CourierHandle:
    """Gives the handle's clients a time-out per call."""
    handle.set_client_kwargs(call_timeout=timeout_s)
    return handle


class Remote:
    """Calls one node's methods.

    Args:
      client: from a `bounded` handle.
      name: of the node, for error texts.
      stop: ends the retries.
    """

    def __init__(self, client: CourierClient, name: str, stop: threading.Event) -> None:
        self._client = client
        self._name = name
        self._stop = stop

    def call(self, method: str, *args: Any) -> Any:
        """Calls `method`, again and again while the node is away.

        A call whose answer got lost is made twice, so methods must be idempotent.

        Raises:
          Stopped: the stop event was set while the node was away.
          TypeError: an argument is not a plain Python value. Courier never answers a call with a
            NumPy argument.
          ConnectionError: the node was away for `GIVE_UP_S`.
          RuntimeError: the method raised; the text holds the remote traceback.
        """
        for arg in args:
            if type(arg) not in _PLAIN:
                raise TypeError(f"{method}: argument {arg!r} of {type(arg)} must be a plain value")
        deadline = time.monotonic() + GIVE_UP_S
        while True:
            try:
                return getattr(self._client, method)(*args)
            except StatusNotOk as error:
                if error.code.name not in _AWAY:
                    raise RuntimeError(f"{self._name}.{method} failed: {error}") from error
                if self._stop.is_set():
                    raise Stopped from error
                if time.monotonic() > deadline:
                    raise ConnectionError(
                        f"{self._name} has not answered for {GIVE_UP_S:.0f} s: {error}"
                    ) from error
            self._stop.wait(0.05)


class RemoteWeightsSource:
    """A `WeightsSource` in another node."""

    def __init__(self, client: CourierClient, stop: threading.Event) -> None:
        self._remote = Remote(client, "variable_source", stop)

    def publish(self, version: int, flat: bytes) -> None:
        """See `WeightsSource.publish`."""
        self._remote.call("publish", version, flat)

    def fetch(self, known_version: int) -> tuple[int, bytes] | None:
        """See `WeightsSource.fetch`."""
        answer: tuple[int, bytes] | None = self._remote.call("fetch", known_version)
        return answer
