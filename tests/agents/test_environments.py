"""Environments: what an agent is told of them, and how each is stepped."""

import functools
import sys

import gymnasium as gym
import numpy as np
import pytest
from counting import Counting
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode

from headrace.agents.environments import Environment, EnvironmentFactory, make_spec
from headrace.agents.types import ConfigError


class Spaces(gym.Env):
    """An environment of given spaces that is never stepped."""

    def __init__(self, observation_space=None, action_space=None):
        self.observation_space = observation_space or gym.spaces.Box(-1, 1, (2,))
        self.action_space = action_space or gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}


def spec_of(**spaces):
    return make_spec(gym.vector.SyncVectorEnv([lambda: Spaces(**spaces)]))


@pytest.mark.parametrize(
    ("dtype", "seen"),
    [
        (np.float32, np.float32),
        (np.float64, np.float32),
        (np.uint8, np.uint8),
        (np.int64, np.int64),
    ],
)
@pytest.mark.parametrize("shape", [(), (4,), (8, 8, 3)])
def test_box_of_any_shape_and_dtype(dtype, seen, shape):
    observation = spec_of(observation_space=gym.spaces.Box(0, 9, shape, dtype)).observation
    assert observation.shape == shape
    assert observation.dtype == seen


def test_discrete_with_start_is_counted_from_zero():
    action = spec_of(action_space=gym.spaces.Discrete(5, start=-2)).action
    assert (action.minimum, action.maximum) == (0, 4)


@pytest.mark.parametrize(
    ("spaces", "words"),
    [
        ({"observation_space": gym.spaces.Text(3)}, "observation space must be made of Box"),
        (
            {"observation_space": gym.spaces.Dict(a=gym.spaces.Sequence(gym.spaces.Discrete(2)))},
            "but has Sequence",
        ),
        ({"action_space": gym.spaces.Box(-1, 1, (2,))}, "action space must be Discrete"),
        ({"action_space": gym.spaces.MultiBinary(2)}, "action space must be Discrete"),
    ],
)
def test_unsupported_space_is_refused(spaces, words):
    with pytest.raises(ConfigError, match=words):
        spec_of(**spaces)


def test_undeclared_autoreset_mode_is_refused():
    env = gym.vector.SyncVectorEnv([Spaces])
    env.metadata = {}
    with pytest.raises(ConfigError, match="autoreset_mode"):
        make_spec(env)


def test_unknown_id_names_close_matches():
    with pytest.raises(ConfigError, match="CartPole-v1") as error:
        EnvironmentFactory("CartPool-v1").spec()
    assert error.value.setting == "env"
    assert error.value.value == "CartPool-v1"


