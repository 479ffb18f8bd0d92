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

_PROCESS_TYPES = (lp.LaunchType.LOCAL_MULTI_PROCESSING, lp.LaunchType.VERTEX_AI)


def supervise(work: Callable[[threading.Event], object], grace_s: float = 5.0) -> None:
    """Runs a node's work until it is done, fails, or the program stops.

    Signals reach Python code only in the main thread, and there only between two bytecodes. So
    the work, which waits inside C++, has a thread of its own, and the main thread just watches.

    In a process of its own the node ends here, whatever threads are left: waiting for those that
    sit in C++, or finalising the interpreter under them, can hang or crash a finished node. The
    exit code is 1 if the work raised, with its traceback on stderr, and else 0.

    Args:
      work: gets an event that is set when it must return or raise `Stopped`. It may set the event
        itself.
      grace_s: seconds that the work may take to end after that.

    Raises:
      Exception: what the work raised, if the node is a thread.
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
    while thread.is_alive() and not program_stop.is_set():
        thread.join(0.1)
    stop.set()
    thread.join(grace_s)
    if in_process:
        _exit(thread, errors, grace_s)
    if errors:
        raise errors[0]


def _exit(thread: threading.Thread, errors: list[BaseException], grace_s: float) -> None:
    if thread.is_alive():
        print(f"the node did not stop within {grace_s} s:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback()
    if errors:
        print(FAILURE_MARK, file=sys.stderr)
        traceback.print_exception(type(errors[0]), errors[0], errors[0].__traceback__)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if errors else 0)
