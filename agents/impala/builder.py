"""Makes the parts of IMPALA."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.agents.acting import CategoricalPolicy
from headrace.agents.builder import Builder, Learner, item_envs
from headrace.agents.environments import EnvironmentSpec
from headrace.agents.impala.config import IMPALAConfig
from headrace.agents.networks import MLP
from headrace.agents.types import Unroll

if TYPE_CHECKING:
    import threading

    from headrace.agents.replay import Queue, UnrollReader, UnrollWriter


class IMPALABuilder(Builder[IMPALAConfig]):
    """Makes the parts of IMPALA. See `Builder`."""

    name = "impala"

    def __init__(self, config: IMPALAConfig, spec: EnvironmentSpec, envs_per_actor: int) -> None:
        super().__init__(config, spec, envs_per_actor)
        self._item_envs = item_envs(envs_per_actor, config.batch_size)
        self._items_per_batch = config.batch_size // self._item_envs
        self._network = MLP(spec.observation, spec.action.num_values, config.hidden_sizes)

    def make_queue(self, port: int | None = None) -> Queue:
        """See `Builder.make_queue`."""
        from headrace.agents import replay

        config = self.config
        max_items = config.learner_queue_size * self._items_per_batch
        slots = config.replay_slots if config.replay_proportion else 0
        return replay.Queue(self._signature(), max_items, port, slots)

    def make_writer(self, address: str, stop: threading.Event) -> UnrollWriter:
        """See `Builder.make_writer`."""
        from headrace.agents import replay

        config = self.config
        return replay.UnrollWriter(
            address,
            self._item_envs,
            config.max_in_flight_items,
            stop,
            replay=config.replay_proportion > 0,
        )

    def make_reader(self, queue: Queue, stop: threading.Event) -> UnrollReader:
        """See `Builder.make_reader`."""
        from headrace.agents import replay

        config = self.config
        return replay.UnrollReader(
            queue,
            self._items_per_batch,
            stop,
            replay_proportion=config.replay_proportion,
            timeout_s=config.learner_queue_timeout_s,
            fail_at_timeout=config.learner_queue_timeout_action == "fail",
        )

    def make_policy(
        self, seed: np.random.SeedSequence, *, greedy: bool = False
    ) -> CategoricalPolicy:
        """See `Builder.make_policy`."""
        return CategoricalPolicy(self._network, seed, greedy=greedy)

    def make_learner(self, reader: UnrollReader, seed: np.random.SeedSequence) -> Learner:
        """See `Builder.make_learner`."""
        from headrace.agents.impala import learning

        params = self._network.init(np.random.default_rng(seed))
        return learning.IMPALALearner(
            self.config, self._network, params, reader, self.after_train_step
        )

    def _signature(self) -> Unroll:
        from headrace.agents import replay

        return replay.unroll_signature(self.spec, self.config.unroll_length, self._item_envs)
