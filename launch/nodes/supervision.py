"""How a node runs: work in a thread, and a main thread that can always be told to stop."""

import faulthandler
import os
import sys
import threading
import traceback
from collections.abc import Callable

import launchpad as lp
from launchpad import context

from headrace.agents.types import Stopped

FAILURE_MARK = "The node failed:"
"""Line before the traceback in the log of a node that failed."""

STOPPED, HUNG = 143, 124
"""Exit codes of a node that was told to stop, and of one that was told and did not."""

_PROCESS_TYPES = (lp.LaunchType.LOCAL_MULTI_PROCESSING, lp.LaunchType.VERTEX_AI)


class HungError(RuntimeError):
    """The work of a node did not end when it was told to stop."""


def supervise(
    work: Callable[[threading.Event], object], *, ends_run: bool = False, grace_s: float = 1.5
) -> None:
    """Runs a node's work until it fails or the program stops.

    Signals reach Python code only in the main thread, and there only between two bytecodes. So
    the work, which waits inside C++, has a thread of its own, and the main thread just watches.

    In a process of its own the node ends here, whatever threads are left: waiting for those that
    sit in C++, or finalising the interpreter under them, can hang or crash a finished node. The
    exit code is 1 if the work raised, with its traceback on stderr.

    Args:
      work: gets an event that is set when it must return or raise `Stopped`. It may set the event
        itself.
      ends_run: whether the node ends, with exit code 0, when its work is done. The others then
        wait to be told, so that a node that just ends is known to have been lost.
      grace_s: seconds that the work may take to end when the program stops.

    Raises:
      Exception: what the work raised, if the node is a thread.
      HungError: it did not end in time, if the node is a thread.
    """
    in_process = context.get_context().launch_type in _PROCESS_TYPES
    if in_process:
        faulthandler.enable()
    program_stop, stop = lp.stop_event(), threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work(stop)
        except Stopped:
            return
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="work", daemon=True)
    thread.start()
    while not program_stop.is_set():
        thread.join(0.1)
        if not thread.is_alive():
            if ends_run or errors:
                break
            program_stop.wait(0.1)
    told = program_stop.is_set()
    stop.set()
    thread.join(grace_s)
    hung = thread.is_alive()
    if in_process:
        _exit(errors, told, hung)
    if errors:
        raise errors[0]
    if hung:
        raise HungError(f"did not stop within {grace_s} s")


def _exit(errors: list[BaseException], told: bool, hung: bool) -> None:
    if hung:
        print("The node did not stop in time:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback()
    if errors:
        print(FAILURE_MARK, file=sys.stderr)
        traceback.print_exception(type(errors[0]), errors[0], errors[0].__traceback__)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if errors else HUNG if hung else STOPPED if told else 0)
