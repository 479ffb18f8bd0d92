"""Trains on this machine: `run` takes a builder and returns a result."""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any

from headrace.agents.builder import AgentConfig, Builder
from headrace.agents.environments import EnvironmentFactory
from headrace.agents.types import ConfigError
from headrace.launch import supervisor
from headrace.launch.config import RunConfig
from headrace.launch.nodes.reporter import SUMMARY_FILE, ReporterConfig
from headrace.launch.program import ProgramConfig, make_program
from headrace.launch.view import LOOK_TIMEOUT_S, View, make_view

CONFIG_FILE = "config.json"
LOG_DIR = "logs"


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished run.

    Attributes:
      run_dir: what it wrote.
      summary: the content of `summary.json`.
    """

    run_dir: Path
    summary: dict[str, Any]


def run(
    builder: Builder[AgentConfig],
    environments: EnvironmentFactory,
    config: RunConfig,
    *,
    view: View | None = None,
    started_at: float | None = None,
) -> Result:
    """Trains an agent until its target, its budget, or an interrupt.

    Args:
      builder: makes the agent's parts.
      environments: makes the environments.
      config: settings of the run; `env`, `vectorization` and `envs_per_actor` are not read, since
        the other arguments settle them.
      view: shows the progress; None is a live view on a terminal and else plain lines.
      started_at: Unix time that counts as the start; None is now.

    Returns:
      The result, also when a budget ended the run before the target.

    Raises:
      ConfigError: the run directory exists or cannot be made.
      NodeError: a node failed.
      Interrupted: a signal came.
    """
    started_at = time.time() if started_at is None else started_at
    run_dir = make_run_dir(config.run_dir, environments.name, builder.name)
    _write_config(run_dir / CONFIG_FILE, builder, environments, config)
    reporter_config = ReporterConfig(
        run_dir=str(run_dir.absolute()),
        started_at=started_at,
        report_interval=config.report_interval,
        target_return=config.target_return,
        time_limit=config.time_limit,
    )
    threads = config.learner_threads or max(1, len(os.sched_getaffinity(0)) - config.actors)
    program, reporter = make_program(
        builder,
        environments,
        ProgramConfig(
            actors=config.actors,
            seed=config.seed,
            max_env_steps=config.max_env_steps,
            # One process has one such setting, and TensorFlow may be in use already.
            learner_threads=threads if config.launch_type == "processes" else None,
            reporter=reporter_config,
        ),
        view_timeout_s=LOOK_TIMEOUT_S,
    )
    with view or make_view(config, run_dir) as progress:
        try:
            supervisor.run(
                program,
                config.launch_type,
                run_dir / LOG_DIR,
                on_poll=lambda: progress.poll(reporter),
            )
        except supervisor.Interrupted as interrupt:
            interrupt.run_dir = run_dir
            raise
    return Result(run_dir, json.loads((run_dir / SUMMARY_FILE).read_text()))


def make_run_dir(run_dir: str | None, env: str, agent: str) -> Path:
    """Makes the run directory.

    Raises:
      ConfigError: it exists or cannot be made.
    """
    if run_dir is not None:
        return _make_dir(Path(run_dir))
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    name = re.sub(r"[^A-Za-z0-9.-]+", "_", f"{env}-{agent}-{stamp}")
    base, tries = Path("runs") / name, 1
    path = base
    while path.exists():
        tries += 1
        path = base.with_name(f"{name}-{tries}")
    return _make_dir(path)


def _make_dir(path: Path) -> Path:
    try:
        path.mkdir(parents=True)
    except FileExistsError as error:
        raise ConfigError("run_dir", str(path), "exists; name a new folder") from error
    except OSError as error:
        raise ConfigError("run_dir", str(path), f"cannot be made ({error.strerror})") from error
    return path


def _write_config(
    path: Path,
    builder: Builder[AgentConfig],
    environments: EnvironmentFactory,
    config: RunConfig,
) -> None:
    """Writes everything that is needed to repeat the run."""
    content = {
        "agent": builder.name,
        "run": dataclasses.asdict(config)
        | {
            "env": environments.name,
            "vectorization": environments.vectorization,
            "envs_per_actor": builder.envs_per_actor,
        },
        "config": _as_dict(builder.config),
        "command": sys.argv,
        "python": platform.python_version(),
        "packages": dict(sorted((d.name, d.version) for d in importlib.metadata.distributions())),
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


def _as_dict(config: Any) -> Any:
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return dataclasses.asdict(config)
    return repr(config)
