"""`headrace train` from the outside: what it writes, counts, shows and reaches."""

import itertools
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command import COMMAND, SMALL

from headrace.agents.environments import EnvironmentFactory
from headrace.agents.evaluation import evaluate
from headrace.agents.impala import IMPALABuilder
from headrace.agents.variables import load_weights
from headrace.launch import local
from headrace.launch.config import RunConfig
from headrace.launch.presets import PRESETS

# name: flags, and env steps trained for each that had all its passes; None if replay adds to them.
PLANS = {
    "direct": ([], 1),
    "passes": (["--num-sgd-iter", "3", "--minibatch-buffer-size", "2"], 3),
    "replay": (["--replay-proportion", "0.5", "--replay-slots", "20"], None),
    "too old": (["--max-policy-lag", "1", "--learner-queue-size", "8"], 1),
}


def untrained(summary):
    """Env steps that were sampled and did not have all their passes."""
    names = ("env_steps_queued", "env_steps_in_hand", "env_steps_dropped")
    return sum(summary[name] for name in names)


@pytest.mark.parametrize("end", ["budget", "time", "signal"])
@pytest.mark.parametrize("plan", PLANS)
def test_every_env_step_is_accounted_for(start, plan, end):
    """At whatever moment a run ends, with actors that are blocked or not."""
    flags, passes = PLANS[plan]
    ends = {"budget": ["--max-env-steps", "20000"], "time": ["--time-limit", "9"], "signal": []}
    run = start(*SMALL, *flags, *ends[end])
    if end == "signal":
        run.wait_for_training(steps=300)
        run.process.terminate()
    assert run.wait() == {"budget": 0, "time": 0, "signal": 143}[end]
    summary = run.summary()
    consumed, sampled = summary["env_steps_consumed"], summary["env_steps_sampled"]
    assert consumed > 0
    assert sampled == consumed + untrained(summary)
    # The queue was not empty when the learner stopped, and all of it was found. A signal stops the
    # actors first.
    assert summary["env_steps_queued"] > 0 or end == "signal"
    if plan == "replay":
        replayed = summary["env_steps_replayed"]
        assert summary["env_steps_trained"] == consumed + replayed
        assert abs(replayed - consumed / 2) < 0.02 * consumed
        assert summary["replay_age_mean"] > summary["policy_lag_mean"] > 0
    else:
        assert summary["env_steps_trained"] - passes * consumed >= 0
        assert summary["env_steps_trained"] - passes * consumed <= 2 * summary["env_steps_in_hand"]
        assert summary["env_steps_replayed"] == 0
    assert (summary["env_steps_in_hand"] > 0) <= (plan == "passes")
    assert (summary["env_steps_too_old"] > 0) == (plan == "too old")


def test_run_without_a_target_uses_up_its_budget(start):
    run = start(*SMALL, "--max-env-steps", "20000", "--seed", "3")
    assert run.wait() == 0
    summary = run.summary()
    assert summary["stop_reason"] == "max_env_steps"
    assert summary["reached_target"] is False
    assert summary["time_to_target_s"] is None

    # The budget is overshot by less than a train batch, of 8 unrolls of 8 steps.
    assert 20_000 <= summary["env_steps_trained"] < 20_000 + 64
    assert summary["env_steps_sampled"] == summary["env_steps_trained"] + untrained(summary)
    steps = summary["learner_steps"]
    # Reset rows are in the batches but are no env steps.
    assert steps * 64 * 0.8 < summary["env_steps_trained"] < steps * 64

    # The behaviour policy is the newest: every actor fetches again and again.
    assert steps / 10 < summary["weight_publishes"] <= steps + 1
    assert summary["weight_fetches"] > steps / 10
    assert 0 < summary["policy_lag_mean"] < 20
    assert summary["policy_lag_max"] >= summary["policy_lag_mean"]
    assert summary["episodes"] > 100
    assert summary["wall_time_s"] > summary["train_time_s"] > 0

    files = {path.name for path in run.run_dir.iterdir()}
    assert files == {"config.json", "metrics.jsonl", "summary.json", "weights.npz", "logs"}
    logs = {path.name for path in (run.run_dir / "logs").iterdir()}
    assert logs == {f"{n}.log" for n in ("actor_0", "actor_1", "learner", "reporter")} | {
        "variable_source.log"
    }
    reports = run.reports()
    for before, after in itertools.pairwise(reports):
        for total in ("env_steps_sampled", "env_steps_trained", "learner_steps", "episodes"):
            assert before[total] <= after[total]
    assert reports[-1]["env_steps_trained"] == summary["env_steps_trained"]
    assert load_weights(run.run_dir / "weights.npz").version == steps

    config = json.loads((run.run_dir / "config.json").read_text())
    assert config["run"]["seed"] == 3
    assert config["config"]["unroll_length"] == 8
    assert "ended by max_env_steps" in run.stdout()
    assert run.stderr() == ""
    run.assert_nothing_left()


def test_output_without_a_terminal_is_plain_lines(start):
    run = start(*SMALL, "--time-limit", "18")
    assert run.wait() == 0
    lines = run.stdout().splitlines()
    assert re.fullmatch(
        r" +\d+ s \| [\d,]+ env steps \([\d,]+/s\) \| [\d,]+ learner steps \| "
        r"mean return [\d.]+ \| queue [\d.]+ \| lag [\d.]+ \| \d+ s left",
        lines[0],
    )
    assert "\x1b" not in run.stdout()
    assert run.stderr() == ""
    assert run.summary()["stop_reason"] == "time_limit"
    assert 18 <= run.summary()["wall_time_s"] < 25


