"""Measures IMPALA on CartPole-v1: does it learn, how fast, and how many env steps per second.

    .venv/bin/python benchmarks/cartpole.py [--only learning throughput python-envs] [--seeds 3]

Prints a table and exits with 1 if a goal is missed. Figures are from the runs' own summaries, and
from 20 greedy episodes of their final weights.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from headrace.agents.environments import EnvironmentFactory
from headrace.agents.evaluation import evaluate
from headrace.agents.impala import IMPALABuilder
from headrace.agents.variables import load_weights
from headrace.launch.nodes.learner import WEIGHTS_FILE
from headrace.launch.nodes.reporter import METRICS_FILE
from headrace.launch.presets import PRESETS

RETURN_GOAL = 475.0
TRAIN_TIME_GOAL_S = 20.0
ENV_STEPS_GOAL = 800_000
START_GOAL_S = 25.0
THROUGHPUT_GOAL = 120_000.0
PYTHON_ENVS_GOAL = 25_000.0
LAG_GOAL = 10.0
EPISODES = 20


def run(run_dir: Path, *flags: str) -> dict[str, Any]:
    """Runs `headrace train` and returns its summary."""
    command = [sys.executable, "-m", "headrace.launch.cli", "train", "--run-dir", str(run_dir)]
    code = subprocess.run([*command, *flags], stdout=subprocess.DEVNULL, check=False).returncode
    if code not in (0, 3):
        sys.exit(f"the run failed with exit code {code}")
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary


def greedy_return(run_dir: Path, preset: str) -> float:
    """Mean return of 20 greedy episodes of a run's final weights."""
    settings = PRESETS[preset]
    environments = EnvironmentFactory(settings.run.env)
    builder = IMPALABuilder(settings.agent, environments.spec(), settings.run.envs_per_actor)
    policy = builder.make_policy(np.random.SeedSequence(0), greedy=True)
    policy.set_weights(load_weights(run_dir / WEIGHTS_FILE))
    environment = environments.make(EPISODES, seed=12345)
    episodes = evaluate(policy, environment, episodes_per_env=1)
    environment.close()
    return float(np.mean([episode.episode_return for episode in episodes]))


def learning(folder: Path, seeds: int) -> bool:
    """Trains to a mean return of 475, once per seed."""
    print(f"\nTo a mean return of {RETURN_GOAL:g} (preset cartpole)")
    print("seed  reached  train time  env steps  start  steps/s  lag mean/max  greedy return")
    met = True
    for seed in range(seeds):
        run_dir = folder / f"learning-{seed}"
        summary = run(run_dir, "--preset", "cartpole", "--seed", str(seed))
        evaluation = greedy_return(run_dir, "cartpole")
        start = summary["wall_time_s"] - summary["train_time_s"]
        print(
            f"{seed:4}  {summary['reached_target']!s:7}  "
            f"{summary['time_to_target_s'] or float('nan'):8.1f} s  "
            f"{summary['env_steps_to_target'] or 0:9,}  {start:3.0f} s  "
            f"{summary['env_steps_per_second']:7,.0f}  "
            f"{summary['policy_lag_mean']:8.1f}/{summary['policy_lag_max']:.0f}  {evaluation:8.1f}",
            flush=True,
        )
        met &= (
            summary["reached_target"]
            and summary["time_to_target_s"] <= TRAIN_TIME_GOAL_S
            and summary["env_steps_to_target"] <= ENV_STEPS_GOAL
            and start <= START_GOAL_S
            and evaluation >= RETURN_GOAL
        )
    return met


def throughput(folder: Path, preset: str, goal: float, seconds: float, *flags: str) -> bool:
    """Trains for `seconds` after the start and reports the rate."""
    run_dir = folder / preset
    limit = str(seconds + 10)
    summary = run(run_dir, "--preset", preset, "--time-limit", limit, *flags)
    lines = [json.loads(line) for line in (run_dir / METRICS_FILE).read_text().splitlines()]
    rates = [line["env_steps_per_second"] for line in lines if line["train_time_s"] > 5]
    # A learner that always finds a batch ready is what the actors wait for.
    bound = "the learner" if summary["queue_size_mean"] >= 1 else "the actors"
    print(f"\nThroughput for {summary['train_time_s']:.0f} s (preset {preset})")
    print(
        f"{summary['env_steps_per_second']:,.0f} env steps/s trained "
        f"(5 s windows: {min(rates):,.0f} to {max(rates):,.0f}), "
        f"policy lag {summary['policy_lag_mean']:.1f} on average, "
        f"{summary['policy_lag_max']:.0f} at most, "
        f"queue {summary['queue_size_mean']:.1f} train batches, "
        f"a learner step takes {summary['ms_per_step']:.1f} ms, "
        f"{summary['wait_ms_per_step']:.1f} of it to get the batch: bound by {bound}",
        flush=True,
    )
    return summary["env_steps_per_second"] >= goal and summary["policy_lag_mean"] <= LAG_GOAL


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parts = ("learning", "throughput", "python-envs")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=35.0)
    args = parser.parse_args()
    print(f"{time.strftime('%Y-%m-%d %H:%M')}, {_machine()}")
    met = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "learning" in args.only:
            met &= learning(folder, args.seeds)
        if "throughput" in args.only:
            met &= throughput(folder, "cartpole-throughput", THROUGHPUT_GOAL, args.seconds)
        if "python-envs" in args.only:
            met &= throughput(
                folder,
                "cartpole-python-envs",
                PYTHON_ENVS_GOAL,
                args.seconds,
                "--target-return",
                "None",
                "--max-env-steps",
                "None",
            )
    print("\nevery goal met" if met else "\na goal was missed")
    return 0 if met else 1


def _machine() -> str:
    cores = len(os.sched_getaffinity(0))
    models = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    model = models[0] if models else platform.machine()
    return f"{model}, {cores} cores, load {os.getloadavg()[0]:.1f}"


if __name__ == "__main__":
    sys.exit(main())
