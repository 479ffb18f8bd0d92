"""Nodes without TensorFlow, for tests of the supervisor. Imported by the nodes' processes."""

import os
import signal
import time
from pathlib import Path

from headrace.launch.nodes.supervision import supervise
from headrace.launch.program import LEARNER


class Toy:
    """Does what its name says, and writes down when it was stopped."""

    def __init__(self, behaviour, folder, name):
        self._behaviour = behaviour
        self._path = Path(folder) / name

    def run(self):
        if self._behaviour == "fail_before_supervision":
            try:
                raise OSError("the cause")
            except OSError as error:
                raise ValueError("broken before supervision") from error
        ends_run = self._path.name == LEARNER
        supervise(getattr(self, "_" + self._behaviour), ends_run=ends_run)

    def _wait(self, stop):
        self._path.with_suffix(".started").touch()
        stop.wait()
        self._path.with_suffix(".stopped").write_text(str(time.monotonic()))

    def _finish(self, stop):
        # Not before the others are there to be stopped.
        while len(list(self._path.parent.glob("*.started"))) < 3:
            stop.wait(0.02)

    def _finish_late(self, stop):
        self._finish(stop)
        stop.wait(2)

    def _terminate(self, stop):
        os.kill(os.getpid(), signal.SIGTERM)
        stop.wait()

    def _fail(self, stop):
        raise ValueError("original error")

    def _fail_twice(self, stop):
        try:
            raise ValueError("original error")
        finally:
            raise OSError("error while cleaning up")

    def _fail_when_stopped(self, stop):
        self._path.with_suffix(".started").touch()
        stop.wait()
        raise ValueError("error while stopping")

    def _exit(self, stop):
        os._exit(3)

    def _kill(self, stop):
        os.kill(os.getpid(), signal.SIGKILL)

    def _hang(self, stop):
        self._path.with_suffix(".started").touch()
        while True:
            time.sleep(0.1)

    def _exit_well(self, stop):
        os._exit(0)

    def _return(self, stop):
        self._path.with_suffix(".started").touch()
