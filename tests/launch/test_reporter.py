"""The reporter: exact counters, means, the target, and the files it writes."""

import json
import threading

import pytest

from headrace.launch.nodes.reporter import (
    METRICS_FILE,
    SUMMARY_FILE,
    WINDOW,
    Reporter,
    ReporterConfig,
    Statistics,
)

START = 1000.0


def make_config(run_dir="", target_return=None, time_limit=None):
    return ReporterConfig(
        run_dir=str(run_dir),
        started_at=START,
        report_interval=0.05,
        target_return=target_return,
        time_limit=time_limit,
    )


def actor_record(env_steps, episodes=(), fetches=0):
    totals = {"env_steps_sampled": env_steps, "weight_fetches": fetches}
    return {"totals": totals, "episodes": list(episodes), "metrics": []}


def learner_record(steps, trained, reported_at, metrics=(), first_step_at=START + 2):
    totals = {
        "learner_steps": steps,
        "env_steps_trained": trained,
        "weight_publishes": steps,
        "first_step_at": first_step_at,
        "reported_at": reported_at,
    }
    return {"totals": totals, "episodes": [], "metrics": list(metrics)}


def test_totals_of_one_sender_replace_and_of_several_add():
    statistics = Statistics(make_config())
    statistics.add("actor_0", actor_record(100, fetches=1), START + 1)
    statistics.add("actor_0", actor_record(150, fetches=2), START + 2)
    statistics.add("actor_1", actor_record(30, fetches=5), START + 2)
    report = statistics.report(START + 3, {})
    assert report["env_steps_sampled"] == 180
    assert report["weight_fetches"] == 7
    assert report["wall_time_s"] == 3.0


def test_mean_return_is_over_the_last_100_episodes():
    statistics = Statistics(make_config())
    assert statistics.report(START, {})["mean_return"] is None
    episodes = [(float(i), i) for i in range(150)]
    statistics.add("actor_0", actor_record(0, episodes), START + 1)
    report = statistics.report(START + 1, {})
    assert report["episodes"] == 150
    assert report["mean_return"] == sum(range(50, 150)) / 100


def test_target_needs_a_full_window_and_is_kept_once_reached():
    statistics = Statistics(make_config(target_return=10.0))
    statistics.add("learner", learner_record(1, 64, START + 3), START + 3)
    statistics.add("actor_0", actor_record(500, [(10.0, 5)] * (WINDOW - 1)), START + 4)
    assert statistics.stop_reason == ""
    statistics.add("actor_0", actor_record(505, [(10.0, 5)]), START + 5)
    assert statistics.stop_reason == "target_return"
    statistics.add("actor_0", actor_record(900, [(0.0, 5)] * 50), START + 6)
    summary = statistics.summary(START + 7)
    assert summary["reached_target"]
    assert summary["mean_return"] == 10.0
    assert summary["episodes"] == WINDOW + 50
    assert summary["env_steps_to_target"] == 505


def test_target_is_seen_in_the_middle_of_a_record():
    statistics = Statistics(make_config(target_return=10.0))
    episodes = [(10.0, 1)] * WINDOW + [(0.0, 1)] * WINDOW
    statistics.add("actor_0", actor_record(200, episodes), START + 1)
    assert statistics.stop_reason == "target_return"


def test_budgets_end_the_run_without_a_target():
    statistics = Statistics(make_config(time_limit=5.0))
    statistics.check_time(START + 4.9)
    assert statistics.stop_reason == ""
    statistics.check_time(START + 5.0)
    assert statistics.stop_reason == "time_limit"

    statistics = Statistics(make_config())
    record = learner_record(3, 192, START + 3)
    record["totals"]["budget_used"] = True
    statistics.add("learner", record, START + 3)
    assert statistics.stop_reason == "max_env_steps"
    assert not statistics.summary(START + 4)["reached_target"]


