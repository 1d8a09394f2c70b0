"""One job tuned end to end: real ranks, real HTTP, a real service, a real training."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from bagua_client import Configuration
from tests.e2e.conftest import LIMITS
from tests.e2e.lines import others
from tests.e2e.programs.training import DEFAULT, Report, train, train_two
from tests.e2e.service import ServiceProcess
from tests.ranks import RankPool
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e]

EXAMPLES = Path(__file__).parents[2] / "examples"


def check(reports: list[Report]) -> None:
    """What must hold after any training, however the service fared."""
    for report in reports:
        assert report.difference < 1e-5
        assert report.configurations == reports[0].configurations
        assert report.steps == reports[0].steps


def test_a_job_is_tuned_and_goes_on_at_the_setting_found(
    service: ServiceProcess, tuned_ranks: Callable[..., RankPool]
) -> None:
    service.start()
    reports = tuned_ranks(service.url).run(train, 3000, timeout_seconds=200)
    check(reports)
    assert all(report.tuned for report in reports)
    job, trials = service.job(), service.trials()
    assert job["state"] == "finished"
    assert Configuration.from_json(trials[0]["configuration"]) == DEFAULT
    assert {trial["state"] for trial in trials} == {"measured"}
    ways = {trial["configuration"]["hierarchical"] for trial in trials}
    assert ways == {"off", "leaders", "shards"}
    # Every trial was really run, by all ranks, and the final choice is in force.
    ran = set(reports[0].configurations)
    assert {Configuration.from_json(trial["configuration"]) for trial in trials} <= ran
    winner = reports[0].configurations[-1]
    assert winner == Configuration.from_json(job["result"]["configuration"])
    assert any(job["result"]["summary"] in line for line in reports[0].logged)
    # Afterwards nothing is left but what the winner needs, and the watch on step times: the job's
    # own group is the first channel's; by node each channel takes three.
    groups = winner.channels - 1 if winner.hierarchical == "off" else 3 * winner.channels
    assert {report.groups for report in reports} == {1 + groups + 1}
    if winner.hierarchical == "off":
        # Rank 0's reporter waits for a drift; other models' tunings would be none.
        threads = [sorted(report.threads) for report in reports]
        assert threads == [["bagua-reporter", "bagua-turns"], [], [], []]


@pytest.mark.slow
def test_rank_0_starts_a_service_that_ends_with_the_job(
    tuned_ranks: Callable[..., RankPool],
) -> None:
    pool = tuned_ranks(None, (2,))
    # The service is nicer than the ranks: on a busy machine it takes its time.
    reports = pool.run(train, 12_000, timeout_seconds=280)
    check(reports)
    assert all(report.tuned for report in reports)
    # As a user sees them who shows the lines of level INFO.
    logged = [line.removeprefix("INFO ") for report in reports for line in report.logged]
    assert logged
    assert others(logged) == []
    started = [child for pid in pool.pids for child in psutil.Process(pid).children()]
    assert any("bagua_autotune" in child.cmdline() for child in started)
    pool.close()
    wait_until(
        lambda: not any(child.is_running() for child in started), "the end of the service", 20
    )


@pytest.mark.slow
def test_torchrun_on_two_nodes_tunes_an_example_and_leaves_no_process(
    service: ServiceProcess,
) -> None:
    service.start()
    environment = {**os.environ, **LIMITS, "BAGUA_AUTOTUNE_URL": service.url}
    environment["BAGUA_AUTOTUNE_JOB"] = "characters"
    environment["BAGUA_AUTOTUNE_ALLOW"] = "bfloat16"
    launch = [sys.executable, str(EXAMPLES / "launch.py"), "--ranks-per-node", "1"]
    run = subprocess.Popen(
        [*launch, str(EXAMPLES / "characters.py"), "--steps", "60"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: bool(service.job()), "the registration", 100)
    processes = psutil.Process(run.pid).children(recursive=True)
    assert len(processes) >= 4  # two torchruns, two ranks
    output, said = run.communicate(timeout=200)
    assert run.returncode == 0
    assert others(said.splitlines()) == []
    losses = [float(line.split()[3]) for line in output.splitlines() if line.startswith("step")]
    assert losses[-1] < losses[0]
    job = service.job()
    assert job["name"] == "characters"
    assert service.get(f"jobs/{job['id']}")["ranks_per_node"] == [1, 1]
    # What changes the numbers is tried where it is allowed.
    tried = {trial["configuration"]["wire_precision"] for trial in service.trials()}
    assert tried == {"as_is", "bf16"}
    assert not any(process.is_running() for process in processes)


@pytest.mark.slow
def test_two_models_of_one_process_are_tuned_one_after_the_other(
    service: ServiceProcess, tuned_ranks: Callable[..., RankPool]
) -> None:
    service.start()
    first_rank, second_rank = tuned_ranks(service.url, (2,)).run(train_two, timeout_seconds=200)
    assert first_rank == second_rank
    assert first_rank[-1][:2] == (False, False)
    while_first_is_tuned = [step for step in first_rank if step[0]]
    assert all(tunes and is_default for _, tunes, is_default in while_first_is_tuned)
    later, earlier = service.get("jobs")["jobs"]
    assert later["name"] == f"{earlier['name']}#2"
    assert (earlier["state"], later["state"]) == ("finished", "finished")


def test_without_autotuning_no_service_hears_of_the_job(service: ServiceProcess) -> None:
    service.start()
    pool = RankPool((2,), variables={"BAGUA_AUTOTUNE": "0", "BAGUA_AUTOTUNE_URL": service.url})
    try:
        reports = pool.run(train, 20)
    finally:
        pool.close()
    check(reports)
    assert [(report.threads, report.groups) for report in reports] == [([], 1)] * 2
    assert service.job() == {}
