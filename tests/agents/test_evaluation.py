"""Evaluation: whole episodes, as many of each environment."""

import gymnasium as gym
import numpy as np
import pytest
from counting import Counting, length_and_end, reward_of
from gymnasium.vector import AutoresetMode

from headrace.agents.acting import Decision
from headrace.agents.environments import Environment
from headrace.agents.evaluation import evaluate


class AlwaysOne:
    def set_weights(self, weights):
        raise AssertionError("evaluation has no say in the weights")

    def __call__(self, observation):
        return Decision(np.ones(len(observation), np.int64), np.zeros(len(observation), np.float32))


@pytest.mark.parametrize(
    "mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]
)
@pytest.mark.parametrize("per_env", [1, 3])
def test_first_episodes_of_each_environment(mode, per_env):
    envs = gym.vector.SyncVectorEnv([Counting] * 3, autoreset_mode=mode)
    environment = Environment(envs, seed=5)
    episodes = evaluate(AlwaysOne(), environment, per_env)
    assert len(episodes) == 3 * per_env
    for i, played in enumerate(episodes):
        env_id, episode = 5 + i // per_env, i % per_env
        length, _ = length_and_end(env_id, episode)
        assert played.length == length
        rewards = [reward_of((env_id, episode, step, 0), 1) for step in range(length)]
        assert played.episode_return == sum(rewards)
