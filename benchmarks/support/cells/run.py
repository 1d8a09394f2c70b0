"""One cell of the gain bench, one model on one network: its jobs, from an empty network to its JSON
file, and what is kept beside its figures. The file holds::

    cell        the fields of Cell, and its name
    effort      the fields of Effort
    conditions  the link as measured, kernel, processor, commit, load before and after
    fallback    why it ran over loopback; null if over a shaped network
    arms        name -> what ran, as in the specification of jobs/measure.py
    sweep       stage 1: what jobs/measure.py wrote; arms: name -> [[seconds, ...] of each round]
    run_off     stage 2: the same of the arms that the results rest on, in more rounds
    tuning      the live tuning: what jobs/tune.py wrote, and "stored": what the service keeps of it
    allowed     the same of a second tuning in which 16 bits on the wire are allowed, or null
    seconds     what each part took, and the whole: "total"

The cell's folder beside it keeps specifications, logs, the service's database, everything stored of
the tuned job (``job.json``) and its profile for the simulator (``profile.json``). Until all is
measured its name is that of the cell with ``.unfinished``.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.cells.cell import (
    DEFAULT_COMPUTE_SECONDS,
    DEFAULT_GRADIENT_BYTES,
    TUNED,
    TUNED_ALLOWED,
    Arm,
    Cell,
    Effort,
    ours,
    sweep_arms,
)
from benchmarks.support.harness import write_json
from benchmarks.testbed import Network, Testbed

PROBE_SECONDS = 1.0


def conditions(testbed: Testbed) -> dict[str, Any]:
    """Before the measuring; ``load_after`` is for the end.

    Raises:
        RuntimeError: the hosts do not reach each other.
    """
    link = None
    if not testbed.fallback and testbed.nodes > 1:
        round_trip, rate = testbed.probe(PROBE_SECONDS)
        link = {"round_trip_seconds": round_trip, "bits_per_second": rate}
    return {
        "link": link,
        "kernel": platform.release(),
        "processor": processor(),
        "commit": commit(),
        "load_before": os.getloadavg(),
    }


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Its name, if Linux tells."""
    if not cpuinfo.exists():
        return None
    names = (line for line in cpuinfo.read_text().splitlines() if line.startswith("model name"))
    return next((name.partition(":")[2].strip() for name in names), None)


