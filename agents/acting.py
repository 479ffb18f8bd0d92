"""Acting: policy inference and the unroll loop of one actor."""

import math
import threading
from typing import Any, NamedTuple, Protocol

import numpy as np
import tree

from headrace.agents.environments import Environment
from headrace.agents.networks import Network, unflatten
from headrace.agents.types import Array, Episode, Stopped, Unroll, Weights


class Decision(NamedTuple):
    """Actions of a behaviour policy.

    Attributes:
      action: [E] int64, counted from 0.
      log_prob: [E] float32, log-probability of each action.
    """

    action: Array
    log_prob: Array


class Policy(Protocol):
    """A behaviour policy for E environments at once."""

    def set_weights(self, weights: Weights) -> None:
        """Takes over new weights; they hold until the next call."""

    def __call__(self, observation: Any) -> Decision:
        """Chooses an action for each of the observations, a nest of [E, ...]."""


class CategoricalPolicy:
    """Samples discrete actions from a network's logits, in NumPy.

    Args:
      network: computes the logits.
      seed: of the sampling stream.
      greedy: take the most likely action instead of sampling.
    """

    def __init__(
        self, network: Network, seed: int | np.random.SeedSequence, *, greedy: bool = False
    ) -> None:
        self._network = network
        self._rng = np.random.default_rng(seed)
        self._greedy = greedy
        self._params: list[Array] | None = None

    def set_weights(self, weights: Weights) -> None:
        """See `Policy.set_weights`."""
        self._params = unflatten(weights.flat, self._network.shapes)

    def __call__(self, observation: Any) -> Decision:
        """See `Policy.__call__`.

        Raises:
          FloatingPointError: a logit is not finite, or the observation is not.
        """
        if self._params is None:
            raise RuntimeError("the policy has no weights yet")
        logits = self._network.policy(self._params, observation, np)
        logits = logits - logits.max(axis=1, keepdims=True)
        cumulative = np.cumsum(np.exp(logits), axis=1)
        total = cumulative[:, -1]
        if not math.isfinite(total.sum()):
            if not all(np.isfinite(part).all() for part in tree.flatten(observation)):
                raise FloatingPointError("the environment gave an observation that is not finite")
            raise FloatingPointError("the policy's logits are not finite")
        if self._greedy:
            action = logits.argmax(axis=1)
        else:
            # Inverse transform sampling. The draw is < 1 but the product may round up to the
            # total, which would count one action too many.
            threshold = self._rng.random(len(logits), np.float32) * total
            action = (cumulative <= threshold[:, None]).sum(axis=1)
            action = np.minimum(action, logits.shape[1] - 1)
        log_prob = logits[np.arange(len(logits)), action] - np.log(total)
        return Decision(action, log_prob)


class UnrollCollector:
    """Steps E environments under a policy and cuts their experience into unrolls.

    Args:
      environment: the environments.
      policy: the behaviour policy. Its weights may change between unrolls, never within one.
      unroll_length: T.
      actor_id: goes into every unroll.
      stop: ends an unroll that is being made.
    """

    def __init__(
        self,
        environment: Environment,
        policy: Policy,
        unroll_length: int,
        actor_id: int,
        stop: threading.Event,
    ) -> None:
        self._environment = environment
        self._policy = policy
        self._length = unroll_length
        self._actor_id = actor_id
        self._stop = stop
        spec, rows = environment.spec, (unroll_length, environment.num_envs)
        self._observation = _zeros(spec.observation, (unroll_length + 1, environment.num_envs))
        self._final_observation = (
            _zeros(spec.observation, rows) if spec.separate_final_observation else ()
        )
        self._action = np.zeros(rows, np.int64)
        self._reward = np.zeros(rows, np.float32)
        self._terminated = np.zeros(rows, bool)
        self._truncated = np.zeros(rows, bool)
        self._valid = np.zeros(rows, bool)
        self._log_prob = np.zeros(rows, np.float32)
        self._return = np.zeros(environment.num_envs)
        self._steps = np.zeros(environment.num_envs, np.int64)
        _put(self._observation, -1, environment.reset())

    def collect(self, weights_version: int) -> tuple[Unroll, list[Episode]]:
        """Runs T steps.

        Args:
          weights_version: version of the weights that the policy has now.

        Returns:
          The unroll, whose arrays are reused by the next call, and the episodes that ended in
          it. `sequence` is 0: the writer numbers what it writes.

        Raises:
          Stopped: the stop event was set before the unroll was complete.
        """
        episodes: list[Episode] = []
        _put(self._observation, 0, _get(self._observation, -1))
        for part in tree.flatten(self._final_observation):
            part.fill(0)
        for t in range(self._length):
            if self._stop.is_set():
                raise Stopped
            self._step(t, episodes)
        unroll = Unroll(
            observation=self._observation,
            action=self._action,
            reward=self._reward,
            terminated=self._terminated,
            truncated=self._truncated,
            valid=self._valid,
            behaviour_log_prob=self._log_prob,
            final_observation=self._final_observation,
            weights_version=np.int64(weights_version),
            actor_id=np.int64(self._actor_id),
            sequence=np.int64(0),
        )
        return unroll, episodes

    def _step(self, t: int, episodes: list[Episode]) -> None:
        action, self._log_prob[t] = self._policy(_get(self._observation, t))
        step = self._environment.step(action)
        self._action[t] = action
        _put(self._observation, t + 1, step.observation)
        self._reward[t] = step.reward
        self._terminated[t] = step.terminated
        self._truncated[t] = step.truncated
        self._valid[t] = step.valid
        if step.final_observation is not None:
            _put(self._final_observation, t, step.final_observation)
        self._return += step.reward
        self._steps += step.valid
        ended = step.terminated | step.truncated
        if ended.any():
            for i in np.flatnonzero(ended):
                episodes.append(Episode(float(self._return[i]), int(self._steps[i])))
            self._return[ended] = 0.0
            self._steps[ended] = 0


def _zeros(spec: Any, rows: tuple[int, ...]) -> Any:
    return tree.map_structure(lambda s: np.zeros((*rows, *s.shape), s.dtype), spec)


def _get(nest: Any, t: int) -> Any:
    if isinstance(nest, np.ndarray):
        return nest[t]
    return tree.map_structure(lambda x: x[t], nest)


def _put(nest: Any, t: int, row: Any) -> None:
    if isinstance(nest, np.ndarray):
        nest[t] = row
        return
    for x, part in zip(tree.flatten(nest), tree.flatten(row), strict=True):
        x[t] = part
