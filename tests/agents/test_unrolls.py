"""From the environment to the train batch: every step once, in order, ended right."""

import itertools
import threading
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from counting import START, Counting, length_and_end, reward_of
from gymnasium.vector import AutoresetMode

from headrace.agents.acting import Decision, UnrollCollector
from headrace.agents.environments import Environment
from headrace.agents.impala import IMPALABuilder, IMPALAConfig
from headrace.agents.impala.learning import IMPALALearner, merge_items
from headrace.agents.types import Stopped, Unroll

MODES = list(AutoresetMode)
LENGTH = 4
ENVS = 4


class CyclingPolicy:
    """Action (env + number of the call) mod 3, with a log-probability that names the call."""

    def __init__(self):
        self.calls = 0

    def set_weights(self, weights):
        raise AssertionError("not used")

    def __call__(self, observation):
        rows = np.arange(len(observation))
        log_prob = -(self.calls + rows / 100).astype(np.float32)
        action = (rows + self.calls) % 3
        self.calls += 1
        return Decision(action, log_prob)


def make_environment(mode, envs=ENVS, seed=5):
    vector = gym.vector.SyncVectorEnv([Counting] * envs, autoreset_mode=mode)
    return Environment(vector, seed), [env.unwrapped for env in vector.envs]


def collect(mode, unrolls, envs=ENVS):
    """Unrolls of the Counting environment, copied; its episodes; and the environments."""
    environment, singles = make_environment(mode, envs)
    collector = UnrollCollector(environment, CyclingPolicy(), LENGTH, 7, threading.Event())
    blocks, episodes = [], []
    for version in range(unrolls):
        block, ended = collector.collect(version)
        blocks.append(Unroll(*(np.copy(x) if isinstance(x, np.ndarray) else x for x in block)))
        episodes += ended
    return blocks, episodes, singles, environment


def transitions(blocks, env):
    """(observation, action, reward, terminated, truncated, successor) of an env's valid rows."""
    rows = []
    for block in blocks:
        for t in range(block.action.shape[0]):
            if not block.valid[t, env]:
                continue
            ended = block.terminated[t, env] or block.truncated[t, env]
            separate = not isinstance(block.final_observation, tuple)
            successor: Any = block.observation[t + 1, env]
            if ended and separate:
                successor = block.final_observation[t, env]
            rows.append(
                (
                    block.observation[t, env],
                    int(block.action[t, env]),
                    float(block.reward[t, env]),
                    bool(block.terminated[t, env]),
                    bool(block.truncated[t, env]),
                    successor,
                )
            )
    return rows


def check_transitions(rows, single, env_id):
    """Each step that the env took stands there once, in order, with the right neighbours."""
    assert [(int(o[1]), int(o[2]), a) for o, a, *_ in rows] == single.taken[: len(rows)]
    for observation, action, reward, terminated, truncated, successor in rows:
        _, episode, step, actions = observation
        length, terminates = length_and_end(env_id, int(episode))
        assert observation[0] == env_id
        assert reward == reward_of(observation, action)
        assert (terminated or truncated) == (step + 1 == length)
        assert terminated == (step + 1 == length and terminates)
        # The successor is of the same episode, also where it ended: never the reset observation.
        np.testing.assert_array_equal(successor, [env_id, episode, step + 1, actions + action])


@pytest.mark.parametrize("mode", MODES)
def test_each_step_is_in_one_unroll_in_order(mode):
    blocks, _, singles, _ = collect(mode, unrolls=30)
    for env, single in enumerate(singles):
        rows = transitions(blocks, env)
        assert len(rows) == len(single.taken)
        check_transitions(rows, single, env_id=5 + env)


@pytest.mark.parametrize("mode", MODES)
def test_last_observation_begins_the_next_unroll(mode):
    blocks, _, _, _ = collect(mode, unrolls=20)
    for block, following in itertools.pairwise(blocks):
        np.testing.assert_array_equal(block.observation[-1], following.observation[0])


@pytest.mark.parametrize("mode", MODES)
def test_only_the_reset_rows_of_next_step_are_invalid(mode):
    blocks, episodes, _, _ = collect(mode, unrolls=30)
    valid = np.concatenate([block.valid for block in blocks])
    if mode is not AutoresetMode.NEXT_STEP:
        assert valid.all()
        return
    ended = np.concatenate([block.terminated | block.truncated for block in blocks])
    np.testing.assert_array_equal(valid[1:], ~ended[:-1])
    assert len(episodes) > 40


@pytest.mark.parametrize("mode", MODES)
def test_episodes_are_reported_with_raw_return_and_length(mode):
    _, episodes, singles, _ = collect(mode, unrolls=30)
    expected = []
    for env, single in enumerate(singles):
        rewards: dict[int, list[float]] = {}
        for episode, step, action in single.taken:
            reward = reward_of((0, episode, step, 0), action)
            rewards.setdefault(episode, []).append(reward)
        for episode, values in rewards.items():
            if len(values) == length_and_end(5 + env, episode)[0]:
                expected.append((sum(values), len(values)))
    assert sorted(episodes) == sorted(expected)


def test_every_kind_of_episode_end_occurs():
    blocks, episodes, _, _ = collect(AutoresetMode.NEXT_STEP, unrolls=30)
    lengths = {episode.length for episode in episodes}
    assert 1 in lengths
    assert max(lengths) > 3 * LENGTH
    assert any(block.truncated[-1].any() for block in blocks)
    assert any(block.terminated[-1].any() for block in blocks)
    assert any(block.truncated[:-1].any() for block in blocks)
    # A reset transition as the first row of an unroll, too.
    assert any(not block.valid[0].all() for block in blocks)


