"""Networks: NumPy and TensorFlow run the same function, and parameters travel flat."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from acme import specs

from headrace.agents.networks import MLP, flatten, unflatten


def make(shape=(4,), actions=3, hidden=(8, 6)):
    return MLP(specs.Array(shape, np.float32), actions, hidden)


def random_params(network, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) for shape in network.shapes]


@pytest.mark.parametrize("dtype", [np.float32, np.uint8, np.int64, np.float16, bool])
@pytest.mark.parametrize("shape", [(), (4,), (3, 2, 2)])
def test_numpy_and_tensorflow_agree(shape, dtype):
    network = make(shape)
    params = random_params(network)
    observation = (np.random.default_rng(1).random((5, *shape)) * 100).astype(dtype)
    logits, values = network.policy_and_value(params, observation, np)
    tensors = [tf.constant(p) for p in params]
    tf_logits, tf_values = network.policy_and_value(tensors, tf.constant(observation), tf)
    assert logits.shape == (5, 3)
    assert values.shape == (5,)
    assert logits.dtype == values.dtype == np.float32
    np.testing.assert_allclose(logits, tf_logits, rtol=2e-5, atol=1e-4)
    np.testing.assert_allclose(values, tf_values, rtol=2e-5, atol=1e-4)
    np.testing.assert_array_equal(network.policy(params, observation, np), logits)


def test_hand_worked_forward():
    network = make(shape=(2,), actions=2, hidden=(2,))
    params = [
        [[1, 0], [0, -1]],
        [0.5, 0.5],
        [[1, 2], [3, 4]],
        [10, 20],
        [[5], [6]],
        [-1],
    ]
    params = [np.array(p, np.float32) for p in params]
    # Hidden: relu([1 + .5, -2 + .5]) = [1.5, 0].
    logits, values = network.policy_and_value(params, np.array([[1, 2]], np.float32), np)
    np.testing.assert_allclose(logits, [[11.5, 23]])
    np.testing.assert_allclose(values, [6.5])


def test_images_are_scaled_to_one():
    network = make(shape=(2,))
    params = random_params(network)
    image = np.array([[255, 51]], np.uint8)
    scaled = np.array([[1.0, 0.2]], np.float32)
    np.testing.assert_allclose(
        network.policy(params, image, np), network.policy(params, scaled, np), rtol=1e-5
    )


def test_first_policy_is_near_uniform_and_kernels_are_orthogonal():
    network = make(shape=(4,), actions=3, hidden=(64, 64))
    params = network.init(np.random.default_rng(0))
    assert [p.shape for p in params] == network.shapes
    assert all(p.dtype == np.float32 for p in params)
    for kernel, gain in zip(params[::2], [2**0.5, 2**0.5, 0.01, 1.0], strict=True):
        small = kernel if kernel.shape[0] < kernel.shape[1] else kernel.T
        np.testing.assert_allclose(small @ small.T, gain**2 * np.eye(len(small)), atol=1e-5)
    assert not any(bias.any() for bias in params[1::2])
    logits = network.policy(params, np.random.default_rng(1).random((9, 4), np.float32), np)
    assert np.abs(logits).max() < 0.1


def test_init_is_set_by_its_seed():
    network = make()
    one, same, other = (flatten(network.init(np.random.default_rng(s))) for s in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)


def test_flat_weights_come_back_as_they_were():
    network = make()
    params = random_params(network)
    flat = flatten(params)
    assert flat.dtype == np.float32
    assert flat.shape == (4 * 8 + 8 + 8 * 6 + 6 + 6 * 3 + 3 + 6 + 1,)
    for param, back in itertools.zip_longest(params, unflatten(flat, network.shapes)):
        np.testing.assert_array_equal(param, back)


@pytest.mark.parametrize("change", [-1, 1])
def test_weights_of_another_network_are_refused(change):
    network = make()
    with pytest.raises(ValueError, match=r"the network needs \(122,\)"):
        unflatten(np.zeros(122 + change, np.float32), network.shapes)