def commit() -> str | None:
    """Of this checkout, with a plus if it was changed since; None if it is none."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True)
    except OSError:
        return None
    if head.returncode:
        return None
    return head.stdout.strip()[:12] + ("+" if changed.stdout else "")


def export_job(database: Path, job: str, folder: Path) -> dict[str, Any]:
    """Write ``job.json`` and ``profile.json`` to ``folder``; return what a cell keeps of it: state,
    result, the best configuration by now, and the trials of the first tuning.

    Raises:
        subprocess.CalledProcessError: there is no such job in the database.
    """
    source = ["--database", f"sqlite:///{database}"]
    (folder / "job.json").write_text(_export(job, "--json", *source))
    try:
        (folder / "profile.json").write_text(_export(job, "--profile", *source))
    except subprocess.CalledProcessError as error:
        # A tuning that ended before any step was profiled; only the simulator misses it.
        print(f"{job}: no profile: {error.stderr.strip()}", flush=True)
    document = json.loads((folder / "job.json").read_text())
    return {
        "state": document["state"],
        "best": document["progress"]["incumbent"] or document["default_configuration"],
        "round": document["round"],
        "result": document["result"],
        "trials": [trial for trial in document["trials"] if trial["round"] == 0],
    }


def with_stored(
    tuning: Mapping[str, Any], database: Path, job: str, folder: Path
) -> dict[str, Any]:
    """What the job of a tuning wrote, with what the service stored of it; see export_job. A tuning
    that did not end left its job at some trial: the best configuration until then stands for it.
    """
    stored = export_job(database, job, folder)
    found = tuning["configuration"]
    best = found if tuning["ended"] else {**found, **stored["best"]}
    return {**tuning, "configuration": best, "stored": stored}


def _export(job: str, *options: str) -> str:
    command = [sys.executable, "-m", "bagua_autotune", "export", job, *options]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def tail(log: Path) -> str:
    """The end of a log, indented; empty if there is none."""
    if not log.exists():
        return ""
    return "\n".join("    " + line for line in log.read_text(errors="replace").splitlines()[-20:])


JOBS = Path(__file__).resolve().parents[1] / "jobs"
OUT_OF_MEMORY = "OutOfMemoryError"
AFTER_STEPS = 10


class CellError(RuntimeError):
    """A cell that could not be measured; the text says what happened and where the log is."""


class Jobs:
    """The jobs of one cell, all on its testbed.

    Args:
        name: of the cell.
        workload: the part of a job's specification that all rank programs read.
        folder: for specifications, what jobs write, and logs.
        timeout_seconds: of each job.

    Attributes:
        seconds: what each job took, by its name.
    """

    def __init__(
        self,
        name: str,
        workload: Mapping[str, Any],
        folder: Path,
        testbed: Testbed,
        timeout_seconds: float,
    ) -> None:
        self._name, self._workload = name, workload
        self.folder, self.testbed = folder, testbed
        self._timeout_seconds = timeout_seconds
        self.seconds: dict[str, float] = {}
        if testbed.fallback:
            print(f"{name}: over loopback: {testbed.fallback}", flush=True)

    def served(self, folder: Path) -> dict[str, str]:
        """The variables by which a job finds a service of its own, whose database, a new one, is
        in ``folder``."""
        token, database = secrets.token_urlsafe(16), folder / "autotune.db"
        folder.mkdir(exist_ok=True)
        database.unlink(missing_ok=True)
        return {
            "BAGUA_AUTOTUNE_URL": self.testbed.serve(database, token, folder / "service.log"),
            "BAGUA_AUTOTUNE_TOKEN": token,
            "BAGUA_AUTOTUNE_JOB": self._name,
        }

    def tune(
        self, most_steps: int, allow: str = "", variables: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """A live tuning, by a service that knows of no other; with what that stored.

        Args:
            most_steps: one that has not ended by then is cut off.
            allow: what may be tried though it changes the numbers.
            variables: further ones of the job.
        """
        folder = self.folder / "allowed" if allow else self.folder
        told = {
            **self.served(folder),
            "BAGUA_AUTOTUNE": "1",
            "BAGUA_AUTOTUNE_ALLOW": allow,
            **(variables or {}),
        }
        limits = {"most_steps": most_steps, "after_steps": AFTER_STEPS, "tells_loss": bool(allow)}
        tuning = self.run("tune", "tune allowed" if allow else "tune", limits, told)
        return with_stored(tuning, folder / "autotune.db", self._name, folder)

    def measure(self, arms: Sequence[Arm], rounds: int, steps: int, **more: Any) -> dict[str, Any]:
        """Those arms in turns: ``rounds`` blocks of each; see jobs/measure.py."""
        specification = {"arms": arms, "rounds": rounds, "steps": steps, "warmup_steps": 1, **more}
        return self.run("measure", "sweep and run-off", specification)

    def run(
        self,
        program: str,
        name: str,
        specification: Mapping[str, Any],
        variables: Mapping[str, str] | None = None,
        timeout_seconds: float | None = None,
    ) -> dict[str, Any]:
        """One torchrun job over all hosts, and what its rank 0 wrote.

        Raises:
            CellError: it failed, or took longer.
        """
        began = time.monotonic()
        reads, writes, log = (
            self.folder / f"{name.replace(' ', '-')}{end}"
            for end in (".spec.json", ".json", ".log")
        )
        writes.unlink(missing_ok=True)
        log.unlink(missing_ok=True)
        reads.write_text(json.dumps({**self._workload, **specification}, indent=2))
        script = [str(JOBS / f"{program}.py"), str(reads), str(writes)]
        job = self.testbed.start(script, variables, log)
        try:
            code = job.wait(timeout_seconds or self._timeout_seconds)
        except TimeoutError as error:
            raise CellError(f"{program}.py: {error}; {log} ends:\n{tail(log)}") from None
        self.seconds[name] = time.monotonic() - began
        if code or not writes.exists():
            if log.exists() and OUT_OF_MEMORY in log.read_text(errors="replace"):
                print(f"{self._name}: {name} ran out of memory", file=sys.stderr, flush=True)
            raise CellError(f"{program}.py ended with exit code {code}; {log} ends:\n{tail(log)}")
        print(f"{self._name}: {name}, {self.seconds[name]:.0f} s", flush=True)
        found: dict[str, Any] = json.loads(writes.read_text())
        return found


JOB_TIMEOUT_SECONDS = 1800.0
"""Of each job of a cell; several times what it takes in the default cells."""
SLOWEST_BITS_PER_SECOND = 3e8
"""The slowest network of the default cells."""
GPU_JOB_TIMEOUT_SECONDS = 300.0


def run_cell(cell: Cell, effort: Effort, output: Path, loopback: bool = False) -> Path:
    """Tune, sweep, run off; return the cell's JSON file, written when all is measured.

    What an earlier run of the cell left is replaced then, and not before.

    Args:
        loopback: where hosts cannot be made, run over loopback.

    Raises:
        CellError: a part of it failed. What it left is in the folder ``output/NAME.unfinished``.
    """
    began = time.monotonic()
    unfinished = output.resolve() / f"{cell.name}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    network = Network.parse(cell.network)
    size = (cell.nodes, cell.ranks_per_node)
    with Testbed(network, *size, gpus=cell.device == "cuda") as testbed:
        if testbed.fallback and not (loopback or cell.smoke):
            raise CellError(f"{testbed.fallback}; --loopback measures it all the same")
        result = _measured(cell, effort, unfinished, testbed)
    result["seconds"]["total"] = time.monotonic() - began
    write_json(unfinished / "cell.json", result)
    folder = output / cell.name
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
    return (folder / "cell.json").replace(output / f"{cell.name}.json")


def _measured(cell: Cell, effort: Effort, folder: Path, testbed: Testbed) -> dict[str, Any]:
    """What the cell's JSON says."""
    jobs = Jobs(cell.name, cell.workload, folder, testbed, job_timeout_seconds(cell))
    found = conditions(testbed)
    limits = {"most_steps": effort.most_tuning_steps, "variables": effort.tuning_variables}
    tuning = jobs.tune(**limits)
    allowed = jobs.tune(allow=effort.allow, **limits) if effort.allow else None
    arms = [*sweep_arms(cell, effort), ours(TUNED, tuning["configuration"])]
    if allowed:
        arms.append(ours(TUNED_ALLOWED, allowed["configuration"]))
    again = {
        "rounds": effort.run_off_rounds,
        "steps": effort.run_off_steps,
        "cell": cell.to_json(),
        "effort": effort.to_json(),
    }
    # All arms in turns, then those that the results rest on, in one job.
    measured = jobs.measure(arms, effort.sweep_rounds, effort.sweep_steps, run_off=again)
    return {
        "cell": cell.to_json(),
        "effort": effort.to_json(),
        "conditions": {**found, "load_after": os.getloadavg()},
        "fallback": testbed.fallback,
        "arms": {arm["name"]: arm for arm in arms},
        "sweep": measured["sweep"],
        "run_off": measured["run_off"],
        "tuning": tuning,
        "allowed": allowed,
        "seconds": {**jobs.seconds, "sweep": measured["sweep"]["seconds"]},
    }


def job_timeout_seconds(cell: Cell) -> float:
    """Longer for a cell whose steps take longer than those of the default cells may; short where
    time is dear."""
    if cell.device == "cuda":
        return GPU_JOB_TIMEOUT_SECONDS
    rate = Network.parse(cell.network).rate_bits_per_second or SLOWEST_BITS_PER_SECOND
    communicating = cell.gradient_bytes / DEFAULT_GRADIENT_BYTES * SLOWEST_BITS_PER_SECOND / rate
    computing = cell.compute_seconds / DEFAULT_COMPUTE_SECONDS
    return JOB_TIMEOUT_SECONDS * max(1.0, communicating, computing)
