"""Observation spaces, from the environment through the queue to the network."""

import threading

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf
import tree
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from gymnasium.vector import AutoresetMode

from headrace.agents import spaces
from headrace.agents.acting import CategoricalPolicy, UnrollCollector
from headrace.agents.environments import Environment
from headrace.agents.impala import IMPALABuilder, IMPALAConfig
from headrace.agents.impala.learning import merge_items
from headrace.agents.networks import flatten
from headrace.agents.types import Weights

MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]

SPACES = {
    "box": Box(-1, 1, (3,), np.float32),
    "float64": Box(-1, 1, (3,), np.float64),
    "image": Box(0, 255, (4, 4, 3), np.uint8),
    "scalar": Box(-1, 1, (), np.float32),
    "discrete": Discrete(5),
    "start": Discrete(5, start=-2),
    "multi_discrete": MultiDiscrete([3, 2, 7]),
    "multi_discrete_2d": MultiDiscrete([[3, 2], [4, 5]], start=[[1, 0], [-3, 9]]),
    "multi_binary": MultiBinary(6),
    "multi_binary_2d": MultiBinary((2, 3)),
    # Keys that are not in order, as a nest of them is walked through in the order of its keys.
    "dict": Dict({"z": Discrete(3, start=4), "a": Box(-1, 1, (2,), np.float32)}),
    "tuple": Tuple((Discrete(4), Box(0, 255, (2, 2), np.uint8))),
    "nested": Dict(
        {
            "b": Tuple((MultiBinary(2), Dict({"y": Discrete(2), "x": Box(-9, 9, (1,))}))),
            "a": MultiDiscrete([2, 3], start=[5, 6]),
        }
    ),
}


class Sampling(gym.Env):
    """Shows samples of a space, and ends its episodes after 1 to 4 steps in both ways."""

    def __init__(self, space):
        self.observation_space = space
        self.action_space = Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self._left = int(self.np_random.integers(1, 5))
        return self._observe(), {}

    def step(self, action):
        self._left -= 1
        terminated = self._left == 0 and bool(self.np_random.random() < 0.5)
        truncated = self._left == 0 and not terminated
        return self._observe(), 1.0, terminated, truncated, {}

    def _observe(self):
        self.last = self.observation_space.sample()
        return self.last


def one_hot_by_hand(x, space):
    """The encoding of one observation, element by element."""
    if isinstance(space, Dict):
        return [v for k in sorted(space.spaces) for v in one_hot_by_hand(x[k], space[k])]
    if isinstance(space, Tuple):
        return [v for part, s in zip(x, space, strict=True) for v in one_hot_by_hand(part, s)]
    if isinstance(space, Box):
        scale = 255 if space.dtype == np.uint8 else 1
        return [float(v) / scale for v in np.ravel(x)]
    if isinstance(space, MultiBinary):
        return [float(v) for v in np.ravel(x)]
    counts = np.ravel(space.n if isinstance(space, Discrete) else space.nvec)
    numbers = []
    for value, start, n in zip(np.ravel(x), np.ravel(space.start), counts, strict=True):
        category = int(value) - int(start)
        numbers += [float(category)] if n <= 2 else [float(category == i) for i in range(n)]
    return numbers


@pytest.mark.parametrize("name", SPACES)
def test_encoding_in_numpy_and_tensorflow(name):
    space = SPACES[name]
    envs = gym.vector.SyncVectorEnv([lambda: Sampling(space)] * 4)
    environment = Environment(envs, seed=3)
    observation = environment.reset()
    spec = environment.spec.observation
    tree.assert_same_structure(observation, spec)
    for part, leaf in zip(tree.flatten(observation), tree.flatten(spec), strict=True):
        assert part.shape == (4, *leaf.shape)
        assert part.dtype == leaf.dtype
    expected = [one_hot_by_hand(env.unwrapped.last, space) for env in envs.envs]
    encoded = spaces.encode(observation, spec, np)
    assert encoded.dtype == np.float32
    assert encoded.shape == (4, spaces.encoded_size(spec))
    np.testing.assert_allclose(encoded, expected, rtol=1e-6)
    tensors = tf.nest.map_structure(tf.constant, observation)
    np.testing.assert_array_equal(spaces.encode(tensors, spec, tf), encoded)


