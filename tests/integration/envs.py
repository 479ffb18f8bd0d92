"""Environments that misbehave. Imported by the actors: `--env envs:Raises-v0`."""

import os
import time

import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv


class Raises(CartPoleEnv):
    """Raises after some steps."""

    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps == 50:
            raise ValueError("the environment is broken")
        return super().step(action)


class Exits(Raises):
    """Ends its process."""

    def step(self, action):
        if self.steps == 49:
            os._exit(7)
        return super().step(action)


class RaisesAtReset(CartPoleEnv):
    """Cannot be reset."""

    def reset(self, **kwargs):
        raise OSError("no such level")


class Hangs(CartPoleEnv):
    """Does not return from a step, and cannot be interrupted."""

    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps == 50:
            while True:
                time.sleep(1)
        return super().step(action)


class Slow(CartPoleEnv):
    """Needs a while for a step."""

    def step(self, action):
        time.sleep(0.05)
        return super().step(action)


class Cue(gym.Env):
    """Pays for the action that one part of the observation names; episodes of ten steps."""

    def __init__(self):
        self.observation_space = gym.spaces.Dict(
            noise=gym.spaces.Box(-1, 1, (3,)),
            signs=gym.spaces.Tuple(
                (gym.spaces.Discrete(4, start=1), gym.spaces.MultiBinary(2)),
            ),
        )
        self.action_space = gym.spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self._steps = 0
        return self._observe(), {}

    def step(self, action):
        reward = float(action == self._cue - 1)
        self._steps += 1
        return self._observe(), reward, self._steps == 10, False, {}

    def _observe(self):
        observation = self.observation_space.sample()
        self._cue = int(observation["signs"][0])
        return observation


for env in (Cue, Slow, Raises, Exits, RaisesAtReset, Hangs):
    gym.register(f"{env.__name__}-v0", env, max_episode_steps=500)
