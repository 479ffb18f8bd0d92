"""What the learner counts and measures: env steps, passes, policy lag, time."""

import time

import numpy as np
import pytest
import tensorflow as tf
from learners import ListReader, make_items, make_learner

from headrace.agents.types import TrainBatch


def test_counters_count_valid_steps():
    batches = [make_items(seed) for seed in range(3)]
    learner = make_learner(batches)
    valid = [int(items.valid.numpy().sum()) for items in batches]
    for n in range(3):
        assert (learner.steps, learner.env_steps_trained) == (n, sum(valid[:n]))
        assert learner.weights().version == n
        learner.step()
    assert learner.counters() == {
        "learner_steps": 3,
        "env_steps_trained": sum(valid),
        "env_steps_received": sum(valid),
        "env_steps_replayed": 0,
        "env_steps_consumed": sum(valid),
        "env_steps_too_old": 0,
        "env_steps_dropped": 0,
        "env_steps_in_hand": 0,
    }


def test_time_is_that_of_all_steps():
    class SlowReader(ListReader):
        def next(self):
            time.sleep(0.05)
            return super().next()

    learner = make_learner([])
    learner._reader = SlowReader([make_items()])
    learner.step()
    learner.metrics()
    for _ in range(4):
        learner.step()
    time.sleep(0.1)
    metrics = learner.metrics()
    assert metrics["wait_ms_per_step"] >= 50
    assert metrics["ms_per_step"] >= metrics["wait_ms_per_step"] + 25


def test_policy_lag_is_in_learner_steps():
    """Items acted at versions 0, 1 and 3, trained at steps 0, 1, 2, 3."""
    versions = [(0, 0), (0, 1), (1, 0), (3, 3)]
    learner = make_learner([make_items(version=v) for v in versions])
    for _ in range(4):
        learner.step()
    metrics = learner.metrics()
    assert metrics["policy_lag_mean"] == pytest.approx((0 + 0.5 + 1.5 + 0) / 4)
    assert metrics["policy_lag_max"] == 2
    assert metrics["steps"] == 4


def test_metrics_are_those_since_the_last_call():
    learner = make_learner([make_items(seed) for seed in range(2)])
    assert learner.metrics() == {}
    losses = []
    for _ in range(2):
        learner.step()
        losses.append(learner.metrics()["total_loss"])
    assert learner.metrics() == {}
    both = make_learner([make_items(seed) for seed in range(2)])
    both.step()
    both.step()
    assert both.metrics()["total_loss"] == pytest.approx(np.mean(losses), rel=1e-4)


def test_each_pass_is_a_learner_step_and_counts():
    batches = [make_items(seed) for seed in range(4)]
    learner = make_learner(batches, minibatch_buffer_size=2, num_sgd_iter=2)
    a, b, c, d = (int(items.valid.numpy().sum()) for items in batches)
    seen = []
    for _ in range(7):
        before = learner.counters()
        learner.step()
        after = learner.counters()
        seen.append(after["env_steps_trained"] - before["env_steps_trained"])
        assert after["env_steps_received"] == (
            after["env_steps_consumed"] + after["env_steps_in_hand"]
        )
    assert seen == [a, b, a, b, c, d, c]
    assert learner.counters() | {"env_steps_replayed": 0} == {
        "learner_steps": 7,
        "env_steps_trained": 2 * (a + b + c) + d,
        "env_steps_received": a + b + c + d,
        "env_steps_replayed": 0,
        "env_steps_consumed": a + b + c,
        "env_steps_too_old": 0,
        "env_steps_dropped": 0,
        "env_steps_in_hand": d,
    }


def test_unrolls_that_are_too_old_are_dropped_and_counted():
    """At step 3, versions 1 and 0: a lag of 2 is within the limit, one of 3 is not."""
    fine = [make_items(seed, version=seed) for seed in range(3)]
    old = make_items(3, version=(1, 0))
    older = make_items(4, version=(0, 0))
    learner = make_learner([*fine, older, old], max_policy_lag=2)
    alone = make_learner([*fine, half_valid(old)])
    for _ in range(4):
        learner.step()
        alone.step()
    np.testing.assert_array_equal(learner.weights().flat, alone.weights().flat)
    counters = learner.counters()
    dropped = older.valid.numpy().sum() + old.valid.numpy()[1].sum()
    assert counters["env_steps_dropped"] == counters["env_steps_too_old"] == dropped
    assert counters["env_steps_trained"] == alone.env_steps_trained
    assert counters["env_steps_received"] == counters["env_steps_consumed"] + dropped


def half_valid(items):
    valid = items.valid.numpy().copy()
    valid[1] = False
    return items._replace(valid=tf.constant(valid))


def test_unrolls_that_are_too_old_may_be_trained_on():
    batches = [make_items(seed) for seed in range(3)]
    learner = make_learner(batches, max_policy_lag=1, too_old="train")
    plain = make_learner(batches)
    for _ in range(3):
        learner.step()
        plain.step()
    np.testing.assert_array_equal(learner.weights().flat, plain.weights().flat)
    counters = learner.counters()
    assert counters["env_steps_too_old"] == batches[2].valid.numpy().sum()
    assert counters["env_steps_dropped"] == 0


def test_replayed_items_are_counted_apart():
    items = make_items(version=(3, 1))
    learner = make_learner([TrainBatch(items, np.array([False, True]))])
    learner.steps = 4
    learner.step()
    first, second = items.valid.numpy().sum(axis=(1, 2))
    counters = learner.counters()
    assert counters["env_steps_received"] == counters["env_steps_consumed"] == first
    assert counters["env_steps_replayed"] == second
    assert counters["env_steps_trained"] == first + second
    metrics = learner.metrics()
    assert (metrics["policy_lag_mean"], metrics["policy_lag_max"]) == (2, 3)
    assert (metrics["replay_age_mean"], metrics["replay_age_max"]) == (3, 3)
