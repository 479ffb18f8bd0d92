"""An environment whose every observation, reward and ending is known beforehand."""

import gymnasium as gym
import numpy as np

START = 10
"""First action of the environment's Discrete space."""

NUM_ACTIONS = 3

# (length, terminated): one step, an end on an unroll edge, many unrolls long, both kinds of end.
SCHEDULE = ((1, True), (4, False), (1, False), (3, True), (14, False), (8, True), (2, False))


class Counting(gym.Env):
    """Shows who and when it is, and rewards the action by a known function.

    Observation: [env id, episode number, step in the episode, sum of actions of the episode].
    The env id is the seed of the first reset.
    """

    def __init__(self, schedule=SCHEDULE):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float64)
        self.action_space = gym.spaces.Discrete(NUM_ACTIONS, start=START)
        self._schedule = schedule
        self._env_id = None
        self._episode = -1
        self._step = None
        self._actions = 0
        self.taken = []
        """(episode, step, action) of every step, as the environment saw it."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self._env_id = seed
        self._episode += 1
        self._step = 0
        self._actions = 0
        return self._observe(), {}

    def step(self, action):
        assert self._step is not None, "stepped after the end without a reset"
        assert self.action_space.contains(action), action
        self.taken.append((self._episode, self._step, int(action) - START))
        length, terminates = length_and_end(self._env_id, self._episode, self._schedule)
        reward = reward_of(self._observe(), int(action) - START)
        self._step += 1
        self._actions += int(action) - START
        ended = self._step == length
        observation = self._observe()
        if ended:
            self._step = None
        return observation, reward, ended and terminates, ended and not terminates, {}

    def _observe(self):
        return np.array([self._env_id, self._episode, self._step, self._actions], np.float64)


def length_and_end(env_id, episode, schedule=SCHEDULE):
    """Length of an episode, and whether it ends by termination; each env has its own order."""
    return schedule[(episode + int(env_id)) % len(schedule)]


def reward_of(observation, action):
    """Reward of an action, counted from 0, on an observation."""
    _, episode, step, _ = observation
    return float(100 * episode + 10 * step + action + 1)