def test_metrics_are_weighted_by_their_steps():
    statistics = Statistics(make_config())
    first = {"steps": 1, "loss": 10.0, "policy_lag_max": 7.0}
    second = {"steps": 3, "loss": 2.0, "policy_lag_max": 4.0, "queue_size": 2.0}
    statistics.add("learner", learner_record(4, 256, START + 3, [first, second]), START + 3)
    assert statistics.latest == {"loss": 2.0, "policy_lag_max": 4.0, "queue_size": 2.0}
    assert statistics.interval.take() == {"loss": 4.0, "policy_lag_max": 7.0, "queue_size": 2.0}
    assert statistics.interval.take() == {}
    summary = statistics.summary(START + 3)
    assert summary["loss"] == 4.0
    assert summary["queue_size_mean"] == 2.0


def test_train_time_runs_from_the_first_learner_step_to_the_last_report():
    statistics = Statistics(make_config())
    assert statistics.report(START + 1, {})["train_time_s"] == 0.0
    statistics.add("learner", learner_record(0, 0, START + 1, first_step_at=None), START + 1)
    assert statistics.report(START + 2, {})["train_time_s"] == 0.0
    statistics.add("learner", learner_record(10, 640, START + 6), START + 6)
    assert statistics.report(START + 60, {})["train_time_s"] == 4.0
    assert statistics.summary(START + 60)["env_steps_per_second"] == 160.0


def test_rate_is_over_the_last_seconds():
    statistics = Statistics(make_config())
    for second in range(20):
        trained = 100 * second if second < 10 else 1000 + 1000 * (second - 10)
        statistics.add("learner", learner_record(1, trained, START + second), START + second)
    assert statistics.report(START + 20, {})["env_steps_per_second"] == 1000.0


def test_record_that_comes_twice_counts_once(tmp_path):
    reporter = Reporter(make_config(tmp_path))
    payload = json.dumps(actor_record(10, [(1.0, 5)]))
    assert not reporter.record("actor_0", 1, payload)
    reporter.record("actor_0", 1, payload)
    reporter.record("actor_1", 1, payload)
    status = json.loads(reporter.status())
    assert status["episodes"] == 2
    assert status["env_steps_sampled"] == 20


def test_record_answers_whether_the_run_ends(tmp_path):
    reporter = Reporter(make_config(tmp_path, target_return=1.0))
    assert not reporter.record("actor_0", 1, json.dumps(actor_record(10, [(1.0, 5)] * 99)))
    assert reporter.record("actor_0", 2, json.dumps(actor_record(10, [(1.0, 5)])))


def test_files_are_written_and_the_summary_at_the_end(tmp_path):
    reporter = Reporter(make_config(tmp_path))
    stop = threading.Event()
    thread = threading.Thread(target=reporter._report, args=(stop,))
    thread.start()
    reporter.record("actor_0", 1, json.dumps(actor_record(10, [(3.0, 5)])))
    stop.wait(0.3)
    assert not (tmp_path / SUMMARY_FILE).exists()
    reporter.record("actor_0", 2, json.dumps(actor_record(25)))
    stop.set()
    thread.join(5.0)
    lines = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert len(lines) >= 2
    assert lines[-1]["env_steps_sampled"] == 25
    assert [line["wall_time_s"] for line in lines] == sorted(line["wall_time_s"] for line in lines)
    summary = json.loads((tmp_path / SUMMARY_FILE).read_text())
    assert summary["env_steps_sampled"] == 25
    assert summary["mean_return"] == 3.0
    assert summary["stop_reason"] == "stopped"
    assert [path.name for path in tmp_path.glob("*.partial")] == []


@pytest.mark.parametrize(
    "key",
    [
        "reached_target",
        "mean_return",
        "episodes",
        "env_steps_sampled",
        "env_steps_trained",
        "learner_steps",
        "wall_time_s",
        "train_time_s",
        "env_steps_per_second",
        "time_to_target_s",
        "env_steps_to_target",
        "policy_lag_mean",
        "policy_lag_max",
        "queue_size_mean",
        "weight_publishes",
        "weight_fetches",
    ],
)
def test_summary_always_has(key):
    assert key in Statistics(make_config()).summary(START + 1)
