"""The behaviour policy: what it samples, and the probability that it says it had."""

import numpy as np
import pytest
from acme import specs

from headrace.agents.acting import CategoricalPolicy
from headrace.agents.networks import MLP, flatten
from headrace.agents.types import Weights


class Logits:
    """A network whose parameters are its logits."""

    def __init__(self, actions):
        self.shapes = [(actions,)]

    def policy(self, params, observation, xp):
        return np.tile(params[0], (len(observation), 1))


def make_policy(logits, seed=0, **kwargs):
    policy = CategoricalPolicy(Logits(len(logits)), seed, **kwargs)
    policy.set_weights(Weights(0, np.array(logits, np.float32)))
    return policy


def act(policy, count):
    return policy(np.zeros((count, 1), np.float32))


@pytest.mark.parametrize("logits", [[0.0, 0.0], [1.0, -1.0, 0.5], [5.0, 0.0, -3.0, 4.0]])
def test_actions_have_the_probability_of_the_softmax(logits):
    count = 200_000
    action, log_prob = act(make_policy(logits), count)
    probs = np.exp(logits) / np.exp(logits).sum()
    frequency = np.bincount(action, minlength=len(logits)) / count
    deviation = np.sqrt(probs * (1 - probs) / count)
    assert (np.abs(frequency - probs) < 5 * deviation).all()
    np.testing.assert_allclose(log_prob, np.log(probs)[action], rtol=1e-5, atol=1e-6)
    assert log_prob.dtype == np.float32
    assert action.dtype == np.int64


def test_extreme_logits_stay_finite():
    action, log_prob = act(make_policy([-1e38, 0.0, 1e38]), 100)
    assert (action == 2).all()
    assert (log_prob == 0).all()


@pytest.mark.parametrize("draw", [0.0, np.nextafter(np.float32(1), np.float32(0))])
@pytest.mark.parametrize("actions", [1, 2, 3, 7, 18])
def test_extreme_draws_give_an_action_that_exists(draw, actions):
    policy = make_policy(np.linspace(-1, 1, actions))
    policy._rng = ConstantDraws(draw)
    action, log_prob = act(policy, 4)
    assert (action == (0 if draw == 0 else actions - 1)).all()
    assert np.isfinite(log_prob).all()


class ConstantDraws:
    def __init__(self, value):
        self._value = value

    def random(self, count, dtype):
        return np.full(count, self._value, dtype)


def test_action_of_no_probability_is_never_taken():
    """A draw of 0 must not choose a first action that cannot happen."""
    policy = make_policy([-1000.0, 0.0, -1000.0])
    policy._rng = ConstantDraws(0.0)
    assert (act(policy, 4).action == 1).all()


def test_greedy_takes_the_most_likely():
    action, _ = act(make_policy([0.0, 0.1, -1.0], greedy=True), 50)
    assert (action == 1).all()


def test_seed_sets_the_stream():
    def draws(seed):
        return act(make_policy([0.0] * 5, seed), 50).action.tolist()

    assert draws(3) == draws(3)
    assert draws(3) != draws(4)


def test_new_weights_change_the_behaviour():
    policy = make_policy([0.0, 9.0])
    assert act(policy, 100).action.mean() > 0.9
    policy.set_weights(Weights(1, np.array([9.0, 0.0], np.float32)))
    assert act(policy, 100).action.mean() < 0.1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_an_error(bad):
    policy = make_policy([0.0, bad, bad])
    if bad == -np.inf:  # an action that is impossible is no error
        assert (act(policy, 9).action == 0).all()
        return
    with pytest.raises(FloatingPointError, match="not finite"), np.errstate(invalid="ignore"):
        act(policy, 9)


def test_observation_that_is_not_finite_is_named():
    network = MLP(specs.Array((2,), np.float32), 2, (4,))
    policy = CategoricalPolicy(network, 0)
    policy.set_weights(Weights(0, flatten(network.init(np.random.default_rng(0)))))
    with pytest.raises(FloatingPointError, match="the environment gave an observation"):
        policy(np.array([[1, 0], [np.nan, 1]], np.float32))


def test_no_weights_no_action():
    with pytest.raises(RuntimeError, match="no weights"):
        act(CategoricalPolicy(Logits(2), 0), 1)


def test_actions_belong_to_their_rows():
    """Each environment's action comes from its own observation."""
    network = MLP(specs.Array((2,), np.float32), 2, (4,))
    params = [np.zeros(shape, np.float32) for shape in network.shapes]
    params[0][:, :2] = np.eye(2)
    params[2][:2] = 50 * np.eye(2)
    policy = CategoricalPolicy(network, 0)
    policy.set_weights(Weights(0, flatten(params)))
    action, log_prob = policy(np.array([[1, 0], [0, 1], [1, 0], [0, 0]], np.float32))
    assert action[:3].tolist() == [0, 1, 0]
    np.testing.assert_allclose(log_prob, [0, 0, 0, np.log(0.5)], atol=1e-6)
