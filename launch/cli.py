"""The `headrace` command."""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from headrace.agents.environments import EnvironmentFactory
from headrace.agents.impala import IMPALABuilder, IMPALAConfig
from headrace.agents.types import ConfigError
from headrace.launch.config import RunConfig
from headrace.launch.presets import PRESETS

if TYPE_CHECKING:
    from headrace.launch.supervisor import NodeError

USAGE = """usage: headrace train [options]

Trains agents on Gymnasium environments with IMPALA.
`headrace train --help` lists every setting with its unit and default."""

BUILDERS = {"impala": IMPALABuilder}

PresetName = Literal["cartpole", "cartpole-throughput", "cartpole-python-envs"]

OK, FAILED, BAD_ARGUMENTS, TARGET_MISSED = 0, 1, 2, 3
_SIGNALLED = 128


@dataclasses.dataclass(frozen=True)
class TrainArgs:
    """Trains an agent on this machine."""

    agent: Literal["impala"] = "impala"
    """Algorithm."""
    preset: PresetName | None = None
    """Settings to start from; flags override them."""
    run: RunConfig = dataclasses.field(default_factory=RunConfig)
    config: IMPALAConfig = dataclasses.field(default_factory=IMPALAConfig)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code.

    0: the target was reached, or there was none and the budget is used up. 1: a node failed.
    2: bad arguments. 3: the budget ended before the target. 130 on Ctrl-C, 143 on SIGTERM, 129 on
    SIGHUP.
    """
    started_at = time.time()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return OK if arguments else BAD_ARGUMENTS
    if arguments[0] == "--version":
        print(importlib.metadata.version("headrace"))
        return OK
    if arguments[0] != "train":
        print(f"error: {arguments[0]!r} is not a command\n{USAGE}", file=sys.stderr)
        return BAD_ARGUMENTS
    try:
        return _train(_parse(arguments[1:]), started_at)
    except ConfigError as error:
        flag = "--" + error.setting.replace("_", "-")
        print(f"error: {flag} {error.value}: {error.expected}", file=sys.stderr)
        return BAD_ARGUMENTS
    except KeyboardInterrupt:
        # Before the run has started; from then on signals are the supervisor's.
        return _SIGNALLED + signal.SIGINT


def _parse(arguments: list[str]) -> TrainArgs:
    """Reads the flags, over the defaults of the preset that they name."""
    selector = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    selector.add_argument("--preset", choices=PRESETS)
    name = selector.parse_known_args(arguments)[0].preset
    default = TrainArgs()
    if name is not None:
        default = TrainArgs(preset=name, run=PRESETS[name].run, config=PRESETS[name].agent)
    return tyro.cli(
        TrainArgs,
        prog="headrace train",
        args=arguments,
        default=default,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )


def _train(args: TrainArgs, started_at: float) -> int:
    # Launchpad takes half a second to import, which --help need not wait for.
    from headrace.launch import local
    from headrace.launch.supervisor import Interrupted, NodeError

    # As `python -m` would, for `--env module:Env-v0` with a module of the user's.
    sys.path.append(os.getcwd())
    environments = EnvironmentFactory(args.run.env, args.run.vectorization)
    make_builder = BUILDERS[args.agent]
    builder = make_builder(args.config, environments.spec(), args.run.envs_per_actor)
    try:
        result = local.run(builder, environments, args.run, started_at=started_at)
    except NodeError as error:
        _print_failure(error)
        return FAILED
    except Interrupted as interrupt:
        for failure in interrupt.failures:
            _print_failure(failure)
        print(f"stopped by {interrupt}", file=sys.stderr)
        _print_interrupted(interrupt.run_dir)
        return _SIGNALLED + interrupt.signum
    print(summarise(result.summary))
    print(f"{result.run_dir}/ holds the summary, metrics, weights and logs")
    missed = args.run.target_return is not None and not result.summary["reached_target"]
    return TARGET_MISSED if missed else OK


def _print_interrupted(run_dir: Path | None) -> None:
    if run_dir is None:
        return
    summary = run_dir / "summary.json"
    if summary.exists():
        print(summarise(json.loads(summary.read_text())))
        print(f"{run_dir}/ holds the summary, metrics, weights and logs")
    else:
        print(f"{run_dir}/ holds the logs; there was nothing else to write yet")


def _print_failure(error: "NodeError") -> None:
    print(f"{error.details}\n\nerror: {error}".lstrip(), file=sys.stderr)


def summarise(summary: dict[str, Any]) -> str:
    """The result of a run, for people."""
    lines = [
        f"ended by {summary['stop_reason']} after {summary['wall_time_s']:.1f} s",
        f"mean return of the last 100 episodes: {_number(summary['mean_return'])}",
        f"{summary['env_steps_trained']:,} env steps trained in {summary['train_time_s']:.1f} s "
        f"({summary['env_steps_per_second']:,.0f} per second), "
        f"{summary['learner_steps']:,} learner steps",
        f"policy lag {_number(summary['policy_lag_mean'])} learner steps on average, "
        f"{_number(summary['policy_lag_max'])} at most",
    ]
    return "\n".join(lines)


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:.1f}"


if __name__ == "__main__":
    sys.exit(main())
