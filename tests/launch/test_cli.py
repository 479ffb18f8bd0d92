"""The command line: every bad input is refused before anything starts."""

import json
import os
import re
import subprocess
import sys

import pytest

from headrace.launch import cli
from headrace.launch.presets import PRESETS


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def no_start(monkeypatch):
    """Fails the test if a program is launched."""

    def fail(*args, **kwargs):
        pytest.fail("a program was launched")

    monkeypatch.setattr("headrace.launch.supervisor.run", fail)


def run_cli(*arguments):
    """Exit code of the command, whether it returns or raises it."""
    try:
        return cli.main(list(arguments))
    except SystemExit as error:
        return error.code


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--env", "CartPol-v1"], ["--env", "CartPol-v1", "CartPole-v1"]),
        (["--env", "../envs/mine:Mine-v0"], ["--env", "../envs/mine", "dotted name"]),
        (["--env", "no_such_module:Env-v0"], ["--env", "no_such_module"]),
        (["--env", "Pendulum-v1"], ["--env", "Pendulum-v1", "action space must be Discrete"]),
        (["--batch-size", "33"], ["--batch-size", "33", "envs_per_actor = 16"]),
        (["--actors", "0"], ["--actors", "0", "at least 1"]),
        (["--envs-per-actor", "-3"], ["--envs-per-actor", "-3"]),
        (["--unroll-length", "0"], ["--unroll-length", "0"]),
        (["--learning-rate", "nan"], ["--learning-rate", "nan", "above 0"]),
        (["--learning-rate", "-1"], ["--learning-rate", "-1"]),
        (["--discount", "1.1"], ["--discount", "1.1", "[0, 1]"]),
        (["--c-bar", "2"], ["--c-bar", "2", "rho_bar"]),
        (["--time-limit", "0"], ["--time-limit", "0"]),
        (["--max-env-steps", "-5"], ["--max-env-steps", "-5"]),
        (["--target-return", "inf"], ["--target-return", "inf", "finite"]),
        (["--seed", "-1"], ["--seed", "-1"]),
        (["--vectorization", "vector", "--env", "Acrobot-v1"], ["--env", "vector entry point"]),
        (["--report-interval", "0.01"], ["--report-interval", "0.01", "0.1 s or more"]),
        (["--run-dir", "."], ["--run-dir", "exists"]),
        (["--run-dir", "/proc/headrace"], ["--run-dir", "cannot be made"]),
        (["--run-dir", "a_file/run"], ["--run-dir", "cannot be made"]),
        (["--no-such-flag", "1"], ["--no-such-flag"]),
        (["--actors", "two"], ["--actors", "two"]),
        (["--preset", "cartpol"], ["--preset", "cartpole-throughput"]),
        (["--agent", "ppo"], ["--agent", "impala"]),
    ],
)
def test_bad_argument_is_named_and_refused(in_empty_folder, capsys, no_start, flags, words):
    (in_empty_folder / "a_file").touch()
    assert run_cli("train", *flags) == 2
    output = capsys.readouterr()
    text = " ".join((output.out + output.err).replace("│", " ").split())
    for word in words:
        assert word in text
    assert "Traceback" not in text
    assert os.listdir(in_empty_folder) == ["a_file"]


def test_unknown_command(capsys):
    assert run_cli("trian") == 2
    assert "trian" in capsys.readouterr().err


def test_version(capsys):
    assert run_cli("--version") == 0
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_help_of_the_command(capsys):
    assert run_cli("--help") == 0
    assert "headrace train" in capsys.readouterr().out


def test_train_help_names_every_setting_flat_with_its_default(capsys):
    assert run_cli("train", "--help") == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for flag in ("--learning-rate", "--broadcast-interval", "--envs-per-actor", "--time-limit"):
        assert flag in text
    assert "Step size of the optimiser. (default: 0.0006)" in text


def test_preset_sets_the_defaults_and_flags_override_them():
    args = cli._parse(["--preset", "cartpole", "--learning-rate", "0.5"])
    preset = PRESETS["cartpole"]
    assert args.run == preset.run
    assert args.config.learning_rate == 0.5
    assert args.config.batch_size == preset.agent.batch_size


def test_presets_are_listed_in_the_flag():
    assert set(cli.PresetName.__args__) == set(PRESETS)


def test_failed_start_leaves_no_run_dir(in_empty_folder, capsys):
    assert run_cli("train", "--env", "Nope-v0", "--run-dir", "run") == 2
    assert os.listdir(in_empty_folder) == []


def test_second_run_never_overwrites_the_first(in_empty_folder, monkeypatch):
    def finish(program, launch_type, log_dir, on_poll):
        summary = {
            "stop_reason": "time_limit",
            "wall_time_s": 1.0,
            "mean_return": None,
            "env_steps_trained": 0,
            "train_time_s": 0.0,
            "env_steps_per_second": 0.0,
            "learner_steps": 0,
            "policy_lag_mean": None,
            "policy_lag_max": None,
            "reached_target": False,
        }
        (log_dir.parent / "summary.json").write_text(json.dumps(summary))

    monkeypatch.setattr("headrace.launch.supervisor.run", finish)
    assert [run_cli("train", "--actors", str(n)) for n in (1, 2, 3)] == [0, 0, 0]
    configs = [
        json.loads((run_dir / "config.json").read_text())
        for run_dir in (in_empty_folder / "runs").iterdir()
    ]
    assert sorted(config["run"]["actors"] for config in configs) == [1, 2, 3]
    assert run_cli("train", "--target-return", "475") == 3


def test_config_file_repeats_the_run(in_empty_folder, monkeypatch):
    monkeypatch.setattr("headrace.launch.supervisor.run", lambda *a, **k: None)
    with pytest.raises(FileNotFoundError):  # no summary: nothing ran
        run_cli("train", "--preset", "cartpole", "--run-dir", "run", "--seed", "7")
    config = json.loads((in_empty_folder / "run" / "config.json").read_text())
    assert config["agent"] == "impala"
    assert config["run"]["seed"] == 7
    assert config["run"]["env"] == "CartPole-v1"
    assert config["config"]["learning_rate"] == PRESETS["cartpole"].agent.learning_rate
    assert config["packages"]["tensorflow"]
    assert config["packages"]["dm-reverb"]


def test_help_and_errors_load_neither_tensorflow_nor_launchpad():
    code = (
        "import sys\n"
        "from headrace.launch import cli\n"
        "try: cli.main(['train', '--help'])\n"
        "except SystemExit: pass\n"
        "assert 'tensorflow' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