def test_output_on_a_terminal_is_live_and_free_of_chatter(tmp_path):
    master, slave = pty.openpty()
    flags = [*SMALL, "--max-env-steps", "30000", "--run-dir", str(tmp_path / "run")]
    process = subprocess.Popen([*COMMAND, *flags], stdout=slave, stderr=slave, stdin=slave)
    os.close(slave)
    output = b""
    # Linux reports the end of a terminal as an error.
    while chunk := read_terminal(master):
        output += chunk
    os.close(master)
    assert process.wait(30) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output.decode())
    for words in ("Starting 2 actors and the learner", "mean return", "policy lag", "s left"):
        assert words in text
    assert not re.search(r"tensorflow|courier/|reverb/|Binding|WARNING|Traceback", text)


def read_terminal(master):
    try:
        return os.read(master, 65536)
    except OSError:
        return b""


def test_budget_that_ends_before_the_target_is_exit_code_3(start):
    run = start(*SMALL, "--max-env-steps", "3000", "--target-return", "475")
    assert run.wait() == 3
    assert run.summary()["reached_target"] is False


def test_target_is_exit_code_0(start):
    run = start(*SMALL, "--max-env-steps", "1000000", "--target-return", "12")
    assert run.wait() == 0
    summary = run.summary()
    assert summary["reached_target"] is True
    assert summary["stop_reason"] == "target_return"
    assert summary["mean_return"] >= 12
    assert 0 <= summary["time_to_target_s"] <= summary["train_time_s"] + 1
    assert 0 < summary["env_steps_to_target"] <= summary["env_steps_sampled"]


def test_threads_in_one_process(start):
    run = start(*SMALL, "--max-env-steps", "10000", "--launch-type", "threads")
    assert run.wait() == 0
    assert 10_000 <= run.summary()["env_steps_trained"] < 10_000 + 64
    assert run.summary()["weight_fetches"] > 10
    assert run.stderr() == ""
    run.assert_nothing_left()


def test_light_nodes_do_not_load_tensorflow(start):
    """But for one library of it that Courier needs."""
    run = start(*SMALL)
    run.wait_for_training()
    loads = {
        name: any("_pywrap_tensorflow_internal" in m.path for m in run.node(name).memory_maps())
        for name in ("learner", "variable_source", "reporter")
    }
    assert loads == {"learner": True, "variable_source": False, "reporter": False}


@pytest.mark.parametrize(("envs", "batch"), [("16", "4"), ("2", "12")])
def test_blocks_larger_and_smaller_than_a_batch(start, envs, batch):
    flags = ["--envs-per-actor", envs, "--batch-size", batch, "--unroll-length", "8"]
    run = start(*flags, "--actors", "3", "--max-env-steps", "8000")
    assert run.wait() == 0
    assert 8_000 <= run.summary()["env_steps_trained"] < 8_000 + 8 * int(batch)


def test_rmsprop_and_sum_and_python_environments(start):
    flags = ["--optimizer", "rmsprop", "--loss-reduction", "sum", "--vectorization", "sync"]
    run = start(*SMALL, *flags, "--broadcast-interval", "5", "--max-env-steps", "8000")
    assert run.wait() == 0
    summary = run.summary()
    assert summary["weight_publishes"] <= summary["learner_steps"] // 5 + 1
    assert summary["policy_lag_mean"] > 2


def test_run_from_python(tmp_path):
    environments = EnvironmentFactory("CartPole-v1", "sync")
    config = PRESETS["cartpole"].agent
    builder = IMPALABuilder(config, environments.spec(), envs_per_actor=8)
    run_config = RunConfig(max_env_steps=5_000, run_dir=str(tmp_path / "run"))
    result = local.run(builder, environments, run_config)
    assert result.run_dir == tmp_path / "run"
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())["run"]
    assert (recorded["env"], recorded["vectorization"]) == ("CartPole-v1", "sync")
    assert recorded["envs_per_actor"] == 8
    assert result.summary["env_steps_trained"] >= 5_000


def test_readme_example_in_python(tmp_path):
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(code.replace("500_000", "5_000"))
    result = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert float(result.stdout.splitlines()[-1]) > 8


def test_command_is_a_module_too(tmp_path):
    command = [sys.executable, "-m", "headrace.launch.cli", "--help"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_learns_cartpole(start, seed):
    run = start("--preset", "cartpole", "--seed", str(seed))
    assert run.wait() == 0
    summary = run.summary()
    assert summary["reached_target"]
    assert summary["mean_return"] >= 475
    assert summary["env_steps_to_target"] <= 800_000
    environments = EnvironmentFactory("CartPole-v1")
    builder = IMPALABuilder(PRESETS["cartpole"].agent, environments.spec(), 16)
    policy = builder.make_policy(np.random.SeedSequence(0), greedy=True)
    policy.set_weights(load_weights(run.run_dir / "weights.npz"))
    episodes = evaluate(policy, environments.make(20, seed=10_000), episodes_per_env=1)
    assert np.mean([episode.episode_return for episode in episodes]) >= 475


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_learns_from_a_part_of_a_nested_observation(start, seed):
    budget = ["--max-env-steps", "300000", "--target-return", "9"]
    run = start("--env", "envs:Cue-v0", "--learning-rate", "2e-3", *budget, "--seed", str(seed))
    assert run.wait() == 0
