"""Starts real `headrace train` commands and looks at what they leave behind."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

COMMAND = [str(Path(sys.executable).with_name("headrace")), "train"]
# Small and quick, without a target.
SMALL = ["--envs-per-actor", "4", "--unroll-length", "8", "--batch-size", "8"]


class Run:
    """A running command.

    Args:
      folder: working directory; the run directory is `run` in it.
      flags: of the command.
    """

    def __init__(self, folder, *flags):
        self.run_dir = folder / "run"
        temporary = folder / "tmp"
        temporary.mkdir()
        self._temporary = temporary
        shutil.copy(Path(__file__).with_name("envs.py"), folder)
        self._out = folder / "stdout"
        self._err = folder / "stderr"
        self._shared_memory = set(os.listdir("/dev/shm"))
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = psutil.Popen(
                [*COMMAND, "--run-dir", str(self.run_dir), *flags],
                cwd=folder,
                env={**os.environ, "TMPDIR": str(temporary)},
                stdout=out,
                stderr=err,
            )
        self._seen = {}

    def children(self):
        """The nodes' processes, those that were seen before and are orphans now included."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in self.process.children(recursive=True):
                self._seen[child.pid] = child
        return [child for child in self._seen.values() if is_running(child)]

    def node(self, name):
        """The process that writes `<name>.log`."""
        log = str(self.run_dir / "logs" / f"{name}.log")
        for child in self.children():
            with contextlib.suppress(psutil.Error):
                if os.readlink(f"/proc/{child.pid}/fd/2") == log:
                    return child
        raise LookupError(name)

    def reports(self):
        path = self.run_dir / "metrics.jsonl"
        if not path.exists():
            return []
        lines = path.read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def wait_for_training(self, steps=1, timeout_s=60):
        """Waits until the learner has done `steps`; remembers the processes that it saw."""
        deadline = time.monotonic() + timeout_s
        while not (self.reports() and self.reports()[-1]["learner_steps"] >= steps):
            assert self.process.poll() is None, self.stderr()
            assert time.monotonic() < deadline, "no training"
            self.children()
            time.sleep(0.05)

    def wait(self, timeout_s=120):
        """Exit code."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still running after {timeout_s} s"
            self.children()
            time.sleep(0.02)
        return self.process.returncode

    def summary(self):
        return json.loads((self.run_dir / "summary.json").read_text())

    def stdout(self):
        return self._out.read_text()

    def stderr(self):
        return self._err.read_text()

    def assert_nothing_left(self):
        """No process, no shared memory, no temporary file, no half-written file."""
        assert [child.cmdline() for child in self.children()] == []
        assert os.listdir(self._temporary) == []
        new = set(os.listdir("/dev/shm")) - self._shared_memory
        assert not new
        assert list(self.run_dir.glob("*.partial")) == []

    def clean_up(self):
        for process in [self.process, *self.children()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)


def is_running(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False