@pytest.mark.parametrize("space", [gym.spaces.Text(3), Dict(a=gym.spaces.Sequence(Discrete(2)))])
def test_other_spaces_are_named(space):
    with pytest.raises(spaces.UnsupportedSpaceError, match=r"Text|Sequence"):
        spaces.observation_spec(space)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SPACES)
def test_learner_sees_the_policy_that_acted(name, mode):
    """Its log-probabilities on what came through the queue are those that the actor recorded."""
    length, envs = 6, 4
    vector = gym.vector.SyncVectorEnv([lambda: Sampling(SPACES[name])] * envs, autoreset_mode=mode)
    environment = Environment(vector, seed=3)
    config = IMPALAConfig(unroll_length=length, batch_size=2 * envs, jit_compile=False)
    builder = IMPALABuilder(config, environment.spec, envs)
    stop = threading.Event()
    queue = builder.make_queue()
    writer = builder.make_writer(queue.address, stop)
    reader = builder.make_reader(queue, stop)
    learner = builder.make_learner(reader, np.random.SeedSequence(0))
    params = builder._network.init(np.random.default_rng(0))
    params[-4] *= 100  # the policy head's kernel: far from the uniform policy of the start
    for variable, param in zip(learner.variables, params, strict=True):
        variable.assign(param)
    policy = CategoricalPolicy(builder._network, 0)
    policy.set_weights(Weights(0, flatten(params)))
    collector = UnrollCollector(environment, policy, length, 0, stop)
    finals = []
    for _ in range(2):
        block, _ = collector.collect(0)
        finals.append(tree.map_structure(np.copy, block.final_observation))
        writer.write(block)
    batch = merge_items(reader.next().unrolls)
    forward = learner._forward(batch)
    log_probs = tf.gather(tf.nn.log_softmax(forward.logits), batch.action, batch_dims=2)
    valid = batch.valid.numpy()
    np.testing.assert_allclose(
        log_probs.numpy()[valid], batch.behaviour_log_prob.numpy()[valid], atol=1e-5
    )
    assert np.ptp(batch.behaviour_log_prob.numpy()) > 0.03
    if mode is not AutoresetMode.NEXT_STEP:
        ended = (batch.terminated | batch.truncated).numpy()
        for got, *parts in zip(
            tree.flatten(batch.final_observation), *map(tree.flatten, finals), strict=True
        ):
            np.testing.assert_array_equal(got.numpy()[ended], np.concatenate(parts, 1)[ended])
    writer.close()
    stop.set()
    reader.close(lambda: True, timeout_s=10)


def test_final_observation_of_a_dict_is_that_of_the_ended_episode():
    vector = gym.vector.SyncVectorEnv(
        [lambda: Sampling(SPACES["dict"])] * 3, autoreset_mode=AutoresetMode.SAME_STEP
    )
    environment = Environment(vector, seed=0)
    environment.reset()
    read = spaces.ObservationReader(SPACES["dict"])
    ends = 0
    for _ in range(8):
        seen = [[] for _ in vector.envs]
        for env, log in zip(vector.envs, seen, strict=True):
            original = env.unwrapped._observe

            def observe(original=original, log=log):
                log.append(original())
                return log[-1]

            env.unwrapped._observe = observe
        step = environment.step(np.zeros(3, np.int64))
        for i, env in enumerate(vector.envs):
            del env.unwrapped._observe
            if step.terminated[i] or step.truncated[i]:
                ends += 1
                # The first observation of the step is the final one, the second that of the reset.
                final, first = (read(x) for x in seen[i])
                for key in ("a", "z"):
                    np.testing.assert_array_equal(step.final_observation[key][i], final[key])
                    np.testing.assert_array_equal(step.observation[key][i], first[key])
    assert ends > 3
