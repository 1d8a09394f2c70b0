"""deploy/slurm: the scripts as they stand, submitted to a real Slurm where it is installed."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from sqlalchemy import make_url

from bagua_autotune.cli.commands.serve import serve
from bagua_autotune.connections import (
    DESCRIPTORS_EACH,
    MOST_CONNECTIONS,
    OTHER_DESCRIPTORS,
)
from bagua_autotune.settings import ENVIRONMENT
from tests.deploy import slurm
from tests.deploy.slurm import Slurm, running_cluster
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "slurm"
SCRIPTS = sorted(FOLDER.glob("*.sbatch"))
UNIT = FOLDER / "bagua-autotune.service"
TRAINING = ROOT / "tests" / "train.py"
LIMITS = {
    "BAGUA_AUTOTUNE_MAX_SAMPLES": "2",
    "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S": "0.3",
    "BAGUA_AUTOTUNE_WARMUP_TIME_S": "0.3",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
}
RESULT = re.compile(r"^(\d): autotune: bucket .*; \d+ trials, \d+ steps", re.MULTILINE)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if (why := slurm.missing()) is not None:
        pytest.skip(why)
    with running_cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's, and the working folder of the jobs; what the project installs is on PATH."""
    programs = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name, value in LIMITS.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def submit(cluster: Slurm, script: str, *arguments: str, **variables: str) -> str:
    """The number of the job; a training has one rank on each of its two nodes."""
    options = [] if script == "service.sbatch" else ["--gpus-per-node=1", "--ntasks-per-node=1"]
    command = ["sbatch", "--parsable", *options, str(FOLDER / script), *arguments]
    return cluster.run(*command, **variables)


def output_of(home: Path, cluster: Slurm, job: str) -> str:
    state = cluster.wait_until(job, ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"))
    (found,) = home.glob(f"*-{job}.out")
    text = found.read_text()
    assert state == "COMPLETED", text
    return text


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_it_is_a_script_without_mistakes(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    subprocess.run(["shellcheck", str(script)], check=True)


def test_a_training_is_tuned_by_the_service_beside_it(cluster: Slurm, home: Path) -> None:
    (port,) = slurm.free_ports(1)
    job = submit(cluster, "torchrun.sbatch", str(TRAINING), MASTER_PORT=str(port))
    text = output_of(home, cluster, job)
    assert "autotune: job training is being tuned, see http://127.0.0.1" in text
    assert RESULT.search(text), text


def test_ranks_that_srun_starts_are_tuned_by_a_service_that_is_a_job(
    cluster: Slurm, home: Path
) -> None:
    port, meeting = (str(port) for port in slurm.free_ports(2))
    service = submit(cluster, "service.sbatch", BAGUA_SERVICE_PORT=port)
    environment = home / ".bagua-autotune" / "environment"
    cluster.wait_until(service, ("RUNNING",))
    wait_until(environment.exists, "the service's address")
    assert stat.S_IMODE(environment.stat().st_mode) == 0o600
    script = ("-m", "bagua_client", str(TRAINING))  # as one that stays as it is would be
    training = submit(cluster, "srun.sbatch", *script, MASTER_PORT=meeting)
    text = output_of(home, cluster, training)
    assert RESULT.search(text), text
    said = dict(line.split("=", 1) for line in environment.read_text().splitlines())
    headers = {"Authorization": f"Bearer {said['BAGUA_AUTOTUNE_TOKEN']}"}
    jobs = f"{said['BAGUA_AUTOTUNE_URL']}/api/v2/jobs"
    assert requests.get(jobs, timeout=10).status_code == 401
    (job,) = requests.get(jobs, headers=headers, timeout=10).json()["jobs"]
    assert (job["name"], job["result"] is not None) == ("training", True)
    overview = requests.get(f"{jobs}/{job['id']}/overview", headers=headers, timeout=10).json()
    assert overview["ranks_per_node"] == [1, 1], "srun's nodes, here of one machine"
    cluster.run("scancel", service)
    assert cluster.wait_until(service, ("CANCELLED",)) == "CANCELLED"


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    # With a program that is there: whether it is executable is looked at, too.
    unit = tmp_path / UNIT.name
    program = Path(sys.executable).with_name("bagua-autotune")
    text = UNIT.read_text().replace("/opt/bagua-autotune/bin/bagua-autotune", str(program))
    unit.write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_leaves_room_for_all_connections_and_bounds_memory() -> None:
    settings = dict(line.split("=", 1) for line in UNIT.read_text().splitlines() if "=" in line)
    assert int(settings["LimitNOFILE"]) >= DESCRIPTORS_EACH * MOST_CONNECTIONS + OTHER_DESCRIPTORS
    assert settings["MemoryMax"] == "2G"
    assert int(settings["RestartSec"]) > 0


def test_the_unit_tells_the_service_what_it_knows() -> None:
    lines = [line.partition("=") for line in UNIT.read_text().splitlines()]
    (start,) = [value for name, _, value in lines if name == "ExecStart"]
    (variable,) = [value for name, _, value in lines if name == "Environment"]
    program, command, *arguments = start.split()
    assert (Path(program).name, command) == ("bagua-autotune", "serve")
    serve.make_context("serve", arguments)  # raises for what is none of its options
    name, _, url = variable.partition("=")
    assert name == ENVIRONMENT["database"]
    assert Path(str(make_url(url).database)).parent == Path("/var/lib/bagua-autotune")
