"""The IMPALA loss."""

from typing import Any, NamedTuple

import tensorflow as tf

from headrace.agents.impala.config import IMPALAConfig
from headrace.agents.vtrace import MAX_LOG_RHO, VTraceReturns, vtrace


class Transitions(NamedTuple):
    """What the loss needs of a train batch: tensors [T, B], the learner's outputs included.

    Attributes:
      logits: [T, B, A] float32, target policy.
      values: float32, V(x_t).
      next_values: float32, V of the true successor of x_t.
      action: int64.
      reward: float32, as the environment gave it.
      terminated: bool.
      truncated: bool.
      valid: bool, rows that count.
      behaviour_log_prob: float32.
    """

    logits: tf.Tensor
    values: tf.Tensor
    next_values: tf.Tensor
    action: tf.Tensor
    reward: tf.Tensor
    terminated: tf.Tensor
    truncated: tf.Tensor
    valid: tf.Tensor
    behaviour_log_prob: tf.Tensor


class Losses(NamedTuple):
    """Scalar float32 losses, and what is known of them.

    Attributes:
      policy: policy gradient and entropy bonus.
      value: value loss, times `baseline_cost`.
      metrics: scalars by name, over the valid steps; means, but for names that end in `_max`.
    """

    policy: tf.Tensor
    value: tf.Tensor
    metrics: dict[str, tf.Tensor]


def impala_loss(
    transitions: Transitions, config: IMPALAConfig, entropy_cost: tf.Tensor | float
) -> Losses:
    """Policy gradient, value and entropy loss over the valid steps.

    With the V-trace targets vs and advantages adv (arXiv:1802.01561, sections 4.1 and 4.2)::

      - log pi(a|x) adv  +  baseline_cost * 0.5 (vs - V(x))^2  -  entropy_cost * H(pi(.|x))

    summed over valid steps, or averaged over them (`loss_reduction`). Without `vtrace`, adv is the
    generalised advantage estimate (Schulman et al. 2016, arXiv:1506.02438, equation 16) and vs =
    adv + V(x). No gradient flows through vs, adv or the importance weights.

    Args:
      transitions: the batch.
      config: settings.
      entropy_cost: the weight of the entropy bonus now.
    """
    x = _without_invalid(transitions)
    log_probs = tf.nn.log_softmax(x.logits)
    action_log_prob = tf.gather(log_probs, x.action, axis=-1, batch_dims=2)
    log_rhos = tf.stop_gradient(action_log_prob - x.behaviour_log_prob)
    returns = _vtrace(x, log_rhos, config) if config.vtrace else _gae(x, config)

    weights = tf.cast(x.valid, tf.float32)
    count = tf.reduce_sum(weights)
    mean_weights = weights / tf.maximum(count, 1.0)
    loss_weights = mean_weights if config.loss_reduction == "mean" else weights

    entropy = -tf.reduce_sum(tf.exp(log_probs) * log_probs, axis=-1)
    policy_gradient = -action_log_prob * returns.pg_advantages
    baseline = 0.5 * tf.square(returns.vs - x.values)

    log_rhos = tf.minimum(log_rhos, MAX_LOG_RHO)
    rhos = tf.exp(log_rhos)
    clipped = tf.zeros_like(rhos) if config.rho_bar is None else rhos > config.rho_bar
    metrics = {
        "policy_loss": _weighted(policy_gradient, mean_weights),
        "vf_loss": _weighted(baseline, mean_weights),
        "entropy": _weighted(entropy, mean_weights),
        "vf_mean": _weighted(x.values, mean_weights),
        "vf_explained_var": _explained_variance(returns.vs, x.values, mean_weights),
        "rho_mean": _weighted(rhos, mean_weights),
        "rho_max": tf.reduce_max(rhos * weights),
        "rho_clipped": _weighted(tf.cast(clipped, tf.float32), mean_weights),
        # E_mu[rho - 1 - log rho] = KL(mu || pi), with a non-negative sample at every step.
        "behaviour_kl": _weighted(rhos - 1.0 - log_rhos, mean_weights),
    }
    return Losses(
        _weighted(policy_gradient - entropy_cost * entropy, loss_weights),
        config.baseline_cost * _weighted(baseline, loss_weights),
        metrics,
    )


def _vtrace(x: Transitions, log_rhos: tf.Tensor, config: IMPALAConfig) -> VTraceReturns:
    return vtrace(
        log_rhos=log_rhos,
        rho_bar=config.rho_bar,
        c_bar=config.c_bar,
        pg_rho_bar=config.pg_rho_bar,
        **_rewards_and_values(x, config),
    )


def _gae(x: Transitions, config: IMPALAConfig) -> VTraceReturns:
    """Generalised advantage estimates, which are V-trace with importance weights of 1."""
    inputs = _rewards_and_values(x, config)
    vs, _ = vtrace(log_rhos=tf.zeros_like(x.values), **inputs)
    return VTraceReturns(vs, vs - inputs["values"])


def _rewards_and_values(x: Transitions, config: IMPALAConfig) -> dict[str, Any]:
    return {
        "discounts": config.discount * tf.cast(~x.terminated, tf.float32),
        "rewards": config.reward_scale * _clip_rewards(x.reward, config.reward_clip),
        "values": tf.stop_gradient(x.values),
        "next_values": tf.stop_gradient(x.next_values),
        "ends": x.terminated | x.truncated,
        "valid": x.valid,
        "lambda_": config.trace_decay,
    }


def _clip_rewards(rewards: tf.Tensor, clip: str) -> tf.Tensor:
    if clip == "sign":
        return tf.sign(rewards)
    if clip == "range":
        return tf.clip_by_value(rewards, -1.0, 1.0)
    return rewards


def _without_invalid(x: Transitions) -> Transitions:
    """Puts zeros in the rows that do not count, which may hold anything.

    Here, not in the sums: a NaN would pass through the gradient of whatever a select discards.
    """

    def clean(tensor: tf.Tensor) -> tf.Tensor:
        return tf.where(x.valid, tensor, tf.zeros_like(tensor))

    return x._replace(
        logits=tf.where(x.valid[..., None], x.logits, tf.zeros_like(x.logits)),
        values=clean(x.values),
        next_values=clean(x.next_values),
        reward=clean(x.reward),
        behaviour_log_prob=clean(x.behaviour_log_prob),
    )


def _weighted(x: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(x * weights)


def _explained_variance(targets: tf.Tensor, values: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """1 - Var(targets - values) / Var(targets), at least -1; 0 if the targets do not vary."""

    def variance(x: tf.Tensor) -> tf.Tensor:
        return _weighted(tf.square(x - _weighted(x, weights)), weights)

    total = variance(targets)
    explained = 1.0 - tf.math.divide_no_nan(variance(targets - values), total)
    return tf.where(total > 0.0, tf.maximum(explained, -1.0), tf.zeros_like(total))
