"""Runs a program on this machine, and lets nothing of it hang, hide or stay behind.

Launchpad supplies the nodes, their addresses and the entry of each process; the processes are
supervised here, since its own local launcher does not say which node failed or why, kills itself
together with nodes that are slow to stop, and leaves orphans when it is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import launchpad as lp
from absl import flags
from launchpad.launch import worker_manager

from headrace.launch.nodes.supervision import FAILURE_MARK, HUNG, STOPPED, HungError
from headrace.launch.program import ACTOR, LEARNER, REPORTER, VARIABLE_SOURCE

STOP_ORDER = (ACTOR, LEARNER, VARIABLE_SOURCE, REPORTER)
"""Writers before the queue that they write to, and the reporter when all have reported."""

_STOP_S = {ACTOR: 2.0, LEARNER: 3.5, VARIABLE_SOURCE: 2.0, REPORTER: 2.0}
"""Seconds that a group may take to stop before it is killed: more than a node's own grace, and
together below the 10 s promised."""

_RESULTS = (LEARNER, REPORTER)
"""Groups that write what a run is for when they stop."""

_IMPATIENT_S = 1.0
_POLL_S = 0.1
_PR_SET_PDEATHSIG = 1
_SIGNALLED = (-signal.SIGTERM, -signal.SIGKILL)

# One thread each: a node's share of the machine is set by the number of nodes.
_LIGHT_ENV = {
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
_NODE_ENV = {
    LEARNER: {"TF_CPP_MIN_LOG_LEVEL": "2"},
    ACTOR: _LIGHT_ENV,
    VARIABLE_SOURCE: _LIGHT_ENV,
    REPORTER: _LIGHT_ENV,
}


class NodeError(RuntimeError):
    """A node failed.

    Attributes:
      node: its name.
      details: its traceback, or the end of its log.
    """

    def __init__(self, node: str, summary: str, details: str) -> None:
        super().__init__(f"{node} {summary}")
        self.node = node
        self.details = details


class Interrupted(Exception):  # noqa: N818  # asked for, not an error
    """A signal asked for the end of the run.

    Attributes:
      signum: the signal.
      failures: of nodes that did not stop as they should.
      run_dir: what the run has written is there.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum
        self.failures: list[NodeError] = []
        self.run_dir: Path | None = None


class _Node(Protocol):
    """A running node."""

    name: str
    group: str
    log: Path
    hung: bool
    """Whether it has ended without having stopped when it was told to."""

    def is_running(self) -> bool: ...

    def failure(self) -> NodeError | None:
        """Why the node, which has ended, did not end well."""

    def stop(self) -> None:
        """Asks it to stop."""

    def kill(self) -> None: ...


def run(
    program: lp.Program,
    launch_type: str,
    log_dir: Path,
    on_poll: Callable[[], None] = lambda: None,
) -> None:
    """Runs a program until its learner has finished, then stops the other nodes.

    Args:
      program: from `make_program`.
      launch_type: `processes` or `threads`.
      log_dir: gets a file per node, `<node>.log`. If the nodes are threads, one file, `native.log`,
        gets what C++ libraries print; Python's output stays where it is.
      on_poll: called about ten times per second.

    Raises:
      NodeError: a node failed; every node has been stopped.
      Interrupted: SIGINT, SIGTERM or SIGHUP came; every node has been stopped.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    output = contextlib.nullcontext() if launch_type == "processes" else _native_stderr_to(log_dir)
    with _Signals() as received, output:
        nodes: list[_Node] = []
        try:
            start = _start_processes if launch_type == "processes" else _start_threads
            for node in start(program, log_dir):
                nodes.append(node)
                received.raise_if_any()
            _watch(nodes, received, on_poll)
        except Interrupted as interrupt:
            interrupt.failures = _stop(nodes, received)
            raise
        except BaseException:
            _stop(nodes, received)
            raise
        if failures := _stop(nodes, received):
            raise failures[0]


def _watch(nodes: list[_Node], received: _Signals, on_poll: Callable[[], None]) -> None:
    """Returns when the learner has ended well."""
    while True:
        received.raise_if_any()
        ended = [node for node in nodes if not node.is_running()]
        for node in ended:
            if failure := node.failure():
                raise failure
            if node.group != LEARNER:
                raise NodeError(node.name, "ended before the run did", "")
        if ended:
            return
        on_poll()
        time.sleep(_POLL_S)


def _stop(nodes: list[_Node], received: _Signals) -> list[NodeError]:
    """Stops the nodes in order; returns what went wrong with them."""
    failures: list[NodeError] = []
    for group in STOP_ORDER:
        members = [node for node in nodes if node.group == group]
        for node in members:
            if node.is_running():
                node.stop()
        deadline = time.monotonic() + _STOP_S[group]
        while any(node.is_running() for node in members):
            if received.impatient or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        for node in members:
            if node.is_running():
                node.kill()
            if failure := node.failure():
                failures.append(failure)
            elif node.hung:
                late = NodeError(node.name, f"did not stop in time; its log is {node.log}", "")
                if group in _RESULTS:
                    failures.append(late)
                else:
                    print(f"warning: {late}", file=sys.stderr)
    return failures


class _Signals:
    """The signals that ask for an end, while it is entered. Outside the main thread none come."""

    def __init__(self) -> None:
        self._received: list[tuple[int, float]] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                self._before[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def raise_if_any(self) -> None:
        """Raises Interrupted if a signal has come."""
        if self._received:
            raise Interrupted(self._received[0][0])

    @property
    def impatient(self) -> bool:
        """Whether Ctrl-C was pressed once more. Twice at once is taken for once."""
        interrupts = [at for signum, at in self._received if signum == signal.SIGINT]
        return len(interrupts) > 1 and interrupts[-1] - self._received[0][1] > _IMPATIENT_S

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._received.append((signum, time.monotonic()))


# Processes.


@dataclasses.dataclass
class _ProcessNode:
    name: str
    group: str
    process: subprocess.Popen[bytes]
    log: Path
    asked_to_stop: bool = False
    hung: bool = False

    def is_running(self) -> bool:
        running = self.process.poll() is None
        self.hung |= self.process.returncode == HUNG
        return running

    def failure(self) -> NodeError | None:
        code = self.process.returncode
        # While it starts, a node has no handler yet and dies of the signal.
        if code == 0 or (self.asked_to_stop and code in (STOPPED, HUNG, *_SIGNALLED)):
            return None
        if code == STOPPED:
            how = "was stopped from outside"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"failed ({code})"
        return NodeError(self.name, f"{how}; its log is {self.log}", _error_in(self.log))

    def stop(self) -> None:
        self.asked_to_stop = True
        self.process.terminate()

    def kill(self) -> None:
        self.hung = True
        # Its session: environments may have processes of their own.
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _start_processes(program: lp.Program, log_dir: Path) -> Iterator[_Node]:
    _prepare(program, lp.LaunchType.LOCAL_MULTI_PROCESSING)
    # A node can import whatever its launcher can.
    import_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    libc = ctypes.CDLL(None)

    def die_with_launcher() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    for group, nodes in program.groups.items():
        commands = nodes[0].to_executables(nodes, group, nodes[0].launch_context)
        for index, command in enumerate(commands):
            name = f"{group}_{index}" if group == ACTOR else group
            log = log_dir / f"{name}.log"
            with log.open("wb") as output:
                process = subprocess.Popen(
                    command.command_as_list,
                    env={**os.environ, **_NODE_ENV[group], "PYTHONPATH": import_path},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    # Ctrl-C reaches the launcher only, which stops the nodes in order.
                    start_new_session=True,
                    preexec_fn=die_with_launcher,
                )
            yield _ProcessNode(name, group, process, log)


def _error_in(log: Path) -> str:
    """What a log says of the node's failure: from its first traceback on, or else its end."""
    lines = log.read_text(errors="replace").splitlines()
    first = next((i for i, line in enumerate(lines) if "Traceback (most recent" in line), None)
    lines = lines[-20:] if first is None else lines[first:][-200:]
    return "\n".join(line for line in lines if line != FAILURE_MARK).strip()


