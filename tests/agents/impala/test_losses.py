"""The IMPALA loss against NumPy in float64, its gradient against finite differences of that."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
import vtrace_oracle
from vtrace_oracle import Case

from headrace.agents.impala.config import IMPALAConfig
from headrace.agents.impala.losses import Transitions, impala_loss

LENGTH, BATCH, ACTIONS = 6, 4, 3

CONFIGS = [
    IMPALAConfig(),
    IMPALAConfig(loss_reduction="sum", baseline_cost=0.25, entropy_cost=0.3),
    IMPALAConfig(discount=0.9, reward_scale=0.1, trace_decay=0.7, entropy_cost=0.0),
    IMPALAConfig(rho_bar=2.0, c_bar=0.5, pg_rho_bar=1.5),
    IMPALAConfig(reward_clip="sign", reward_scale=0.5),
    IMPALAConfig(reward_clip="range", reward_scale=2.0),
    IMPALAConfig(rho_bar=None, pg_rho_bar=None),
    IMPALAConfig(vtrace=False, trace_decay=0.8),
    IMPALAConfig(vtrace=False),
]

CLIPS = {
    "none": lambda reward: reward,
    "sign": np.sign,
    "range": lambda reward: np.minimum(np.maximum(reward, -1), 1),
}


def make_transitions(seed=0):
    """Random steps with both kinds of end, and reset rows after them."""
    rng = np.random.default_rng(seed)
    shape = (LENGTH, BATCH)
    ended = rng.random(shape) < 0.3
    terminated = ended & (rng.random(shape) < 0.5)
    valid = np.ones(shape, bool)
    valid[1:] = ~ended[:-1]
    terminated &= valid
    truncated = ended & valid & ~terminated
    valid[1:] = ~(terminated | truncated)[:-1]
    values = rng.standard_normal((LENGTH + 1, BATCH))
    return Transitions(
        logits=rng.standard_normal((*shape, ACTIONS)),
        values=values[:-1],
        next_values=values[1:],
        action=rng.integers(0, ACTIONS, shape),
        reward=2 * rng.standard_normal(shape) * (rng.random(shape) < 0.8),
        terminated=terminated,
        truncated=truncated,
        valid=valid,
        behaviour_log_prob=np.log(rng.dirichlet(np.ones(ACTIONS), shape)[..., 0]),
    )


def log_softmax(logits):
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def gae(x, config):
    """Value targets and advantages, summed up term by term (arXiv:1506.02438, equation 16)."""
    advantages = np.zeros(x.reward.shape)
    reward = config.reward_scale * CLIPS[config.reward_clip](x.reward)
    for t, b in np.argwhere(x.valid):
        factor = 1.0
        for k in range(t, LENGTH):
            if not x.valid[k, b]:
                break
            next_value = 0.0 if x.terminated[k, b] else x.next_values[k, b]
            delta = reward[k, b] + config.discount * next_value - x.values[k, b]
            advantages[t, b] += factor * delta
            if x.terminated[k, b] or x.truncated[k, b]:
                break
            factor *= config.discount * config.trace_decay
    return x.values + advantages, advantages


def returns_of(x, config):
    if not config.vtrace:
        return gae(x, config)
    log_pi = np.take_along_axis(log_softmax(x.logits), x.action[..., None], -1)[..., 0]
    return vtrace_oracle.oracle(
        Case(
            log_rhos=log_pi - x.behaviour_log_prob,
            discounts=config.discount * (1.0 - x.terminated),
            rewards=config.reward_scale * CLIPS[config.reward_clip](x.reward),
            values=x.values,
            next_values=x.next_values,
            ends=x.terminated | x.truncated,
            valid=x.valid,
            rho_bar=config.rho_bar,
            c_bar=config.c_bar,
            pg_rho_bar=config.pg_rho_bar,
            lambda_=config.trace_decay,
        )
    )


def reference(x, config, returns):
    """The loss and its terms, each summed over valid steps, with `returns` held constant."""
    vs, advantages = returns
    total = np.zeros(4)
    log_pis = log_softmax(x.logits)
    for t, b in np.argwhere(x.valid):
        log_pi = log_pis[t, b]
        policy_gradient = -log_pi[x.action[t, b]] * advantages[t, b]
        baseline = 0.5 * (vs[t, b] - x.values[t, b]) ** 2
        entropy = -sum(np.exp(p) * p for p in log_pi)
        loss = policy_gradient + config.baseline_cost * baseline - config.entropy_cost * entropy
        total += [loss, policy_gradient, baseline, entropy]
    return total


def tensors(x):
    return Transitions(
        *(tf.constant(v, tf.float32 if v.dtype == np.float64 else v.dtype) for v in x)
    )


def loss_and_gradients(x, config):
    inputs = tensors(x)
    watched = inputs.logits, inputs.values, inputs.next_values
    with tf.GradientTape() as tape:
        tape.watch(watched)
        losses = impala_loss(inputs, config, config.entropy_cost)
        loss = losses.policy + losses.value
    return loss.numpy(), tape.gradient(loss, watched), losses.metrics


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_metrics(config, seed):
    x = make_transitions(seed)
    loss, _, metrics = loss_and_gradients(x, config)
    total = reference(x, config, returns_of(x, config))
    mean = total / x.valid.sum()
    expected = mean[0] if config.loss_reduction == "mean" else total[0]
    np.testing.assert_allclose(loss, expected, rtol=2e-5, atol=1e-6)
    for name, value in zip(("policy_loss", "vf_loss", "entropy"), mean[1:], strict=True):
        np.testing.assert_allclose(metrics[name], value, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["vf_mean"], x.values[x.valid].mean(), rtol=1e-5)
    log_pi = np.take_along_axis(log_softmax(x.logits), x.action[..., None], -1)[..., 0]
    rho = np.exp(log_pi - x.behaviour_log_prob)[x.valid]
    np.testing.assert_allclose(metrics["rho_mean"], rho.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["rho_max"], rho.max(), rtol=1e-5)
    clipped = (rho > (config.rho_bar or np.inf)).mean()
    np.testing.assert_allclose(metrics["rho_clipped"], clipped, rtol=1e-5)
    vs = returns_of(x, config)[0][x.valid]
    explained = max(-1.0, 1 - (vs - x.values[x.valid]).var() / vs.var())
    np.testing.assert_allclose(metrics["vf_explained_var"], explained, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        metrics["behaviour_kl"], (rho - 1 - np.log(rho)).mean(), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("config", CONFIGS)
def test_gradient_is_that_of_the_loss_with_constant_returns(config):
    x = make_transitions(7)
    returns = returns_of(x, config)
    _, gradients, _ = loss_and_gradients(x, config)
    scale = 1.0 if config.loss_reduction == "sum" else 1.0 / x.valid.sum()
    for name, gradient in zip(("logits", "values"), gradients, strict=False):
        point = getattr(x, name)
        expected = np.zeros(point.shape)
        for index in np.ndindex(point.shape):
            step = np.zeros(point.shape)
            step[index] = 1e-5
            ends = [
                reference(x._replace(**{name: point + sign * step}), config, returns)[0]
                for sign in (1, -1)
            ]
            expected[index] = scale * (ends[0] - ends[1]) / 2e-5
        np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=2e-6)


def test_bootstrap_values_get_no_gradient():
    _, gradients, _ = loss_and_gradients(make_transitions(), IMPALAConfig())
    assert gradients[2] is None


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a2_a7_invalid_rows_change_nothing(poison, reduction):
    """Reset rows and padding enter neither the sums nor the denominators."""
    x = make_transitions(1)
    assert not x.valid.all()
    config = IMPALAConfig(loss_reduction=reduction)
    loss, gradients, metrics = loss_and_gradients(x, config)
    spoilt = {}
    # The values at a reset row are the bootstrap of nothing, but those before it use them only
    # where an episode was cut short.
    for name in ("logits", "values", "reward", "behaviour_log_prob"):
        spoilt[name] = getattr(x, name).copy()
        spoilt[name][~x.valid] = poison
    spoilt_next = x.next_values.copy()
    spoilt_next[~x.valid] = poison
    got, got_gradients, got_metrics = loss_and_gradients(
        x._replace(next_values=spoilt_next, **spoilt), config
    )
    np.testing.assert_array_equal(got, loss)
    for name, metric in metrics.items():
        np.testing.assert_array_equal(got_metrics[name], metric, err_msg=name)
    for gradient, expected in zip(got_gradients[:2], gradients[:2], strict=True):
        np.testing.assert_array_equal(gradient, expected)
        assert (gradient.numpy()[~x.valid] == 0).all()


def test_batch_without_a_valid_row_is_no_loss():
    x = make_transitions()
    loss, gradients, _ = loss_and_gradients(x._replace(valid=np.zeros_like(x.valid)), CONFIGS[0])
    assert loss == 0
    assert all((g.numpy() == 0).all() for g in gradients[:2])


def test_a11_sum_is_the_mean_times_the_valid_steps():
    x = make_transitions(3)
    mean, mean_gradients, _ = loss_and_gradients(x, IMPALAConfig(loss_reduction="mean"))
    total, total_gradients, _ = loss_and_gradients(x, IMPALAConfig(loss_reduction="sum"))
    np.testing.assert_allclose(total, mean * x.valid.sum(), rtol=1e-5)
    np.testing.assert_allclose(total_gradients[0], mean_gradients[0] * x.valid.sum(), rtol=1e-4)


def test_a10_rho_enters_the_policy_gradient_once():
    """On one step: gradient of -min(1, rho) (r - V) log pi."""
    column = np.ones((1, 1))
    x = Transitions(
        logits=np.zeros((1, 1, 2)),
        values=0.5 * column,
        next_values=column,
        action=np.zeros((1, 1), np.int64),
        reward=2 * column,
        terminated=column.astype(bool),
        truncated=np.zeros((1, 1), bool),
        valid=column.astype(bool),
        behaviour_log_prob=np.log(0.8) * column,
    )
    config = IMPALAConfig(entropy_cost=0.0)
    loss, gradients, _ = loss_and_gradients(x, config)
    rho, advantage = 0.5 / 0.8, 1.5
    # The value loss is 0.5 * 0.5 * (rho * 1.5)^2.
    np.testing.assert_allclose(
        loss, -rho * advantage * np.log(0.5) + 0.25 * (rho * 1.5) ** 2, rtol=1e-6
    )
    np.testing.assert_allclose(
        gradients[0][0, 0], [-rho * advantage * 0.5, rho * advantage * 0.5], rtol=1e-6
    )
    np.testing.assert_allclose(gradients[1], [[-0.5 * rho * 1.5]], rtol=1e-6)


@pytest.mark.parametrize("scale", [1e2, 1e4, 1e30])
@pytest.mark.parametrize("behaviour", [0.0, -1e2, -1e4, -1e30])
def test_extreme_log_probabilities_leave_everything_finite(scale, behaviour):
    x = make_transitions(2)
    x = x._replace(logits=scale * x.logits, behaviour_log_prob=np.full((LENGTH, BATCH), behaviour))
    for config in CONFIGS:
        if config.pg_rho_bar is None and scale == 1e30:
            continue  # An advantage of e^20 times a log-probability of 1e30 is no float32.
        loss, gradients, metrics = loss_and_gradients(x, config)
        assert np.isfinite(loss)
        assert all(np.isfinite(g).all() for g in gradients[:2])
        assert all(np.isfinite(m) for m in metrics.values()), metrics


def test_constant_targets_have_no_variance_to_explain():
    x = make_transitions(5)
    zeros = np.zeros_like(x.reward)
    x = x._replace(reward=zeros, values=zeros, next_values=zeros)
    assert loss_and_gradients(x, IMPALAConfig())[2]["vf_explained_var"] == 0


def test_every_coefficient_matters():
    x = make_transitions(5)
    base, _, _ = loss_and_gradients(x, IMPALAConfig())
    for name, value in {
        "discount": 0.5,
        "reward_scale": 2.0,
        "reward_clip": "sign",
        "rho_bar": 3.0,
        "c_bar": 0.2,
        "pg_rho_bar": 3.0,
        "trace_decay": 0.2,
        "baseline_cost": 1.0,
        "entropy_cost": 1.0,
        "loss_reduction": "sum",
        "vtrace": False,
    }.items():
        changed = dataclasses.replace(IMPALAConfig(), **{name: value})
        assert loss_and_gradients(x, changed)[0] != base, name
