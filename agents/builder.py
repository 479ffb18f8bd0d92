"""The contract between an agent and a launcher: what an agent must supply.

A launcher makes the parts in the processes where they run and joins them; it knows an agent only
through this interface. Parts that TensorFlow runs are imported where they are made, so that a
process without them does not load it.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

import acme
import numpy as np

from headrace.agents.environments import EnvironmentSpec
from headrace.agents.types import Array, ConfigError, Weights

if TYPE_CHECKING:
    import threading

    from headrace.agents.acting import Policy
    from headrace.agents.replay import Queue, UnrollReader, UnrollWriter


class AgentConfig(Protocol):
    """Settings that a launcher reads."""

    @property
    def unroll_length(self) -> int:
        """T."""

    @property
    def update_period(self) -> int:
        """Unrolls between two fetches of weights."""

    @property
    def broadcast_interval(self) -> int:
        """Learner steps between two publications of weights."""


ConfigT = TypeVar("ConfigT", bound=AgentConfig, covariant=True)


def item_envs(envs_per_actor: int, batch_size: int) -> int:
    """Environments in one queue item: the whole block, or the part of it that fits a batch.

    Raises:
      ConfigError: neither number divides the other, or there is no environment.
    """
    if envs_per_actor < 1:
        raise ConfigError("envs_per_actor", envs_per_actor, "must be at least 1")
    if max(envs_per_actor, batch_size) % min(envs_per_actor, batch_size):
        raise ConfigError(
            "batch_size",
            batch_size,
            f"must divide or be a multiple of envs_per_actor = {envs_per_actor}",
        )
    return math.gcd(envs_per_actor, batch_size)


class LearnerStep(NamedTuple):
    """What a learner step did, for the hook that runs after it.

    Attributes:
      metrics: of this step, by name, as in `Learner.metrics`.
      counters: after this step, as of `Learner.counters`.
    """

    metrics: dict[str, float]
    counters: dict[str, int]


class Learner(acme.Learner):
    """Trains on batches from the queue.

    `step` waits for a batch and takes one learner step; it raises `Stopped` when the run ends
    before the batch is there.

    Attributes:
      steps: learner steps done, which is also the version of the weights.
      env_steps_trained: env steps in the batches so far, counted once per pass.
    """

    steps: int
    env_steps_trained: int

    @abc.abstractmethod
    def weights(self) -> Weights:
        """An immutable snapshot of the current weights, which the actors get."""

    def final_weights(self) -> Weights:
        """What is kept of the run: the current weights, if the learner has none that are better."""
        return self.weights()

    @abc.abstractmethod
    def counters(self) -> dict[str, int]:
        """Totals since the start, in env steps unless named otherwise.

        At least: `learner_steps`; `env_steps_trained`, once per pass and with what is replayed;
        and of what was taken from the queue for the first time, `env_steps_received` in all,
        `env_steps_consumed` that have had all their passes, `env_steps_in_hand` that have passes
        left, and `env_steps_dropped` untrained. The first of these is the sum of the other three.
        """

    @abc.abstractmethod
    def metrics(self) -> dict[str, float]:
        """Metrics of the steps since the last call, by name; empty if there were none.

        `steps` is how many these were; names that end in `_max` are maxima over them, the others
        means.
        """

    def get_variables(self, names: Sequence[str]) -> list[Array]:
        """Acme's view of `weights`: one flat array, whatever the names."""
        return [self.weights().flat]


class Builder(abc.ABC, Generic[ConfigT]):
    """Makes the parts of one agent for one environment.

    Args:
      config: the agent's settings.
      spec: the environment's.
      envs_per_actor: environments that each actor steps together.

    Attributes:
      name: of the agent.

    Raises:
      ConfigError: the settings do not fit together.
    """

    name: str

    def __init__(self, config: ConfigT, spec: EnvironmentSpec, envs_per_actor: int) -> None:
        self.config = config
        self.spec = spec
        self.envs_per_actor = envs_per_actor

    @abc.abstractmethod
    def make_queue(self, port: int | None) -> Queue:
        """The learner's in-queue."""

    @abc.abstractmethod
    def make_writer(self, address: str, stop: threading.Event) -> UnrollWriter:
        """An actor's way into the queue; the waits of its writes end with `stop`."""

    @abc.abstractmethod
    def make_reader(self, queue: Queue, stop: threading.Event) -> UnrollReader:
        """The learner's way out of its queue; its waits for a batch end with `stop`."""

    @abc.abstractmethod
    def make_policy(self, seed: np.random.SeedSequence, *, greedy: bool = False) -> Policy:
        """A behaviour policy, or the greedy one for evaluation."""

    @abc.abstractmethod
    def make_learner(self, reader: UnrollReader, seed: np.random.SeedSequence) -> Learner:
        """The learner, with freshly initialised weights."""

    def after_train_step(self, learner: Learner, step: LearnerStep) -> None:
        """A hook that runs in the learner's process at the end of each learner step.

        It may change the learner's state, before the step's weights are published. What it raises
        is the learner's error. Does nothing unless overridden.

        Args:
          learner: from `make_learner`.
          step: what the step did.
        """
