"""The node that acts."""

import contextlib
import threading

import numpy as np
from launchpad import CourierClient

from headrace.agents.acting import UnrollCollector
from headrace.agents.builder import AgentConfig, Builder
from headrace.agents.environments import EnvironmentFactory
from headrace.agents.types import Stopped
from headrace.agents.variables import VariableClient
from headrace.launch.nodes.reporting import ReportSender
from headrace.launch.nodes.rpc import RemoteWeightsSource
from headrace.launch.nodes.supervision import supervise

_FLUSH_S = 1.0
"""Longest wait at the end for the queue to take in what was written."""


class Actor:
    """Steps its environments under the newest policy and writes unrolls to the queue.

    Args:
      builder: makes the agent's parts.
      environments: makes the environments.
      actor_id: number of this actor, from 0.
      seed: root seed of the run.
      queue_address: of the learner's in-queue.
      variable_source: serves the weights.
      reporter: takes the records.
    """

    def __init__(
        self,
        builder: Builder[AgentConfig],
        environments: EnvironmentFactory,
        actor_id: int,
        seed: int,
        queue_address: str,
        variable_source: CourierClient,
        reporter: CourierClient,
    ) -> None:
        self._builder = builder
        self._environments = environments
        self._actor_id = actor_id
        self._seed = seed
        self._queue_address = queue_address
        self._variable_source = variable_source
        self._reporter = reporter

    def run(self) -> None:
        """Acts until the program stops."""
        supervise(self._act)

    def _act(self, stop: threading.Event) -> None:
        builder, config = self._builder, self._builder.config
        env_seed, policy_seed = actor_seeds(self._seed, self._actor_id, builder.envs_per_actor)
        with contextlib.ExitStack() as closing:
            environment = self._environments.make(builder.envs_per_actor, env_seed)
            closing.callback(environment.close)
            sender = ReportSender(self._reporter, f"actor_{self._actor_id}", stop)
            closing.callback(sender.close)
            policy = builder.make_policy(policy_seed)
            collector = UnrollCollector(
                environment, policy, config.unroll_length, self._actor_id, stop
            )
            source = RemoteWeightsSource(self._variable_source, stop)
            variables = VariableClient(source, config.update_period)
            # No unroll is made by a policy that was never published. The learner publishes once
            # its queue is up, so the writer finds it.
            policy.set_weights(variables.wait_for_first(stop))
            writer = builder.make_writer(self._queue_address, stop)
            closing.callback(writer.close)
            sender.post({"open_writers": 1})
            env_steps = 0
            with contextlib.suppress(Stopped):
                while not stop.is_set():
                    block, episodes = collector.collect(variables.version)
                    # Counted before it is written, as it may be trained on before `write` returns.
                    env_steps += int(np.count_nonzero(block.valid))
                    totals = {"env_steps_sampled": env_steps, "weight_fetches": variables.fetches}
                    sender.post(totals, episodes)
                    writer.write(block)
                    if weights := variables.poll():
                        policy.set_weights(weights)
            dropped = writer.flush(_FLUSH_S)
            sender.post({"env_steps_dropped": dropped, "open_writers": 0})


def actor_seeds(seed: int, actor_id: int, envs: int) -> tuple[int, np.random.SeedSequence]:
    """Seeds of one actor: of its first environment, and of its policy.

    The environments of all actors count up from one random start, so no two share a stream.
    """
    start = int(np.random.SeedSequence((seed, 0)).generate_state(1)[0]) % 2**30
    return start + actor_id * envs, np.random.SeedSequence((seed, 1, actor_id))
