"""An elastic torchrun job on emulated hosts: it is killed, grows, shrinks and loses its service.

    sudo .venv/bin/python -m benchmarks.elastic --network 300mbit --json elastic.json

Two hosts train ``examples/elastic.py``, with ``--nnodes=1:2 --max-restarts=3``; no service is
named, so rank 0 starts one on its host, whose database no other host sees. torchrun's rendezvous is
on a third host. The lives, each of which ends as soon as its tuning has, but for the first:

1. one host; a worker is killed in the middle of the tuning;
2. the same ranks again: the trials of before count;
3. the second host joins: its link is new, the model is known;
4. its torchrun is killed: back to what is known;
5. it joins again, with an empty disk: known;
6. all processes of the first host are killed and its disk is emptied: rank 0 and the service are
   on the other one, which knows what was handed over;
7. the first host is back, with an empty disk: it has rank 0 again, and knows what was handed over.

The table says for each life how many trials of before it knew, how many of them counted, and which
of its own was the first one as fast as its best, within 5 % (reached). Exit status 1: a life did
not do what it should, or something is left behind. It needs what the testbed needs
(docs/testbed.md).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE, run

from bagua_autotune.earlier.restart import carried_over
from bagua_autotune.measuring.rounds import Round
from bagua_autotune.model.job import Job, Trial
from bagua_autotune.model.text import describe
from bagua_autotune.store import Store, StoreError
from benchmarks.harness import print_table, write_json
from benchmarks.testbed import Host, Network, Testbed
from benchmarks.testbed.job import free_port
from benchmarks.testbed.processes import end, read_line
from benchmarks.testbed.tools import dies_with_parent

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "elastic.py"
NAME = "elastic"
SLOWER = 0.05
"""Costs are logarithms of times."""
FIRST_TRIALS = 3
GONE_SECONDS = 15.0
POLL_SECONDS = 0.25
PATIENCE = "is_host=0,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
VARIABLES = {
    # Else gloo's ranks look for one another where those of the life before were.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "BAGUA_AUTOTUNE": "1",
    "BAGUA_AUTOTUNE_JOB": NAME,
    "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S": "2",
    "BAGUA_AUTOTUNE_WARMUP_TIME_S": "2",
}
RENDEZVOUS = """
import sys, time
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("0.0.0.0", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print("listening", flush=True)
time.sleep(3600)
"""


HEADER = (
    *("life", "after", "ranks", "nodes", "service on", "known", "counted", "trials", "reached"),
    *("best", "result"),
)


@dataclass
class Life:
    """What one of them came to.

    Attributes:
        what: ended the life before.
        service: the host of rank 0.
        known: trials of a life that was cut short, which this one goes on with.
        counted: those of them that count, as the default took as long as before.
        trials: of this life.
        reached: the number of the first trial as fast as the life's best; the default's is 1.
    """

    what: str
    ranks: int
    nodes: int
    service: str
    known: int
    counted: int
    trials: int
    reached: int
    best: str
    state: str


class Agent:
    """torchrun on a host, with a disk of its own.

    Args:
        disk: for what the host's services and nodes keep.
        endpoint: of the rendezvous.
        training: arguments of the example.
        log: what the ranks print is added here.
    """

    def __init__(
        self, host: Host, ranks: int, disk: Path, endpoint: str, training: Sequence[str], log: Path
    ) -> None:
        self.host = host
        self.disk = disk
        self.database = disk / "bagua-autotune" / "autotune.db"
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2"]
        command += [f"--nproc-per-node={ranks}", "--max-restarts=3", f"--rdzv-id={NAME}"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-conf={PATIENCE}"]
        command += [f"--local-addr={host.address}", "--no-python"]
        # Ranks must not outlive a torchrun that is killed.
        command += [*dies_with_parent(), *host.priority, sys.executable, "-u", str(SCRIPT)]
        with log.open("ab") as output:
            self.process = host.popen(
                [*command, *training],
                {**VARIABLES, "XDG_DATA_HOME": str(disk)},
                stdout=output,
                stderr=output,
            )

    def workers(self) -> list[int]:
        """Their process ids, by local rank."""
        children = ["ps", "-o", "pid=", "--ppid", str(self.process.pid)]
        found = {}
        for pid in run(children, stdout=PIPE, text=True, check=False).stdout.split():
            variables = Path(f"/proc/{pid}/environ").read_bytes()
            local_rank = re.search(rb"\0LOCAL_RANK=(\d+)\0", variables)
            if local_rank is not None:
                found[int(local_rank[1])] = int(pid)
        return [found[rank] for rank in sorted(found)]


class Bench:
    """The hosts and what runs on them."""

    def __init__(self, testbed: Testbed, options: argparse.Namespace) -> None:
        self._testbed = testbed
        self._options = options
        self._log = options.log or testbed.folder / "ranks.log"
        self._port = free_port()
        self._disks = 0
        place = testbed.service_host
        script = [sys.executable, "-c", RENDEZVOUS, str(self._port)]
        self._store = place.popen(script, stdout=PIPE, stderr=DEVNULL)
        read_line(self._store)
        self.agents: dict[int, Agent] = {}
        self.seen: set[str] = set()
        self.lives: list[Life] = []

    def start(self, number: int) -> None:
        """torchrun on the host of that number, with an empty disk."""
        host = self._testbed.hosts[number]
        self._disks += 1
        disk = self._testbed.folder / f"disk-{self._disks}"
        endpoint = f"{self._testbed.service_host.address}:{self._port}"
        training = ["--snapshot", str(self._testbed.folder / "snapshot.pt"), "--steps", "1000000"]
        training += ["--width", str(self._options.width), "--batch", str(self._options.batch)]
        ranks = self._testbed.ranks_per_node
        self.agents[number] = Agent(host, ranks, disk, endpoint, training, self._log)

    def lose(self, number: int) -> None:
        """Everything that runs on the host is killed, and its disk is emptied."""
        agent = self.agents.pop(number)
        for pid in self._processes(agent.host):
            run(["kill", "-KILL", str(pid)], stderr=DEVNULL, check=False)
        agent.process.wait()
        shutil.rmtree(agent.disk, ignore_errors=True)

    def await_life(self, what: str, number: int, nodes: int, is_done: Done) -> None:
        """The next life, with rank 0 on the host of that number, until it is as it should be."""
        deadline = time.monotonic() + self._options.patience
        while True:
            found = newest(self.agents[number].database, self.seen)
            if found and len(found[0].ranks_per_node) == nodes and is_done(*found):
                break
            if time.monotonic() > deadline or self.agents[number].process.poll() is not None:
                raise RuntimeError(f"after {what}: no life as it should be; see {self._log}")
            time.sleep(POLL_SECONDS)
        self.seen.add(found[0].id)
        life = summed_up(what, f"host {number}", *found)
        self.lives.append(life)
        print(f"life {len(self.lives)}, after {what}: {life.state}", flush=True)

    def finish(self) -> list[str]:
        """End it as a user would; what is left of it then."""
        for agent in self.agents.values():
            agent.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + GONE_SECONDS
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        end([agent.process for agent in self.agents.values()])
        end([self._store])
        return left

    def _left(self) -> list[str]:
        found = set().union(*(self._processes(host) for host in self._testbed.hosts))
        return [_command(pid) for pid in sorted(found) if _command(pid)]

    def _processes(self, host: Host) -> set[int]:
        if host.namespace is None:
            raise RuntimeError(f"there are no hosts: {self._testbed.fallback}")
        listed = run(["ip", "netns", "pids", host.namespace], stdout=PIPE, text=True, check=True)
        return set(map(int, listed.stdout.split()))


Done = Callable[[Job, list[Trial]], bool]


def newest(database: Path, seen: set[str]) -> tuple[Job, list[Trial]] | None:
    """The newest job in a database that was not seen before; it may be made at this moment."""
    if not database.exists():
        return None
    try:
        store = Store(f"sqlite:///{database}", as_found=True)
    except StoreError:
        return None
    try:
        found = [job for job in store.jobs(NAME, 1) if job.id not in seen]
        return (found[0], store.trials(found[0].id)) if found else None
    finally:
        store.close()


def summed_up(what: str, service: str, job: Job, trials: list[Trial]) -> Life:
    """Of a life whose tuning is as it should be."""
    earlier = job.inherited.earlier if job.inherited else None
    searched = [t for t in trials if t.purpose == "search" and t.estimate]
    costs = [t.estimate.center for t in searched if t.estimate]
    reached = next(n for n, cost in enumerate(costs, 1) if cost <= min(costs) + SLOWER)
    fastest = searched[costs.index(min(costs))].configuration
    best = job.result.configuration if job.result else fastest
    ends = job.result.summary if job.result else f"{len(searched)} trials"
    return Life(
        what,
        job.world_size,
        len(job.ranks_per_node),
        service,
        len(earlier.trials) if earlier else 0,
        len(carried_over(Round.of(job, trials))),
        len(trials),
        reached,
        describe(best),
        ends,
    )


def is_finished(job: Job, _trials: list[Trial]) -> bool:
    return job.phase == "finished"


def is_in_the_middle(_job: Job, trials: list[Trial]) -> bool:
    return sum(trial.state == "measured" for trial in trials) >= FIRST_TRIALS


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
    except OSError:
        return ""


def live(bench: Bench) -> None:
    """All lives, one after the other."""
    bench.start(0)
    bench.await_life("the start", 0, 1, is_in_the_middle)
    run(["kill", "-KILL", str(bench.agents[0].workers()[-1])], check=True)
    bench.await_life("a worker was killed", 0, 1, is_finished)
    bench.start(1)
    bench.await_life("host 1 joined", 0, 2, is_finished)
    bench.lose(1)
    bench.await_life("host 1 was lost", 0, 1, is_finished)
    bench.start(1)
    bench.await_life("host 1 joined again", 0, 2, is_finished)
    bench.lose(0)
    bench.await_life("host 0 was lost", 1, 1, is_finished)
    bench.start(0)
    bench.await_life("host 0 is back", 0, 2, is_finished)


def faults(lives: Sequence[Life]) -> Iterator[str]:
    """What did not go as it should."""
    if lives[1].known < FIRST_TRIALS - 1:
        yield f"life 2: {lives[1].known} trials of before are known"
    known: set[int] = set()
    for number, life in enumerate(lives, 1):
        if life.nodes in known and life.reached > FIRST_TRIALS:
            yield f"life {number}: at its best in trial {life.reached}"
        # The first life with so many nodes has to find out; one that was cut short has not.
        known |= {life.nodes} if number > 1 else set()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", type=Network.parse, default=Network.parse("300mbit"))
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--width", type=int, default=144, help="model width, a multiple of 6")
    parser.add_argument("--batch", type=int, default=16, help="sequences in a step")
    parser.add_argument(
        "--patience", type=float, default=150, help="maximum seconds for one life of the job"
    )
    parser.add_argument("--samples", type=int, default=40, help="maximum trials in a search")
    parser.add_argument("--log", type=Path, help="append the output of the ranks to this file")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    options = parser.parse_args()
    for variable in [name for name in os.environ if name.startswith("BAGUA_")]:
        del os.environ[variable]
    os.environ["BAGUA_AUTOTUNE_MAX_SAMPLES"] = str(options.samples)
    began = time.monotonic()
    with Testbed(options.network, 2, options.ranks_per_node, ordinary_priority=True) as testbed:
        if testbed.fallback is not None:
            sys.exit(f"this needs hosts: {testbed.fallback}")
        print(testbed, flush=True)
        bench = Bench(testbed, options)
        failed = []
        try:
            live(bench)
            failed += faults(bench.lives)
        except RuntimeError as error:
            failed.append(str(error))
        finally:
            left = bench.finish()
    failed += [f"left behind: {command}" for command in left]
    rows = [[str(n), *map(str, asdict(life).values())] for n, life in enumerate(bench.lives, 1)]
    print_table(HEADER[:-1], [row[:-1] for row in rows])
    print("; ".join(failed) or "all as it should be, and nothing is left behind")
    print(f"{time.monotonic() - began:.0f} s")
    if options.json:
        lives = [asdict(life) for life in bench.lives]
        network = str(options.network)
        write_json(options.json, {"network": network, "lives": lives, "failed": failed})
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
