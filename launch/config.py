"""Settings of a run: what is launched, with which budget, and where it is written."""

import dataclasses
import math
from typing import Literal

from headrace.agents.environments import Vectorization
from headrace.agents.types import ConfigError


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Settings of a run.

    Raises:
      ConfigError: a value is out of its range.
    """

    env: str = "CartPole-v1"
    """Gymnasium id, or module:Env-v0 to import a module first."""
    actors: int = 2
    """Actor processes."""
    envs_per_actor: int = 16
    """Environments that each actor steps together."""
    vectorization: Vectorization = "auto"
    """auto: the environment's own vector form if it has one, else sync. vector: insist on it.
    sync: Python environments in turn. async: a process each."""
    seed: int = 0
    """Root of every random stream of the run."""
    max_env_steps: int | None = None
    """Budget in env steps trained; None is no limit."""
    target_return: float | None = None
    """Stop when the mean return of the last 100 episodes reaches this; None is no target."""
    time_limit: float | None = None
    """Budget in seconds from the command's start; None is no limit."""
    run_dir: str | None = None
    """Folder to write to; must not exist. None: runs/<env>-<agent>-<time>."""
    report_interval: float = 1.0
    """Seconds between two lines of metrics.jsonl."""
    learner_threads: int | None = None
    """Threads of a TensorFlow op in the learner process; None: the cores that the actors leave, at
    least 1."""
    launch_type: Literal["processes", "threads"] = "processes"
    """processes: one per node. threads: all nodes in this process, slower, for debugging."""

    def __post_init__(self) -> None:
        for name in ("actors", "envs_per_actor"):
            _check(self, name, getattr(self, name) >= 1, "must be at least 1")
        for name in ("max_env_steps", "learner_threads"):
            value = getattr(self, name)
            _check(self, name, value is None or value >= 1, "must be at least 1")
        _check(self, "seed", 0 <= self.seed < 2**31, "must lie in [0, 2^31)")
        _check(
            self,
            "time_limit",
            self.time_limit is None or 0 < self.time_limit < math.inf,
            "must be above 0 s",
        )
        _check(
            self, "report_interval", 0.1 <= self.report_interval < math.inf, "must be 0.1 s or more"
        )
        _check(
            self,
            "target_return",
            self.target_return is None or math.isfinite(self.target_return),
            "must be finite",
        )
        _check(
            self,
            "launch_type",
            self.launch_type in ("processes", "threads"),
            "processes or threads",
        )


def _check(config: RunConfig, name: str, holds: bool, expected: str) -> None:
    # Conditions are written so that NaN fails them.
    if not holds:
        raise ConfigError(name, getattr(config, name), expected)