# Threads.

_NATIVE_LOG = "native.log"


class _ThreadNode:
    def __init__(self, name: str, group: str, function: Callable[[], Any], log: Path) -> None:
        self.name = name
        self.group = group
        self.log = log
        self._function = function
        self.hung = False
        self._ended = threading.Event()
        self._error: BaseException | None = None
        # A manager for each, so that each can be stopped alone.
        with _signal_handlers_kept():
            self._manager = worker_manager.WorkerManager(register_signals=False)
        self._manager.thread_worker(name, self._run)

    def is_running(self) -> bool:
        return not self._ended.is_set()

    def failure(self) -> NodeError | None:
        if self._error is None:
            return None
        details = "".join(traceback.format_exception(None, self._error, self._error.__traceback__))
        failure = NodeError(self.name, "failed", details)
        failure.__cause__ = self._error
        return failure

    def stop(self) -> None:
        self._manager.stop_event().set()

    def kill(self) -> None:
        self.hung = True

    def _run(self) -> None:
        try:
            self._function()
        except HungError:
            self.hung = True
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Undoes what the first WorkerManager of a process does to the signals whatever its options."""
    signums = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGALRM)
    before = {signum: signal.getsignal(signum) for signum in signums}
    yield
    for signum, handler in before.items():
        if signal.getsignal(signum) is not handler:
            signal.signal(signum, handler)


@contextlib.contextmanager
def _native_stderr_to(log_dir: Path) -> Iterator[None]:
    """Keeps the chatter of C++ libraries from the terminal, but not what Python prints."""
    # For what is left of the libraries after the run.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    python_stderr = sys.stderr
    terminal = os.dup(2)
    with (log_dir / _NATIVE_LOG).open("wb") as log, os.fdopen(os.dup(2), "w", 1) as stderr:
        os.dup2(log.fileno(), 2)
        if python_stderr is sys.__stderr__:
            sys.stderr = stderr
        try:
            yield
        finally:
            sys.stderr = python_stderr
            os.dup2(terminal, 2)
            os.close(terminal)


def _start_threads(program: lp.Program, log_dir: Path) -> Iterator[_Node]:
    _prepare(program, lp.LaunchType.LOCAL_MULTI_THREADING)
    for group, nodes in program.groups.items():
        functions = nodes[0].to_executables(nodes, group, nodes[0].launch_context)
        for index, function in enumerate(functions):
            name = f"{group}_{index}" if group == ACTOR else group
            yield _ThreadNode(name, group, function, log_dir / _NATIVE_LOG)


def _prepare(program: lp.Program, launch_type: lp.LaunchType) -> None:
    """What `lp.launch` does before it starts the nodes."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    for node in program.get_all_nodes():
        node._initialize_context(launch_type, launch_config=None)
    for label, nodes in program.groups.items():
        for node in nodes:
            for handle in node.input_handles:
                handle.connect(node, label)
    for node in program.get_all_nodes():
        node.bind_addresses()
