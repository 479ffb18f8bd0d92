"""The IMPALA learner."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from headrace.agents.builder import Learner, LearnerStep
from headrace.agents.impala.config import IMPALAConfig
from headrace.agents.impala.losses import Transitions, impala_loss
from headrace.agents.networks import Network, unflatten
from headrace.agents.optimizers import make_adam, make_rmsprop
from headrace.agents.passes import PassBuffer
from headrace.agents.schedules import piecewise_linear
from headrace.agents.types import Array, TrainBatch, Unroll, Weights


class BatchReader(Protocol):
    """Where train batches come from."""

    def next(self) -> TrainBatch:
        """Waits for the next batch. Raises `Stopped` if the run ends before."""


class IMPALALearner(Learner):
    """Minimises the IMPALA loss, one compiled function per learner step.

    Args:
      config: settings.
      network: policy and value function.
      params: initial parameters, in the network's order.
      reader: train batches.
      after_train_step: called at the end of each learner step, with this learner.

    Attributes:
      variables: the network's parameters, in its order. Assign them with `set_weights`.
    """

    def __init__(
        self,
        config: IMPALAConfig,
        network: Network,
        params: Sequence[Array],
        reader: BatchReader,
        after_train_step: Callable[[Learner, LearnerStep], None] | None = None,
    ) -> None:
        self._config = config
        self._network = network
        self._reader = reader
        self._after_train_step = after_train_step
        self._passes = PassBuffer(
            self._take,
            config.minibatch_buffer_size,
            config.num_sgd_iter,
            warm_start=config.warm_start_passes,
        )
        self.variables = [tf.Variable(p, name=f"param_{i}") for i, p in enumerate(params)]
        self._optimizer = _make_optimizer(config, self.variables)
        if config.separate_value_optimizer:
            self._value_optimizer = make_adam(self.variables, config.epsilon)
            self._value_optimizer.learning_rate.assign(config.value_learning_rate)
        # Tracing with autograph would rewrite zip, and there is no Python control flow to convert.
        self._update = tf.function(
            self._update_step, autograph=False, jit_compile=config.jit_compile
        )
        self._flat = np.concatenate([np.asarray(p, np.float32).ravel() for p in params])
        self._average = self._flat
        self._metric_names: list[str] = []
        self._recent: list[_Step] = []
        self._since = time.perf_counter()
        self.steps = 0
        self.env_steps_trained = 0
        self._received = self._replayed = self._consumed = self._too_old = self._dropped = 0

    def step(self) -> None:
        """Waits for a batch if it needs one, and takes one optimiser step.

        Raises:
          Stopped: the run ended before the batch was there.
          FloatingPointError: the step left the finite numbers.
          Exception: what `after_train_step` raised.
        """
        started = time.perf_counter()
        (batch, count), last = self._passes.next()
        dequeued = time.perf_counter()
        learning_rate, entropy_cost = self._coefficients()
        flat, metrics = self._update(
            batch.unrolls,
            tf.constant(learning_rate, tf.float32),
            tf.constant(entropy_cost, tf.float32),
        )
        values = metrics.numpy()
        if not np.isfinite(values).all():
            found = dict(zip(self._metric_names, values.tolist(), strict=True))
            raise FloatingPointError(f"learner step {self.steps} is not finite: {found}")
        self._flat = flat.numpy()
        self._note(batch, values, dequeued - started)
        self.steps += 1
        self.env_steps_trained += count.fresh + count.replayed
        self._consumed += count.fresh * last
        if self._after_train_step is not None:
            names = zip(self._metric_names, values.tolist(), strict=True)
            self._after_train_step(self, LearnerStep(dict(names), self.counters()))
        share = 1 / min(self.steps, self._config.average_steps)
        self._average = self._average + np.float32(share) * (self._flat - self._average)

    def set_weights(self, flat: Array) -> None:
        """Replaces the parameters, [P] float32, for instance from `after_train_step`.

        Raises:
          ValueError: the number of parameters is another.
        """
        params = unflatten(flat, self._network.shapes)
        for variable, value in zip(self.variables, params, strict=True):
            variable.assign(value)
        self._flat = np.array(flat, np.float32)

    def weights(self) -> Weights:
        """See `Learner.weights`."""
        return Weights(self.steps, self._flat)

    def final_weights(self) -> Weights:
        """A running mean of the weights (Polyak and Juditsky 1992).

        It is the plain mean of all steps until there are `average_steps`, then each step moves it
        by 1 / average_steps towards the newest weights.
        """
        return Weights(self.steps, self._average)

    def metrics(self) -> dict[str, float]:
        """See `Learner.metrics`.

        `ms_per_step` is the wall time from one learner step to the next; `wait_ms_per_step` is the
        part of it that getting the batch takes. `policy_lag` is over queue items, `replay_age` over
        those of them that were replayed, both in learner steps.
        """
        if not self._recent:
            return {}
        recent, self._recent = self._recent, []
        since, self._since = self._since, time.perf_counter()
        columns = zip(self._metric_names, np.stack([x.metrics for x in recent]).T, strict=True)
        means = {
            name: float(column.max() if name.endswith("_max") else column.mean())
            for name, column in columns
        }
        lags = np.concatenate([x.lags for x in recent])
        means["policy_lag_mean"] = float(lags.mean())
        means["policy_lag_max"] = float(lags.max())
        replayed = lags[np.concatenate([x.replayed for x in recent])]
        if len(replayed):
            means["replay_age_mean"] = float(replayed.mean())
            means["replay_age_max"] = float(replayed.max())
        means["ms_per_step"] = 1000 * (self._since - since) / len(recent)
        means["wait_ms_per_step"] = 1000 * sum(x.wait_s for x in recent) / len(recent)
        return means | {"steps": len(recent)}

    def counters(self) -> dict[str, int]:
        """See `Learner.counters`."""
        return {
            "learner_steps": self.steps,
            "env_steps_trained": self.env_steps_trained,
            "env_steps_received": self._received,
            "env_steps_replayed": self._replayed,
            "env_steps_consumed": self._consumed,
            "env_steps_too_old": self._too_old,
            "env_steps_dropped": self._dropped,
            "env_steps_in_hand": sum(count.fresh for _, count in self._passes.held),
        }

    def _coefficients(self) -> tuple[float, float]:
        """Learning rate and entropy cost of the next learner step."""
        config, step = self._config, self.env_steps_trained
        learning_rate, entropy_cost = config.learning_rate, config.entropy_cost
        if config.learning_rate_schedule:
            learning_rate = piecewise_linear(config.learning_rate_schedule, step)
        if config.entropy_cost_schedule:
            entropy_cost = piecewise_linear(config.entropy_cost_schedule, step)
        return learning_rate, entropy_cost

    def _take(self) -> tuple[TrainBatch, _Count]:
        """The next batch that has something to train on."""
        while True:
            batch = self._reader.next()
            unrolls, replayed = batch.unrolls, np.asarray(batch.replayed)
            valid, versions = unrolls.valid.numpy(), unrolls.weights_version.numpy()
            received = _count(valid, replayed)
            self._received += received.fresh
            self._replayed += received.replayed
            limit = self._config.max_policy_lag
            too_old = np.zeros_like(replayed) if limit is None else self.steps - versions > limit
            if not too_old.any():
                return batch, received
            self._too_old += _count(valid[too_old], replayed[too_old]).fresh
            if self._config.too_old == "train":
                return batch, received
            valid = valid & ~too_old[:, None, None]
            kept = _count(valid, replayed)
            self._dropped += received.fresh - kept.fresh
            if kept.fresh + kept.replayed:
                unrolls = unrolls._replace(valid=tf.constant(valid))
                return batch._replace(unrolls=unrolls), kept

    def _note(self, batch: TrainBatch, metrics: Array, wait_s: float) -> None:
        versions = batch.unrolls.weights_version.numpy()
        step = _Step(metrics, self.steps - versions, np.asarray(batch.replayed), wait_s)
        self._recent.append(step)

    def _update_step(
        self,
        items: Unroll,
        learning_rate: tf.Tensor,
        entropy_cost: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """One optimiser step: the new weights [P], and metrics in the order of `_metric_names`."""
        config, batch = self._config, merge_items(items)
        with tf.GradientTape(persistent=config.separate_value_optimizer) as tape:
            losses = impala_loss(self._forward(batch), config, entropy_cost)
            loss = losses.policy + losses.value
        self._optimizer.learning_rate.assign(learning_rate)
        if config.separate_value_optimizer:
            gradients = _clip(self._gradients(tape, losses.policy), config.max_gradient_norm)
            values = _clip(self._gradients(tape, losses.value), config.max_gradient_norm)
            self._optimizer.apply(gradients.clipped, self.variables)
            self._value_optimizer.apply(values.clipped, self.variables)
            extra = {"grad_gnorm_vf_unclipped": values.norm, "grad_gnorm_vf": values.clipped_norm}
        else:
            gradients = _clip(self._gradients(tape, loss), config.max_gradient_norm)
            self._optimizer.apply(gradients.clipped, self.variables)
            extra = {}
        metrics = losses.metrics | {
            "total_loss": loss,
            "cur_lr": learning_rate,
            "entropy_coeff": entropy_cost,
            "grad_gnorm_unclipped": gradients.norm,
            "grad_gnorm": gradients.clipped_norm,
            "var_gnorm": tf.linalg.global_norm(self.variables),
            **extra,
        }
        self._metric_names = list(metrics)
        flat = tf.concat([tf.reshape(p, [-1]) for p in self.variables], axis=0)
        return flat, tf.stack(list(metrics.values()))

    def _gradients(self, tape: tf.GradientTape, loss: tf.Tensor) -> list[tf.Tensor]:
        # The policy head has no part in the value loss, nor the other way round.
        zero = tf.UnconnectedGradients.ZERO
        gradients: list[tf.Tensor] = tape.gradient(loss, self.variables, unconnected_gradients=zero)
        return gradients

    def _forward(self, batch: Unroll) -> Transitions:
        length = batch.action.shape[0]
        logits, values = self._evaluate(batch.observation)
        next_values = values[1:]
        if tf.nest.flatten(batch.final_observation):
            _, final_values = self._evaluate(batch.final_observation)
            next_values = tf.where(batch.truncated, final_values, next_values)
        return Transitions(
            logits=logits[:length],
            values=values[:length],
            next_values=next_values,
            action=batch.action,
            reward=batch.reward,
            terminated=batch.terminated,
            truncated=batch.truncated,
            valid=batch.valid,
            behaviour_log_prob=batch.behaviour_log_prob,
        )

    def _evaluate(self, observation: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Logits [T, B, A] and values [T, B] of observations, a nest of [T, B, ...]."""
        length, envs = tf.nest.flatten(observation)[0].shape[:2]
        flat = tf.nest.map_structure(
            lambda x: tf.reshape(x, [length * envs, *x.shape[2:]]), observation
        )
        logits, values = self._network.policy_and_value(self.variables, flat, tf)
        return tf.reshape(logits, [length, envs, -1]), tf.reshape(values, [length, envs])