def test_log_probabilities_belong_to_their_rows():
    blocks, _, _, _ = collect(AutoresetMode.NEXT_STEP, unrolls=3)
    log_probs = np.concatenate([block.behaviour_log_prob for block in blocks])
    calls, rows = np.arange(3 * LENGTH)[:, None], np.arange(ENVS)[None]
    np.testing.assert_allclose(log_probs, -(calls + rows / 100), rtol=1e-6)
    actions = np.concatenate([block.action for block in blocks])
    np.testing.assert_array_equal(actions, (rows + calls) % 3)


def test_unroll_carries_version_and_actor():
    blocks, _, _, _ = collect(AutoresetMode.NEXT_STEP, unrolls=3)
    assert [int(block.weights_version) for block in blocks] == [0, 1, 2]
    assert {int(block.actor_id) for block in blocks} == {7}


def test_b11_discrete_start_reaches_the_env_only():
    blocks, _, singles, environment = collect(AutoresetMode.NEXT_STEP, unrolls=3)
    assert environment.spec.action.num_values == 3
    assert {int(a) for block in blocks for a in block.action.ravel()} == {0, 1, 2}
    assert START == 10
    assert len(singles[0].taken) > 0  # Counting asserts that its actions are 10, 11 or 12


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch_size", [ENVS, ENVS // 2, 2 * ENVS])
def test_batches_hold_each_step_once_in_order(mode, batch_size):
    """Through a real queue, with blocks as large as, larger and smaller than a batch."""
    unrolls = 24
    environment, singles = make_environment(mode)
    config = IMPALAConfig(unroll_length=LENGTH, batch_size=batch_size, learner_queue_size=3)
    builder = IMPALABuilder(config, environment.spec, ENVS)
    collector = UnrollCollector(environment, CyclingPolicy(), LENGTH, 0, threading.Event())
    stop = threading.Event()
    queue = builder.make_queue()
    writer = builder.make_writer(queue.address, stop)
    reader = builder.make_reader(queue, stop)
    steps = 0

    def act():
        nonlocal steps
        for version in range(unrolls):
            block, _ = collector.collect(version)
            writer.write(block)
            steps += int(block.valid.sum())
        writer.flush(timeout_s=30)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    batches = []
    for _ in range(unrolls * ENVS // batch_size):
        items = reader.next().unrolls
        batch = merge_items(items)
        assert batch.action.shape == (LENGTH, batch_size)
        batches.append((items, Unroll(*(_numpy(x) for x in batch))))
    thread.join(30)
    assert not thread.is_alive()
    assert reader.waiting() == 0

    sequence = np.concatenate([items.sequence.numpy() for items, _ in batches])
    np.testing.assert_array_equal(sequence, np.arange(len(sequence)))
    assert sum(int(batch.valid.sum()) for _, batch in batches) == steps
    # Columns in the order of arrival are the envs in turn: put each env's columns together.
    columns = [_column(batch, b) for _, batch in batches for b in range(batch_size)]
    for env, single in enumerate(singles):
        rows = [row for column in columns[env::ENVS] for row in transitions([column], 0)]
        assert len(rows) == len(single.taken)
        check_transitions(rows, single, env_id=5 + env)
    writer.close()
    stop.set()
    reader.close(lambda: True, timeout_s=10)


def _numpy(x):
    return x if isinstance(x, tuple) else x.numpy()


def _column(batch, b):
    return Unroll(*(x[:, b : b + 1] if getattr(x, "ndim", 0) > 1 else x for x in batch))


@pytest.mark.parametrize("mode", MODES)
def test_b6_b7_bootstrap_is_the_value_of_the_final_observation(mode):
    """The learner's next values, on the value function V(x) = step in episode + 1000 * episode."""
    blocks, _, _, environment = collect(mode, unrolls=12)
    config = IMPALAConfig(unroll_length=LENGTH, batch_size=ENVS)
    builder = IMPALABuilder(config, environment.spec, ENVS)
    learner = IMPALALearner(config, _StepValue(), builder._network.init(_rng()), reader=None)
    for block in blocks:
        forward = learner._forward(_tensors(block))
        bootstraps = ~block.terminated & block.valid
        expected = block.observation[:-1, :, 2] + 1 + 1000 * block.observation[:-1, :, 1]
        np.testing.assert_array_equal(forward.next_values.numpy()[bootstraps], expected[bootstraps])


class _StepValue:
    def policy_and_value(self, params, observation, xp):
        return xp.zeros([len(observation), 3]), observation[:, 2] + 1000 * observation[:, 1]


def _rng():
    return np.random.default_rng(0)


def _tensors(block):
    import tensorflow as tf

    return tf.nest.map_structure(tf.convert_to_tensor, block)


def test_weights_never_change_within_an_unroll():
    """The policy is asked T times per collect, and weights are set between two collects only."""
    environment, _ = make_environment(AutoresetMode.NEXT_STEP)
    policy = CyclingPolicy()
    collector = UnrollCollector(environment, policy, LENGTH, 0, threading.Event())
    for unroll in range(3):
        assert policy.calls == unroll * LENGTH
        collector.collect(unroll)


def test_stop_ends_an_unroll_between_two_steps():
    environment, _ = make_environment(AutoresetMode.NEXT_STEP)
    stop = threading.Event()

    class StoppingPolicy(CyclingPolicy):
        def __call__(self, observation):
            if self.calls == 1:
                stop.set()
            return super().__call__(observation)

    policy = StoppingPolicy()
    with pytest.raises(Stopped):
        UnrollCollector(environment, policy, LENGTH, 0, stop).collect(0)
    assert policy.calls == 2
