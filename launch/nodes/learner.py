"""The node that trains, and holds the queue that it trains from."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import launchpad as lp
import numpy as np
from courier.python.client import StatusNotOk
from launchpad import CourierClient
from launchpad.nodes import base

from headrace.agents.builder import AgentConfig, Builder
from headrace.agents.types import Stopped
from headrace.agents.variables import VariablePublisher, save_weights
from headrace.launch.nodes.reporting import ReportSender
from headrace.launch.nodes.rpc import RemoteWeightsSource
from headrace.launch.nodes.supervision import supervise

if TYPE_CHECKING:
    from headrace.agents.replay import UnrollReader

WEIGHTS_FILE = "weights.npz"

REPORT_PERIOD_S = 0.1

_END_S = 1.0
"""Longest wait for the reporter to end the run."""


class Learner:
    """Trains on what arrives in its queue, and publishes the weights.

    The queue lives in this process: it is read without a copy through gRPC, and there is no
    moment at which one of the two is gone and the other waits for it. Ends by itself, with exit
    code 0, when the budget is used up or the reporter ends the run.

    Args:
      builder: makes the agent's parts.
      seed: root seed of the run.
      max_env_steps: budget in env steps trained; None is no limit.
      threads: of a TensorFlow op; None leaves TensorFlow's settings alone.
      run_dir: where the final weights are written.
      queue_address: to serve the queue on.
      variable_source: takes the weights.
      reporter: takes the records.
      writers: the reporter, too, with a short time-out: knows how many actors are still writing.
    """

    def __init__(
        self,
        builder: Builder[AgentConfig],
        seed: int,
        max_env_steps: int | None,
        threads: int | None,
        run_dir: str,
        queue_address: str,
        variable_source: CourierClient,
        reporter: CourierClient,
        writers: CourierClient,
    ) -> None:
        self._builder = builder
        self._seed = seed
        self._max_env_steps = max_env_steps
        self._threads = threads
        self._run_dir = Path(run_dir)
        self._queue_address = queue_address
        self._variable_source = variable_source
        self._reporter = reporter
        self._writers = writers

    def run(self) -> None:
        """Trains until the run ends."""
        supervise(self._train, ends_run=True, grace_s=3.0)

    def _train(self, stop: threading.Event) -> None:
        if self._threads is not None:
            _limit_threads(self._threads)
        queue = self._builder.make_queue(lp.get_port_from_address(self._queue_address))
        reader = self._builder.make_reader(queue, stop)
        try:
            self._train_on(reader, stop)
        except BaseException:
            stop.set()
            reader.close(closed=lambda: True, timeout_s=1.0)
            raise

    def _train_on(self, reader: UnrollReader, stop: threading.Event) -> None:
        builder = self._builder
        sender = ReportSender(self._reporter, "learner", stop)
        learner = builder.make_learner(reader, np.random.SeedSequence((self._seed, 2)))
        publisher = VariablePublisher(RemoteWeightsSource(self._variable_source, stop), stop)
        publisher.publish(learner.weights())

        totals: dict[str, Any] = {}

        def report() -> None:
            totals.update(learner.counters())
            totals["weight_publishes"] = publisher.publishes
            totals["learner_queue_timeouts"] = reader.timeouts
            totals["reported_at"] = time.time()
            metrics = learner.metrics()
            if metrics and not stop.is_set():
                # Named after what a user sets; the writers' unconfirmed items come on top.
                metrics["queue_size"] = reader.waiting()
            sender.post(totals, metrics=metrics)

        limit = self._max_env_steps or math.inf
        next_report = 0.0
        try:
            while learner.env_steps_trained < limit:
                learner.step()
                if learner.steps == 1:
                    totals["first_step_at"] = time.time()
                    totals["first_step_env_steps"] = learner.env_steps_trained
                if learner.steps % builder.config.broadcast_interval == 0:
                    publisher.publish(learner.weights())
                if time.monotonic() >= next_report:
                    report()
                    next_report = time.monotonic() + REPORT_PERIOD_S
            totals["budget_used"] = True
            report()
            # The answer sets it, and tells the actors too.
            stop.wait(_END_S)
        except Stopped:
            pass  # The budget is not used up.
        finally:
            save_weights(self._run_dir / WEIGHTS_FILE, learner.final_weights())
        publisher.close(timeout_s=1.0)
        stop.set()
        totals["env_steps_queued"] = reader.close(self._all_writers_closed, timeout_s=1.5)
        report()
        sender.close()

    def _all_writers_closed(self) -> bool:
        try:
            return bool(self._writers.open_writers() == 0)
        except StatusNotOk:
            return False


class QueueHandle(base.Handle[str]):
    """Dereferences to the address of the learner's queue."""

    def __init__(self, address: lp.Address) -> None:
        self._address = address

    def dereference(self) -> str:
        """The address, `host:port`."""
        address: str = self._address.resolve()
        return address


class LearnerNode(lp.PyClassNode):
    """A learner whose handle is the address of its queue.

    Args:
      kwargs: of `Learner`, but for `queue_address`.
    """

    def __init__(self, **kwargs: Any) -> None:
        self._queue_address = lp.Address("queue")
        super().__init__(Learner, queue_address=QueueHandle(self._queue_address), **kwargs)
        self.allocate_address(self._queue_address)

    def create_handle(self) -> QueueHandle:
        """See `lp.PyClassNode`."""
        handle: QueueHandle = self._track_handle(QueueHandle(self._queue_address))
        return handle


def _limit_threads(threads: int) -> None:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(2)