def merge_items(items: Unroll) -> Unroll:
    """Joins queue items [N, T, E, ...] to one batch [T, N * E, ...]."""

    def merge(x: tf.Tensor) -> tf.Tensor:
        if x.shape.rank == 1:
            return x
        count, length, envs, *rest = x.shape
        time_major = tf.transpose(x, [1, 0, *range(2, x.shape.rank)])
        return tf.reshape(time_major, [length, count * envs, *rest])

    batch: Unroll = tf.nest.map_structure(merge, items)
    return batch


class _Count(NamedTuple):
    """Valid env steps of a batch."""

    fresh: int
    replayed: int


class _Step(NamedTuple):
    """What is known of a learner step."""

    metrics: Array
    lags: Array
    replayed: Array
    wait_s: float


class _Clipped(NamedTuple):
    """Gradients after clipping, and their global norm before and after it."""

    clipped: list[tf.Tensor]
    norm: tf.Tensor
    clipped_norm: tf.Tensor


def _count(valid: Array, replayed: Array) -> _Count:
    """Counts the true of `valid`, [items, T, E], by whether their item is replayed, [items]."""
    per_item = valid.sum(axis=(1, 2))
    return _Count(int(per_item[~replayed].sum()), int(per_item[replayed].sum()))


def _clip(gradients: list[tf.Tensor], max_norm: float | None) -> _Clipped:
    norm = tf.linalg.global_norm(gradients)
    if max_norm is None:
        return _Clipped(gradients, norm, norm)
    clipped, _ = tf.clip_by_global_norm(gradients, max_norm, use_norm=norm)
    return _Clipped(clipped, norm, tf.minimum(norm, max_norm))


def _make_optimizer(config: IMPALAConfig, params: Sequence[tf.Variable]) -> Any:
    if config.optimizer == "adam":
        return make_adam(params, config.epsilon)
    return make_rmsprop(params, config.epsilon, config.rmsprop_decay, config.rmsprop_momentum)
