"""The IMPALA learner."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import sonnet as snt
import tensorflow as tf

from headrace.agents.builder import Learner
from headrace.agents.impala.config import IMPALAConfig
from headrace.agents.impala.losses import Transitions, impala_loss
from headrace.agents.networks import Network
from headrace.agents.replay import UnrollReader
from headrace.agents.types import Array, Unroll, Weights


class IMPALALearner(Learner):
    """Minimises the IMPALA loss, one compiled function per learner step.

    Args:
      config: settings.
      network: policy and value function.
      params: initial parameters, in the network's order.
      reader: train batches.
    """

    def __init__(
        self,
        config: IMPALAConfig,
        network: Network,
        params: Sequence[Array],
        reader: UnrollReader,
    ) -> None:
        self._config = config
        self._network = network
        self._reader = reader
        self._params = [tf.Variable(p, name=f"param_{i}") for i, p in enumerate(params)]
        self._optimizer = _make_optimizer(config, self._params)
        # Tracing with autograph would rewrite zip, and there is no Python control flow to convert.
        self._update = tf.function(
            self._update_step, autograph=False, jit_compile=config.jit_compile
        )
        self._flat = np.concatenate([np.asarray(p, np.float32).ravel() for p in params])
        self._average = self._flat
        self._metric_names: list[str] = []
        self._recent: list[Array] = []
        self._waited = 0.0
        self._since = time.perf_counter()
        self.steps = 0
        self.env_steps_trained = 0

    def step(self) -> None:
        """Waits for a batch and takes one optimiser step on it.

        Raises:
          Stopped: the run ended before the batch was there.
          FloatingPointError: the step left the finite numbers.
        """
        start = time.perf_counter()
        batch = self._reader.next()
        self._waited += time.perf_counter() - start
        flat, metrics = self._update(batch, tf.constant(self.steps, tf.int64))
        values = metrics.numpy()
        if not np.isfinite(values).all():
            found = dict(zip(self._metric_names, values.tolist(), strict=True))
            raise FloatingPointError(f"learner step {self.steps} is not finite: {found}")
        self._flat = flat.numpy()
        self._recent.append(values)
        self.steps += 1
        share = 1 / min(self.steps, self._config.average_steps)
        self._average = self._average + np.float32(share) * (self._flat - self._average)
        self.env_steps_trained += int(values[self._metric_names.index("env_steps_per_batch")])

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
        part of it that getting the batch takes.
        """
        if not self._recent:
            return {}
        rows, self._recent = np.stack(self._recent), []
        waited, self._waited = self._waited, 0.0
        since, self._since = self._since, time.perf_counter()
        means = dict(zip(self._metric_names, rows.mean(axis=0).tolist(), strict=True))
        means["policy_lag_max"] = float(rows[:, self._metric_names.index("policy_lag_max")].max())
        means["ms_per_step"] = 1000 * (self._since - since) / len(rows)
        means["wait_ms_per_step"] = 1000 * waited / len(rows)
        return means | {"steps": len(rows)}

    def _update_step(self, items: Unroll, version: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        batch = merge_items(items)
        with tf.GradientTape() as tape:
            loss, metrics = impala_loss(self._forward(batch), self._config)
        gradients = tape.gradient(loss, self._params)
        gradients, norm = tf.clip_by_global_norm(gradients, self._config.max_gradient_norm)
        self._optimizer.apply(gradients, self._params)
        lag = tf.cast(version - items.weights_version, tf.float32)
        metrics |= {
            "loss": loss,
            "gradient_norm": norm,
            "policy_lag_mean": tf.reduce_mean(lag),
            "policy_lag_max": tf.reduce_max(lag),
            # Exact: a batch has far fewer than 2^24 steps.
            "env_steps_per_batch": tf.reduce_sum(tf.cast(batch.valid, tf.float32)),
        }
        self._metric_names = list(metrics)
        flat = tf.concat([tf.reshape(p, [-1]) for p in self._params], axis=0)
        return flat, tf.stack(list(metrics.values()))

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
        logits, values = self._network.policy_and_value(self._params, flat, tf)
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


def _make_optimizer(config: IMPALAConfig, params: Sequence[tf.Variable]) -> Any:
    if config.optimizer == "adam":
        optimizer = snt.optimizers.Adam(config.learning_rate, epsilon=config.epsilon)
    else:
        optimizer = snt.optimizers.RMSProp(
            config.learning_rate,
            decay=config.rmsprop_decay,
            momentum=config.rmsprop_momentum,
            epsilon=config.epsilon,
        )
    # Sonnet makes its variables in the first `apply`, which tf.function cannot lift out of its
    # graph when it is traced outside the main thread. A step of nothing makes them here.
    optimizer.apply([tf.zeros_like(p) for p in params], params)
    for variable in optimizer.variables:
        variable.assign(tf.zeros_like(variable))
    return optimizer
