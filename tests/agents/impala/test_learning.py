"""The learner: the optimisers against NumPy, schedules, the hook, and its weights."""

import dataclasses
import threading

import numpy as np
import pytest
import tensorflow as tf
from learners import ACTIONS, ENVS, LENGTH, SPEC, fresh, make_items, make_learner

from headrace.agents.impala import IMPALABuilder
from headrace.agents.impala.learning import IMPALALearner, merge_items
from headrace.agents.impala.losses import impala_loss
from headrace.agents.networks import MLP, flatten, unflatten
from headrace.agents.optimizers import make_rmsprop


def gradients_at(flat, items, config, part=lambda losses: losses.policy + losses.value):
    """Clipped gradients of the loss at given weights, and their norm before that."""
    network = MLP(SPEC.observation, ACTIONS, config.hidden_sizes)
    learner = IMPALALearner(config, network, unflatten(flat, network.shapes), reader=None)
    with tf.GradientTape() as tape:
        transitions = learner._forward(merge_items(items))
        loss = part(impala_loss(transitions, config, config.entropy_cost))
    zero = tf.UnconnectedGradients.ZERO
    gradients = tape.gradient(loss, learner.variables, unconnected_gradients=zero)
    gradient = flatten([g.numpy() for g in gradients])
    norm = np.sqrt((gradient.astype(np.float64) ** 2).sum())
    scale = 1.0 if config.max_gradient_norm is None else min(1.0, config.max_gradient_norm / norm)
    return gradient * scale, norm


def adam(config):
    """Kingma and Ba 2015, algorithm 1."""
    state = {"m": 0.0, "v": 0.0, "t": 0}

    def apply(flat, gradient):
        state["t"] += 1
        state["m"] = 0.9 * state["m"] + 0.1 * gradient
        state["v"] = 0.999 * state["v"] + 0.001 * gradient**2
        m_hat = state["m"] / (1 - 0.9 ** state["t"])
        v_hat = state["v"] / (1 - 0.999 ** state["t"])
        return flat - config.learning_rate * m_hat / (np.sqrt(v_hat) + config.epsilon)

    return apply


def rmsprop(config):
    """As in TensorFlow 1: epsilon inside the root, and a mean square that starts at 1."""
    state = {"square": 1.0, "momentum": 0.0}

    def apply(flat, gradient):
        decay = config.rmsprop_decay
        state["square"] = decay * state["square"] + (1 - decay) * gradient**2
        step = config.learning_rate * gradient / np.sqrt(state["square"] + config.epsilon)
        state["momentum"] = config.rmsprop_momentum * state["momentum"] + step
        return flat - state["momentum"]

    return apply


@pytest.mark.parametrize(
    ("reference", "settings"),
    [
        (adam, {"learning_rate": 3e-3, "epsilon": 1e-4}),
        (rmsprop, {"optimizer": "rmsprop", "learning_rate": 1e-3, "epsilon": 0.1}),
        (rmsprop, {"optimizer": "rmsprop", "rmsprop_decay": 0.9, "rmsprop_momentum": 0.5}),
    ],
)
def test_optimiser(reference, settings):
    batches = [make_items(seed) for seed in range(4)]
    learner = make_learner(batches, max_gradient_norm=0.5, **settings)
    config = learner._config
    apply = reference(config)
    for items in batches:
        before = learner.weights().flat.astype(np.float64)
        gradient, norm = gradients_at(before.astype(np.float32), items, config)
        learner.step()
        np.testing.assert_allclose(
            learner.weights().flat, apply(before, gradient), rtol=1e-4, atol=1e-6
        )
        metrics = learner.metrics()
        np.testing.assert_allclose(metrics["grad_gnorm_unclipped"], norm, rtol=1e-4)
        np.testing.assert_allclose(metrics["grad_gnorm"], min(norm, 0.5), rtol=1e-4)


def test_gradients_are_clipped_to_the_global_norm():
    """RMSProp with a divisor of 1 takes steps of the gradient's size."""
    settings = {"optimizer": "rmsprop", "epsilon": 1e4, "learning_rate": 1e2}
    learner = make_learner([make_items()], max_gradient_norm=0.125, **settings)
    before = learner.weights().flat
    learner.step()
    assert learner.metrics()["grad_gnorm_unclipped"] > 0.125
    assert np.linalg.norm(learner.weights().flat - before) == pytest.approx(0.125, rel=1e-4)


def test_jit_gives_the_same():
    batches = [make_items(seed) for seed in range(3)]
    learners = [make_learner(batches, jit_compile=jit) for jit in (True, False)]
    for learner in learners:
        for _ in batches:
            learner.step()
    one, other = (learner.weights().flat for learner in learners)
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    metrics = [learner.metrics() for learner in learners]
    for name in metrics[0].keys() - {"ms_per_step", "wait_ms_per_step"}:
        np.testing.assert_allclose(metrics[0][name], metrics[1][name], rtol=1e-3, err_msg=name)


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_learner_works_outside_the_main_thread(optimizer):
    errors = []

    def work():
        try:
            make_learner([make_items()], optimizer=optimizer).step()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(120)
    assert errors == []
    assert not thread.is_alive()


