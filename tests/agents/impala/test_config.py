"""Settings: each range is checked, and NaN is in none."""

import dataclasses
import math

import pytest

from headrace.agents.builder import item_envs
from headrace.agents.impala import IMPALAConfig
from headrace.agents.types import ConfigError

BAD_POINTS = [((0, 1.0), (0, 2.0)), ((5, 1.0), (4, 1.0)), ((-1, 1.0),), ((0, -1.0),)]
BAD_POINTS += [((0, math.nan),), ((0, math.inf),)]

WRONG = {
    "unroll_length": [0, -1],
    "batch_size": [0, -1],
    "learner_queue_size": [0, -1],
    "learner_queue_timeout_s": [0.0, -1.0, math.inf, math.nan],
    "learner_queue_timeout_action": ["stop"],
    "max_in_flight_items": [0, -1],
    "broadcast_interval": [0, -1],
    "update_period": [0, -1],
    "num_sgd_iter": [0, -1],
    "minibatch_buffer_size": [0, -1],
    "replay_proportion": [-0.5, math.inf, math.nan],
    "replay_slots": [-1],
    "max_policy_lag": [-1],
    "too_old": ["keep"],
    "learning_rate_schedule": BAD_POINTS,
    "entropy_cost_schedule": BAD_POINTS,
    "value_learning_rate": [0.0, math.nan],
    "average_steps": [0, -1],
    "hidden_sizes": [(), (64, 0), (-1,)],
    "discount": [-0.1, 1.01, math.nan],
    "reward_scale": [-1.0, math.inf, math.nan],
    "reward_clip": ["signs"],
    "rho_bar": [0.0, -1.0, math.inf, math.nan],
    "c_bar": [-0.1, 1.1, math.nan],
    "pg_rho_bar": [0.0, math.inf, math.nan],
    "trace_decay": [-0.1, 1.1, math.nan],
    "baseline_cost": [-1.0, math.inf, math.nan],
    "entropy_cost": [-1.0, math.inf, math.nan],
    "loss_reduction": ["average"],
    "optimizer": ["sgd"],
    "learning_rate": [0.0, -1e-3, math.inf, math.nan],
    "epsilon": [0.0, -1.0, math.inf, math.nan],
    "rmsprop_decay": [-0.1, 1.0, math.nan],
    "rmsprop_momentum": [-0.1, 1.0, math.nan],
    "max_gradient_norm": [0.0, -1.0, math.inf, math.nan],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in WRONG.items() for v in vs])
def test_wrong_value_is_named(name, value):
    with pytest.raises(ConfigError) as error:
        IMPALAConfig(**{name: value})
    assert error.value.setting == name
    assert str(error.value).startswith(f"{name} = {value!r}: ")


def test_replay_needs_slots():
    with pytest.raises(ConfigError) as error:
        IMPALAConfig(replay_proportion=0.5)
    assert error.value.setting == "replay_slots"
    IMPALAConfig(replay_proportion=0.5, replay_slots=1)


def test_every_setting_is_checked():
    free = {"jit_compile", "vtrace", "separate_value_optimizer", "warm_start_passes"}
    assert set(WRONG) | free == {field.name for field in dataclasses.fields(IMPALAConfig)}


@pytest.mark.parametrize(
    ("envs", "batch", "item"), [(16, 32, 16), (32, 16, 16), (16, 16, 16), (1, 32, 1), (256, 1, 1)]
)
def test_items_fit_blocks_and_batches(envs, batch, item):
    assert item_envs(envs, batch) == item


def test_no_environments_are_refused():
    with pytest.raises(ConfigError, match="envs_per_actor = 0"):
        item_envs(0, 16)


@pytest.mark.parametrize(("envs", "batch"), [(16, 24), (24, 16), (7, 32), (3, 2)])
def test_sizes_that_do_not_divide_are_refused(envs, batch):
    with pytest.raises(ConfigError, match=f"batch_size = {batch}: .* envs_per_actor = {envs}"):
        item_envs(envs, batch)
