"""Gymnasium in: vector environments, their specs, and one meaning for every autoreset mode."""

import dataclasses
import difflib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import gymnasium as gym
import numpy as np
import tree
from acme import specs
from gymnasium.vector import AutoresetMode, VectorEnv

from headrace.agents import spaces
from headrace.agents.types import Array, ConfigError

Vectorization = Literal["auto", "vector", "sync", "async"]
_MODES = {"auto": None, "vector": "vector_entry_point", "sync": "sync", "async": "async"}


class EnvironmentSpec(NamedTuple):
    """What an agent must know of an environment.

    Attributes:
      observation: nest of the specs of one observation, as the agent sees it; see `spaces`.
      action: number of discrete actions; the agent counts them from 0.
      separate_final_observation: whether unrolls carry `final_observation`.
    """

    observation: Any
    action: specs.DiscreteArray
    separate_final_observation: bool


class Step(NamedTuple):
    """Result of stepping E environments once.

    Attributes:
      observation: nest of [E, ...], what the next action is chosen on.
      reward: [E] float32.
      terminated: [E] bool.
      truncated: [E] bool.
      valid: [E] bool, False where the environment ignored the action to reset itself.
      final_observation: nest of [E, ...] where an episode ended, if the environment resets within
        the step; None if it never does or no episode ended.
    """

    observation: Any
    reward: Array
    terminated: Array
    truncated: Array
    valid: Array
    final_observation: Any


@dataclasses.dataclass(frozen=True)
class EnvironmentFactory:
    """Makes vector environments; can be sent to another process.

    Attributes:
      env: a Gymnasium id (`CartPole-v1`, `module:Env-v0`) or a callable that returns a
        `gymnasium.Env`.
      vectorization: `auto` takes the environment's own vector implementation if it has one and
        else steps Python environments in turn (`sync`); `vector` insists on the former; `async`
        gives each environment a process.
    """

    env: str | Callable[[], gym.Env[Any, Any]]
    vectorization: Vectorization = "auto"

    @property
    def name(self) -> str:
        """The id, or the callable's name."""
        return self.env if isinstance(self.env, str) else getattr(self.env, "__name__", "callable")

    def make(self, num_envs: int, seed: int) -> "Environment":
        """Makes `num_envs` environments stepped together, seeded `seed`, `seed + 1`, ...

        Raises:
          ConfigError: the id is unknown, the mode is not offered, or a space is unsupported.
        """
        return Environment(self._make_vector(num_envs), seed)

    def spec(self) -> EnvironmentSpec:
        """Makes one environment, reads its spaces and closes it.

        Raises:
          ConfigError: as `make`.
        """
        env = self._make_vector(1)
        try:
            return make_spec(env)
        finally:
            env.close()

    def _make_vector(self, num_envs: int) -> VectorEnv[Any, Any, Any]:
        if self.vectorization not in _MODES:
            raise ConfigError("vectorization", self.vectorization, f"one of {', '.join(_MODES)}")
        if callable(self.env):
            if self.vectorization == "vector":
                raise ConfigError(
                    "vectorization", "vector", "a callable makes single environments: use sync"
                )
            wrapper = (
                gym.vector.AsyncVectorEnv
                if self.vectorization == "async"
                else gym.vector.SyncVectorEnv
            )
            return wrapper([self.env] * num_envs)
        module, colon, _ = self.env.rpartition(":")
        if colon and not all(part.isidentifier() for part in module.split(".")):
            raise ConfigError(
                "env", self.env, "the module must be a dotted name, as my.envs:Env-v0"
            )
        try:
            return gym.make_vec(
                self.env, num_envs=num_envs, vectorization_mode=_MODES[self.vectorization]
            )
        except (gym.error.Error, ModuleNotFoundError) as error:
            raise ConfigError("env", self.env, _explain(self.env, error)) from error


def _explain(env_id: str, error: Exception) -> str:
    if env_id in gym.registry or isinstance(error, ModuleNotFoundError):
        return str(error)
    near = difflib.get_close_matches(env_id, gym.registry, n=3, cutoff=0.5)
    hint = f"; close matches: {', '.join(near)}" if near else ""
    return f"not a registered Gymnasium environment{hint} ({error})"


