"""A Slurm cluster of the test's own: two nodes on this machine, of whoever runs the test."""

from __future__ import annotations

import contextlib
import getpass
import os
import random
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd")
# Slurm's names of nodes: here they are their addresses, which need no entry in /etc/hosts.
NODES = ("127.0.0.1", "127.0.0.2")
CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# It has as many cores and GPUs as the examples ask for, whatever the machine has.
SlurmdParameters=config_overrides
GresTypes=gpu
KillWait=5
SchedulerParameters=sched_interval=1
"""
NODE = "NodeName={name} NodeHostname=localhost NodeAddr={name} Port={port} {size}\n"
SIZE = "CPUs=8 RealMemory=8192 Gres=gpu:8"


WAIT_SECONDS = 280.0
"""Only to find a hang."""


def missing() -> str | None:
    """What keeps a cluster from being started here."""
    lacking = [name for name in (*DAEMONS, "sbatch") if _find(name) is None]
    if lacking:
        return f"not installed: {', '.join(lacking)}"
    of_the_machine = socket.AI_ADDRCONFIG | socket.AI_PASSIVE
    try:
        socket.getaddrinfo(None, 0, socket.AF_INET, socket.SOCK_STREAM, flags=of_the_machine)
    except socket.gaierror:
        return "Slurm's daemons listen nowhere on a machine without an address beside loopback's"
    return None


class Slurm:
    """A running cluster; ``variables`` are what its commands and jobs find it by."""

    def __init__(self, folder: Path) -> None:
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command: str, **variables: str) -> str:
        """What one of Slurm's commands prints."""
        done = subprocess.run(
            command,
            env={**os.environ, **self.variables, **variables},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout.strip()

    def state(self, job: str) -> str:
        return self.run("squeue", "--noheader", "--states=all", "--jobs", job, "--format=%T")

    def wait_until(self, job: str, states: Sequence[str], seconds: float = WAIT_SECONDS) -> str:
        """The job's state, once it is one of these."""
        deadline = time.monotonic() + seconds
        while (state := self.state(job)) not in states:
            assert time.monotonic() < deadline, f"job {job} is {state} after {seconds:g} s"
            time.sleep(0.1)
        return state


@contextlib.contextmanager
def running_cluster(folder: Path) -> Iterator[Slurm]:
    """Started in ``folder``; it and all of its jobs are gone when the block ends."""
    ports = free_ports(1 + len(NODES))
    text = CONFIGURATION.format(folder=folder, user=getpass.getuser(), port=ports[0])
    for name, port in zip(NODES, ports[1:], strict=True):
        text += NODE.format(name=name, port=port, size=SIZE)
    (folder / "slurm.conf").write_text(text + "PartitionName=all Nodes=ALL Default=YES\n")
    for index in range(8):  # it complains that they are no devices, and counts them
        (folder / f"gpu{index}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(1024))
    munge = ["--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
    munge += [f"--{kind}-file={folder}/munged.{kind}" for kind in ("pid", "log", "seed")]
    slurm = Slurm(folder)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_daemon(folder, "munged", *munge))
        stack.enter_context(_daemon(folder, "slurmctld", "-D", "-c"))
        for name in NODES:
            stack.enter_context(_daemon(folder, "slurmd", "-D", "-N", name))
        _wait_for_nodes(slurm)
        try:
            yield slurm
        finally:
            _end_all_jobs(slurm)


@contextlib.contextmanager
def _daemon(folder: Path, name: str, *arguments: str) -> Iterator[None]:
    program = _find(name)
    assert program is not None
    with (folder / f"{name}.out").open("a") as output:
        process = subprocess.Popen(
            [program, *arguments],
            env={**os.environ, "SLURM_CONF": str(folder / "slurm.conf")},
            stdout=output,
            stderr=output,
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for_nodes(slurm: Slurm) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        with contextlib.suppress(AssertionError):  # the controller does not listen yet
            states = slurm.run("sinfo", "--noheader", "--Node", "--format=%T").split()
            if states == ["idle"] * len(NODES):
                return
        assert time.monotonic() < deadline, f"the nodes did not come in {WAIT_SECONDS:g} s"
        time.sleep(0.1)


def _end_all_jobs(slurm: Slurm) -> None:
    slurm.run("scancel", "--user", getpass.getuser())
    deadline = time.monotonic() + 30
    while slurm.run("squeue", "--noheader") and time.monotonic() < deadline:
        time.sleep(0.1)


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def free_ports(number: int) -> list[int]:
    """Ports that nobody has, below those that a system hands out by itself: nobody else is given
    one before it is used."""
    found: set[int] = set()
    while len(found) < number:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            found.add(port)
    return list(found)
