"""The learner: the optimisers against NumPy, its counters, its metrics and its weights."""

import threading
import time

import numpy as np
import pytest
import tensorflow as tf
from acme import specs

from headrace.agents.environments import EnvironmentSpec
from headrace.agents.impala import IMPALABuilder, IMPALAConfig
from headrace.agents.impala.learning import IMPALALearner, merge_items
from headrace.agents.impala.losses import impala_loss
from headrace.agents.networks import MLP, flatten, unflatten
from headrace.agents.types import Unroll

LENGTH, ENVS, ACTIONS = 5, 4, 2
SPEC = EnvironmentSpec(
    specs.Array((3,), np.float32), specs.DiscreteArray(ACTIONS, dtype=np.int64), False
)


class ListReader:
    """Hands out given batches, over and over."""

    def __init__(self, batches):
        self._batches = batches
        self.batches = 0

    def next(self):
        self.batches += 1
        return self._batches[(self.batches - 1) % len(self._batches)]


def make_items(seed=0, version=0, items=2, invalid=0.2):
    rng = np.random.default_rng(seed)
    rows = (items, LENGTH, ENVS)
    numbers = Unroll(
        observation=rng.standard_normal((items, LENGTH + 1, ENVS, 3)).astype(np.float32),
        action=rng.integers(0, ACTIONS, rows),
        reward=rng.standard_normal(rows).astype(np.float32),
        terminated=rng.random(rows) < 0.1,
        truncated=np.zeros(rows, bool),
        valid=rng.random(rows) >= invalid,
        behaviour_log_prob=np.log(rng.random(rows)).astype(np.float32),
        final_observation=(),
        weights_version=np.broadcast_to(np.asarray(version, np.int64), (items,)),
        actor_id=np.zeros(items, np.int64),
        sequence=np.arange(items),
    )
    return tf.nest.map_structure(tf.constant, numbers)


def make_learner(batches, **settings):
    config = IMPALAConfig(unroll_length=LENGTH, batch_size=2 * ENVS, **settings)
    builder = IMPALABuilder(config, SPEC, ENVS)
    return builder.make_learner(ListReader(batches), np.random.SeedSequence(0))


def gradients_at(flat, items, config):
    """Clipped gradients of the loss at given weights, and their norm before that."""
    network = MLP(SPEC.observation, ACTIONS, config.hidden_sizes)
    learner = IMPALALearner(config, network, unflatten(flat, network.shapes), reader=None)
    with tf.GradientTape() as tape:
        loss, _ = impala_loss(learner._forward(merge_items(items)), config)
    gradient = flatten([g.numpy() for g in tape.gradient(loss, learner._params)])
    norm = np.sqrt((gradient.astype(np.float64) ** 2).sum())
    return gradient * min(1.0, config.max_gradient_norm / norm), norm


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
    """Tieleman and Hinton 2012, with epsilon inside the root as in TensorFlow 1 and the paper."""
    state = {"square": 0.0, "momentum": 0.0}

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
        np.testing.assert_allclose(learner.metrics()["gradient_norm"], norm, rtol=1e-4)


def test_gradients_are_clipped_to_the_global_norm():
    """RMSProp with a divisor of 1 takes steps of the gradient's size."""
    settings = {"optimizer": "rmsprop", "epsilon": 1e4, "learning_rate": 1e2}
    learner = make_learner([make_items()], max_gradient_norm=0.125, **settings)
    before = learner.weights().flat
    learner.step()
    assert learner.metrics()["gradient_norm"] > 0.125
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


def test_counters_count_valid_steps():
    batches = [make_items(seed) for seed in range(3)]
    learner = make_learner(batches)
    valid = [int(items.valid.numpy().sum()) for items in batches]
    for n in range(3):
        assert (learner.steps, learner.env_steps_trained) == (n, sum(valid[:n]))
        assert learner.weights().version == n
        learner.step()
    assert learner.metrics()["env_steps_per_batch"] == pytest.approx(np.mean(valid))


def test_time_is_that_of_all_steps():
    class SlowReader(ListReader):
        def next(self):
            time.sleep(0.05)
            return super().next()

    learner = make_learner([])
    learner._reader = SlowReader([make_items()])
    learner.step()
    learner.metrics()
    for _ in range(4):
        learner.step()
    time.sleep(0.1)
    metrics = learner.metrics()
    assert metrics["wait_ms_per_step"] >= 50
    assert metrics["ms_per_step"] >= metrics["wait_ms_per_step"] + 25


def test_policy_lag_is_in_learner_steps():
    """Items acted at versions 0, 1 and 3, trained at steps 0, 1, 2, 3."""
    versions = [(0, 0), (0, 1), (1, 0), (3, 3)]
    learner = make_learner([make_items(version=v) for v in versions])
    for _ in range(4):
        learner.step()
    metrics = learner.metrics()
    assert metrics["policy_lag_mean"] == pytest.approx((0 + 0.5 + 1.5 + 0) / 4)
    assert metrics["policy_lag_max"] == 2
    assert metrics["steps"] == 4


def test_metrics_are_those_since_the_last_call():
    learner = make_learner([make_items(seed) for seed in range(2)])
    assert learner.metrics() == {}
    losses = []
    for _ in range(2):
        learner.step()
        losses.append(learner.metrics()["loss"])
    assert learner.metrics() == {}
    both = make_learner([make_items(seed) for seed in range(2)])
    both.step()
    both.step()
    assert both.metrics()["loss"] == pytest.approx(np.mean(losses), rel=1e-4)


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
        variables = flatten([p.numpy() for p in learner._params])
        np.testing.assert_array_equal(weights.flat, variables)


def test_step_that_leaves_the_finite_numbers_is_an_error():
    items = make_items(invalid=0.0)
    bad = items._replace(reward=items.reward * np.nan)
    learner = make_learner([items, bad])
    learner.step()
    with pytest.raises(FloatingPointError, match=r"learner step 1 .*'loss': nan"):
        learner.step()
    assert np.isfinite(learner.weights().flat).all()


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
            network, params = learner._network, [p.numpy() for p in learner._params]
            logits = network.policy(params, observation[:, :-1].reshape(-1, 3), np)
            probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
            flat = (self.rng.random(len(probs)) > probs[:, 0]).astype(np.int64)
            action = flat.reshape(items.action.shape)
            reward = (action == (observation[:, :-1, :, 0] > 0)).astype(np.float32)
            self.rewards.append(reward.mean())
            log_prob = np.log(probs[np.arange(len(flat)), flat]).reshape(action.shape)
            return items._replace(
                action=tf.constant(action),
                reward=tf.constant(reward),
                terminated=tf.ones_like(items.terminated),
                behaviour_log_prob=tf.constant(log_prob, tf.float32),
            )

    learner = make_learner([], learning_rate=1e-2)
    learner._reader = bandit = Bandit()
    for _ in range(150):
        learner.step()
    assert np.mean(bandit.rewards[:5]) < 0.7
    assert np.mean(bandit.rewards[-20:]) > 0.95