def make_spec(env: VectorEnv[Any, Any, Any]) -> EnvironmentSpec:
    """Reads an agent's view of an environment from its spaces.

    Raises:
      ConfigError: a space is unsupported or the autoreset mode is not declared.
    """
    observation, action = env.single_observation_space, env.single_action_space
    try:
        observation_spec = spaces.observation_spec(observation)
    except spaces.UnsupportedSpaceError as error:
        raise ConfigError(
            "env",
            _name(env),
            "its observation space must be made of Box, Discrete, MultiDiscrete, MultiBinary, Dict "
            f"and Tuple, but has {error}",
        ) from error
    if not isinstance(action, gym.spaces.Discrete):
        raise ConfigError("env", _name(env), f"its action space must be Discrete, but is {action}")
    return EnvironmentSpec(
        observation=observation_spec,
        action=specs.DiscreteArray(int(action.n), dtype=np.int64, name="action"),
        separate_final_observation=autoreset_mode(env) is not AutoresetMode.NEXT_STEP,
    )


def autoreset_mode(env: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    """Reads the autoreset mode from the environment's metadata.

    Raises:
      ConfigError: the environment does not declare it, so episode ends cannot be told right.
    """
    mode = env.metadata.get("autoreset_mode")
    if not isinstance(mode, AutoresetMode):
        raise ConfigError(
            "env", _name(env), "metadata['autoreset_mode'] must be a gymnasium AutoresetMode"
        )
    return mode


def _name(env: VectorEnv[Any, Any, Any]) -> str:
    return env.spec.id if env.spec else str(env)


class Environment:
    """E environments stepped together, with one meaning for every autoreset mode.

    NEXT_STEP environments spend a step on the reset, reported with `valid` False. SAME_STEP
    environments reset within the step and are reported with the final observation beside the
    new one. DISABLED environments are reset here and then look like SAME_STEP.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], seed: int) -> None:
        self.spec = make_spec(env)
        self.num_envs = env.num_envs
        self._env = env
        self._seed = seed
        self._mode = autoreset_mode(env)
        self._start = int(env.single_action_space.start)  # type: ignore[attr-defined]  # Discrete
        self._action_dtype = env.action_space.dtype
        self._read = spaces.ObservationReader(env.single_observation_space)
        self._all_valid = np.ones(self.num_envs, bool)
        self._resetting = np.zeros(self.num_envs, bool)

    def reset(self) -> Any:
        """Starts every environment; returns the observations, a nest of [E, ...]."""
        observation, _ = self._env.reset(seed=self._seed)
        self._resetting = np.zeros(self.num_envs, bool)
        return self._read(observation)

    def step(self, action: Array) -> Step:
        """Steps every environment with `action`, [E] counted from 0."""
        env_action = np.asarray(action + self._start, self._action_dtype)
        observation, reward, terminated, truncated, info = self._env.step(env_action)
        valid, final_observation = self._all_valid, None
        if self._mode is AutoresetMode.NEXT_STEP:
            valid = ~self._resetting
            self._resetting = terminated | truncated
        elif (ended := terminated | truncated).any():
            if self._mode is AutoresetMode.DISABLED:
                final_observation = tree.map_structure(np.array, self._read(observation))
                observation, _ = self._env.reset(options={"reset_mask": ended})
            else:
                final_observation = self._final_observations(ended, info)
        return Step(
            self._read(observation),
            np.asarray(reward, np.float32),
            terminated,
            truncated,
            valid,
            final_observation,
        )

    def close(self) -> None:
        """Closes the environments."""
        self._env.close()

    def _final_observations(self, ended: Array, info: dict[str, Any]) -> Any:
        if "final_obs" not in info:
            raise RuntimeError(
                f"{self._env} ended an episode but info has no 'final_obs', "
                "which SAME_STEP autoreset promises"
            )
        out = tree.map_structure(
            lambda spec: np.zeros((self.num_envs, *spec.shape), spec.dtype), self.spec.observation
        )
        for i in np.flatnonzero(ended):
            one = self._read(info["final_obs"][i])
            for batch, row in zip(tree.flatten(out), tree.flatten(one), strict=True):
                batch[i] = row
        return out