def test_module_is_imported_first(tmp_path, monkeypatch):
    module = tmp_path / "my_headrace_envs.py"
    module.write_text(
        "import gymnasium\n"
        "gymnasium.register('Mine-v0', 'gymnasium.envs.classic_control:CartPoleEnv')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    factory = EnvironmentFactory("my_headrace_envs:Mine-v0")
    assert factory.spec().observation.shape == (4,)
    assert "my_headrace_envs" in sys.modules
    gym.registry.pop("Mine-v0")


def test_missing_module_is_named():
    with pytest.raises(ConfigError, match="no_such_module"):
        EnvironmentFactory("no_such_module:Mine-v0").spec()


def test_auto_takes_the_environments_own_vector_form():
    assert isinstance(EnvironmentFactory("CartPole-v1").make(2, 0)._env, CartPoleVectorEnv)
    sync = EnvironmentFactory("CartPole-v1", "sync").make(2, 0)
    assert isinstance(sync._env, gym.vector.SyncVectorEnv)
    other = EnvironmentFactory("Acrobot-v1").make(2, 0)
    assert isinstance(other._env, gym.vector.SyncVectorEnv)


@pytest.mark.parametrize("env", ["Acrobot-v1", Counting])
def test_vector_form_that_does_not_exist_is_refused(env):
    with pytest.raises(ConfigError, match="vector"):
        EnvironmentFactory(env, "vector").spec()


@pytest.mark.parametrize("env", ["CartPole-v1", Counting])
def test_unknown_vectorization_is_refused(env):
    with pytest.raises(ConfigError, match="auto, vector, sync, async"):
        EnvironmentFactory(env, "syncc").spec()


def test_callable_makes_the_environments():
    factory = EnvironmentFactory(Counting)
    assert factory.name == "Counting"
    environment = factory.make(3, seed=5)
    np.testing.assert_array_equal(environment.reset()[:, 0], [5, 6, 7])


def test_async_environments_are_processes():
    environment = EnvironmentFactory(Counting, "async").make(2, seed=5)
    np.testing.assert_array_equal(environment.reset()[:, 0], [5, 6])
    step = environment.step(np.array([0, 1]))
    assert step.valid.all()
    environment.close()


@pytest.mark.parametrize("vectorization", ["vector", "sync"])
def test_b9_seeds_are_distinct_and_repeatable(vectorization):
    factory = EnvironmentFactory("CartPole-v1", vectorization)
    first, again, other = (factory.make(4, seed).reset() for seed in (1, 1, 1000))
    np.testing.assert_array_equal(first, again)
    rows = np.concatenate([first, other])
    assert len(np.unique(rows, axis=0)) == 8


def step_to_end(mode):
    """Steps two Counting envs of length 2 and 3 through their ends."""
    make = functools.partial(Counting, schedule=((3, False), (2, True)))
    vector = gym.vector.SyncVectorEnv([make, make], autoreset_mode=mode)
    environment = Environment(vector, seed=0)
    observations = [environment.reset()]
    steps = [environment.step(np.array([0, 0])) for _ in range(4)]
    observations += [step.observation for step in steps]
    return [o[:, 1:3].tolist() for o in observations], steps


def test_next_step_spends_a_step_on_the_reset():
    observations, steps = step_to_end(AutoresetMode.NEXT_STEP)
    # (episode, step) of env 0, of length 3, and of env 1, of length 2.
    assert observations == [
        [[0, 0], [0, 0]],
        [[0, 1], [0, 1]],
        [[0, 2], [0, 2]],
        [[0, 3], [1, 0]],
        [[1, 0], [1, 1]],
    ]
    assert [s.valid.tolist() for s in steps] == [[1, 1], [1, 1], [1, 0], [0, 1]]
    assert [s.terminated.tolist() for s in steps] == [[0, 0], [0, 1], [0, 0], [0, 0]]
    assert [s.truncated.tolist() for s in steps] == [[0, 0], [0, 0], [1, 0], [0, 0]]
    assert all(s.final_observation is None for s in steps)
    assert steps[2].reward[1] == 0


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_reset_within_the_step_shows_the_final_observation(mode):
    observations, steps = step_to_end(mode)
    assert observations == [
        [[0, 0], [0, 0]],
        [[0, 1], [0, 1]],
        [[0, 2], [1, 0]],
        [[1, 0], [1, 1]],
        [[1, 1], [1, 2]],
    ]
    assert all(s.valid.all() for s in steps)
    assert steps[0].final_observation is None
    assert steps[1].final_observation[1, 1:3].tolist() == [0, 2]
    assert steps[2].final_observation[0, 1:3].tolist() == [0, 3]


def test_float64_observations_and_rewards_become_float32():
    _, steps = step_to_end(AutoresetMode.SAME_STEP)
    assert steps[1].observation.dtype == np.float32
    assert steps[1].final_observation.dtype == np.float32
    assert steps[1].reward.dtype == np.float32


def test_missing_final_observation_is_an_error():
    class Forgetful(gym.vector.SyncVectorEnv):
        def step(self, actions):
            return (*super().step(actions)[:-1], {})

    vector = Forgetful([lambda: Counting(((1, True),))], autoreset_mode=AutoresetMode.SAME_STEP)
    environment = Environment(vector, seed=0)
    environment.reset()
    with pytest.raises(RuntimeError, match="final_obs"):
        environment.step(np.array([0]))
