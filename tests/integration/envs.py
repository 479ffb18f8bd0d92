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


for env in (Slow, Raises, Exits, RaisesAtReset, Hangs):
    gym.register(f"{env.__name__}-v0", env, max_episode_steps=500)
