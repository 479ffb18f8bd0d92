"""Learners on batches made up beforehand."""

import numpy as np
import tensorflow as tf
from acme import specs

from headrace.agents.environments import EnvironmentSpec
from headrace.agents.impala import IMPALABuilder, IMPALAConfig
from headrace.agents.types import TrainBatch, Unroll

LENGTH, ENVS, ACTIONS = 5, 4, 2
SPEC = EnvironmentSpec(
    specs.Array((3,), np.float32), specs.DiscreteArray(ACTIONS, dtype=np.int64), False
)


class ListReader:
    """Hands out given batches, over and over. Plain unrolls are none that were replayed."""

    def __init__(self, batches):
        self._batches = batches
        self.batches = 0

    def next(self):
        self.batches += 1
        batch = self._batches[(self.batches - 1) % len(self._batches)]
        return batch if isinstance(batch, TrainBatch) else fresh(batch)


def fresh(items):
    return TrainBatch(items, np.zeros(items.sequence.shape, bool))


def make_items(seed=0, version=0, items=2, invalid=0.2):
    rng = np.random.default_rng(seed)
    rows = (items, LENGTH, ENVS)
    numbers = Unroll(
        observation=rng.standard_normal((items, LENGTH + 1, ENVS, 3)).astype(np.float32),
        action=rng.integers(0, ACTIONS, rows),
        reward=rng.standard_normal(rows).astype(np.float32),
        terminated=rng.random(rows) < 0.1,
        truncated=np.zeros(rows, bool),
        valid=rng.random(rows) >= invalid,
        behaviour_log_prob=np.log(rng.random(rows)).astype(np.float32),
        final_observation=(),
        weights_version=np.broadcast_to(np.asarray(version, np.int64), (items,)),
        actor_id=np.zeros(items, np.int64),
        sequence=np.arange(items),
    )
    return tf.nest.map_structure(tf.constant, numbers)


def make_learner(batches, make_builder=IMPALABuilder, **settings):
    config = IMPALAConfig(unroll_length=LENGTH, batch_size=2 * ENVS, **settings)
    builder = make_builder(config, SPEC, ENVS)
    return builder.make_learner(ListReader(batches), np.random.SeedSequence(0))