def test_weights_are_snapshots():
    learner = make_learner([make_items(seed) for seed in range(2)])
    first = learner.weights()
    copy = first.flat.copy()
    learner.step()
    second = learner.weights()
    assert not np.array_equal(second.flat, copy)
    learner.step()
    np.testing.assert_array_equal(first.flat, copy)
    np.testing.assert_array_equal(learner.get_variables([])[0], learner.weights().flat)


def test_final_weights_are_a_running_mean():
    learner = make_learner([make_items(seed) for seed in range(4)], average_steps=3)
    np.testing.assert_array_equal(learner.final_weights().flat, learner.weights().flat)
    steps = []
    for _ in range(6):
        learner.step()
        steps.append(learner.weights().flat)
    # By hand: the mean of the first three, then a third of the way to each.
    expected = np.mean(steps[:3], axis=0)
    for flat in steps[3:]:
        expected = expected + (flat - expected) / 3
    final = learner.final_weights()
    np.testing.assert_allclose(final.flat, expected, rtol=1e-5, atol=1e-6)
    assert final.flat.dtype == np.float32
    assert final.version == 6
    assert np.abs(final.flat - steps[-1]).max() > 1e-4


def test_average_over_one_step_is_the_newest():
    learner = make_learner([make_items()], average_steps=1)
    for _ in range(3):
        learner.step()
        np.testing.assert_allclose(learner.final_weights().flat, learner.weights().flat, rtol=1e-6)


def test_version_of_the_weights_is_that_of_their_step():
    """Weights of version n are what the variables were after n steps."""
    learner = make_learner([make_items()])
    for _ in range(3):
        learner.step()
        weights = learner.weights()
        assert weights.version == learner.steps
        variables = flatten([p.numpy() for p in learner.variables])
        np.testing.assert_array_equal(weights.flat, variables)


def test_step_that_leaves_the_finite_numbers_is_an_error():
    items = make_items(invalid=0.0)
    bad = items._replace(reward=items.reward * np.nan)
    learner = make_learner([items, bad])
    learner.step()
    with pytest.raises(FloatingPointError, match=r"learner step 1 .*'total_loss': nan"):
        learner.step()
    assert np.isfinite(learner.weights().flat).all()


def test_gradients_are_not_clipped_without_a_norm():
    settings = {"optimizer": "rmsprop", "epsilon": 1e4, "learning_rate": 1e2, "baseline_cost": 50}
    learner = make_learner([make_items()], max_gradient_norm=None, **settings)
    before = learner.weights().flat
    learner.step()
    metrics = learner.metrics()
    assert metrics["grad_gnorm"] == metrics["grad_gnorm_unclipped"] > 1.0
    assert np.linalg.norm(learner.weights().flat - before) == pytest.approx(
        metrics["grad_gnorm"], rel=1e-3
    )


def test_rmsprop_is_that_of_tensorflow_1():
    start, settings = np.float32([1.0, -2.0]), (1e-2, 0.9, 0.5, 0.1)
    ours, theirs = tf.Variable(start), tf.Variable(start)
    learning_rate, decay, momentum, epsilon = settings
    optimizer = make_rmsprop([ours], epsilon, decay, momentum)
    optimizer.learning_rate.assign(learning_rate)
    reference = tf.compat.v1.train.RMSPropOptimizer(*settings)
    for gradient in ([0.3, -5.0], [-0.1, 2.0], [1.0, 1.0]):
        optimizer.apply([tf.constant(gradient)], [ours])
        reference.apply_gradients([(tf.constant(gradient), theirs)])
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_separate_value_optimiser():
    """Two Adams, one for each part of the loss, clipped apart."""
    batches = [make_items(seed) for seed in range(3)]
    learner = make_learner(
        batches,
        separate_value_optimizer=True,
        learning_rate=1e-3,
        value_learning_rate=3e-3,
        max_gradient_norm=0.05,
    )
    config = learner._config
    apply = adam(config)
    apply_value = adam(dataclasses.replace(config, learning_rate=config.value_learning_rate))
    for items in batches:
        before = learner.weights().flat
        policy, norm = gradients_at(before, items, config, lambda losses: losses.policy)
        value, value_norm = gradients_at(before, items, config, lambda losses: losses.value)
        learner.step()
        expected = apply_value(apply(before.astype(np.float64), policy), value)
        np.testing.assert_allclose(learner.weights().flat, expected, rtol=1e-4, atol=1e-6)
        metrics = learner.metrics()
        assert metrics["grad_gnorm_unclipped"] == pytest.approx(norm, rel=1e-4)
        assert metrics["grad_gnorm_vf_unclipped"] == pytest.approx(value_norm, rel=1e-4)


