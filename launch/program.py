"""Builds the Launchpad program: which nodes there are, and who talks to whom."""

import dataclasses

import launchpad as lp

from headrace.agents.builder import AgentConfig, Builder
from headrace.agents.environments import EnvironmentFactory
from headrace.launch.nodes.actor import Actor
from headrace.launch.nodes.learner import LearnerNode
from headrace.launch.nodes.reporter import Reporter, ReporterConfig
from headrace.launch.nodes.rpc import bounded
from headrace.launch.nodes.variable_source import VariableSource

LEARNER, ACTOR, VARIABLE_SOURCE, REPORTER = "learner", "actor", "variable_source", "reporter"

_WRITERS_TIMEOUT_S = 0.5


@dataclasses.dataclass(frozen=True)
class ProgramConfig:
    """What the program needs beyond its parts.

    Attributes:
      actors: number of actor nodes.
      seed: root seed.
      max_env_steps: budget in env steps trained; None is no limit.
      learner_threads: of a TensorFlow op; None leaves TensorFlow's settings alone.
      reporter: settings of the reporter.
    """

    actors: int
    seed: int
    max_env_steps: int | None
    learner_threads: int | None
    reporter: ReporterConfig


def make_program(
    builder: Builder[AgentConfig],
    environments: EnvironmentFactory,
    config: ProgramConfig,
    view_timeout_s: float,
) -> tuple[lp.Program, lp.CourierHandle]:
    """Builds the program; its groups are named by the constants of this module.

    Returns:
      The program, and a handle of the reporter for whoever shows the progress, whose calls give
      up after `view_timeout_s`.
    """
    program = lp.Program("headrace")
    reporter_node = lp.CourierNode(Reporter, config.reporter)
    reporter = bounded(program.add_node(reporter_node, label=REPORTER))
    variable_source = bounded(
        program.add_node(lp.CourierNode(VariableSource), label=VARIABLE_SOURCE)
    )
    queue = program.add_node(
        LearnerNode(
            builder=builder,
            seed=config.seed,
            max_env_steps=config.max_env_steps,
            threads=config.learner_threads,
            run_dir=config.reporter.run_dir,
            variable_source=variable_source,
            reporter=reporter,
            writers=bounded(reporter_node.create_handle(), _WRITERS_TIMEOUT_S),
        ),
        label=LEARNER,
    )
    with program.group(ACTOR):
        for actor_id in range(config.actors):
            program.add_node(
                lp.PyClassNode(
                    Actor,
                    builder=builder,
                    environments=environments,
                    actor_id=actor_id,
                    seed=config.seed,
                    queue_address=queue,
                    variable_source=variable_source,
                    reporter=reporter,
                )
            )
    return program, bounded(reporter_node.create_handle(), view_timeout_s)