def test_schedules_are_exact_at_every_learner_step():
    items = make_items(invalid=0.0)
    steps = 2 * LENGTH * ENVS  # Of one batch: 40.
    learner = make_learner(
        [items],
        learning_rate_schedule=((40, 1e-3), (120, 2e-3), (160, 0.0)),
        entropy_cost_schedule=((0, 0.5), (80, 0.25)),
    )
    rates, costs = [], []
    for n in range(6):
        assert learner.env_steps_trained == n * steps
        before = learner.weights().flat
        learner.step()
        metrics = learner.metrics()
        rates.append(metrics["cur_lr"])
        costs.append(metrics["entropy_coeff"])
    np.testing.assert_allclose(rates, [1e-3, 1e-3, 1.5e-3, 2e-3, 0.0, 0.0], rtol=1e-6)
    np.testing.assert_allclose(costs, [0.5, 0.375, 0.25, 0.25, 0.25, 0.25], rtol=1e-6)
    # A rate of 0 is in force, not just shown.
    np.testing.assert_array_equal(learner.weights().flat, before)


def test_scheduled_entropy_cost_is_that_of_the_loss():
    constant = make_learner([make_items()], entropy_cost=0.3)
    scheduled = make_learner([make_items()], entropy_cost_schedule=((0, 0.3), (10**6, 0.3)))
    for learner in (constant, scheduled):
        learner.step()
    np.testing.assert_array_equal(constant.weights().flat, scheduled.weights().flat)


class HookBuilder(IMPALABuilder):
    """Notes what the hook is given, and sets all weights to the number of steps."""

    seen = ()

    def after_train_step(self, learner, step):
        if step.counters["learner_steps"] == 3:
            raise ArithmeticError("the hook's own")
        self.seen = (*self.seen, step)
        learner.set_weights(np.full_like(learner.weights().flat, learner.steps))


def test_hook_runs_after_each_step_and_may_change_the_learner():
    builders = []

    def make_builder(*args):
        builders.append(HookBuilder(*args))
        return builders[0]

    learner = make_learner([make_items()], make_builder, average_steps=1)
    for n in (1, 2):
        learner.step()
        step = builders[0].seen[-1]
        assert len(builders[0].seen) == n
        assert step.counters == learner.counters()
        assert step.counters["learner_steps"] == n
        assert np.isfinite(step.metrics["total_loss"])
        assert (learner.weights().flat == n).all()
        assert all((v.numpy() == n).all() for v in learner.variables)
        np.testing.assert_allclose(learner.final_weights().flat, n)
    with pytest.raises(ArithmeticError, match="the hook's own"):
        learner.step()


def test_items_are_merged_side_by_side():
    items = make_items(items=3)
    batch = merge_items(items)
    assert batch.observation.shape == (LENGTH + 1, 3 * ENVS, 3)
    for n in range(3):
        for field in ("observation", "action", "reward", "valid", "behaviour_log_prob"):
            merged = getattr(batch, field)[:, n * ENVS : (n + 1) * ENVS]
            np.testing.assert_array_equal(merged, getattr(items, field)[n])
    np.testing.assert_array_equal(batch.sequence, [0, 1, 2])


def test_a12_learns_which_action_pays_on_which_observation():
    """Reward is 1 where the action is the observation's sign: an alignment slip would not learn."""

    class Bandit:
        """Acts with the learner's own newest policy, all episodes one step long."""

        def __init__(self):
            self.rng = np.random.default_rng(0)
            self.rewards = []

        def next(self):
            items = make_items(seed=int(self.rng.integers(1 << 30)), invalid=0.0)
            observation = items.observation.numpy()
            network, params = learner._network, [p.numpy() for p in learner.variables]
            logits = network.policy(params, observation[:, :-1].reshape(-1, 3), np)
            probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
            flat = (self.rng.random(len(probs)) > probs[:, 0]).astype(np.int64)
            action = flat.reshape(items.action.shape)
            reward = (action == (observation[:, :-1, :, 0] > 0)).astype(np.float32)
            self.rewards.append(reward.mean())
            log_prob = np.log(probs[np.arange(len(flat)), flat]).reshape(action.shape)
            return fresh(
                items._replace(
                    action=tf.constant(action),
                    reward=tf.constant(reward),
                    terminated=tf.ones_like(items.terminated),
                    behaviour_log_prob=tf.constant(log_prob, tf.float32),
                )
            )

    learner = make_learner([], learning_rate=1e-2)
    learner._reader = bandit = Bandit()
    for _ in range(150):
        learner.step()
    assert np.mean(bandit.rewards[:5]) < 0.7
    assert np.mean(bandit.rewards[-20:]) > 0.95
