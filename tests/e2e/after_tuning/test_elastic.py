"""An elastic job of torchrun that loses the node of rank 0 in mid-tuning."""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from subprocess import TimeoutExpired

import pytest
import torch.distributed as dist

from bagua_autotune.store import Store
from bagua_autotune.views.overviews import Overviews
from bagua_autotune.views.summary import Life
from tests.e2e.programs.elastic_agent import Agent, newest
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

MARK = "BAGUA_ELASTIC_TEST"


class Nodes:
    """Two torchruns of one job on this machine, as if they were on two."""

    def __init__(self, folder: Path, endpoint: str, mark: str) -> None:
        self._folder = folder
        variables = {MARK: mark, "OMP_NUM_THREADS": "1"}
        training = ["--snapshot", str(folder / "snapshot.pt"), "--steps", "100000"]
        training += ["--width", "48", "--batch", "8"]
        log = folder / "ranks.log"
        self.agents = [
            Agent(variables, 2, folder / f"disk-{node}", endpoint, training, log)
            for node in range(2)
        ]
        self._seen: set[str] = set()

    def await_life(self, nodes: int, trials: int) -> tuple[Agent, str]:
        """The node of rank 0, and the job, when so many trials of the next life are measured."""
        found: list[tuple[Agent, str]] = []

        def is_there() -> bool:
            for agent in self.agents:
                job, done = newest(agent.database, self._seen) or (None, [])
                measured = sum(trial.state == "measured" for trial in done)
                if job and len(job.ranks_per_node) == nodes and measured >= trials:
                    found.append((agent, job.id))
            return bool(found)

        wait_until(is_there, f"a life on {nodes} nodes", 280)
        self._seen.add(found[0][1])
        return found[0]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    # Where torchrun's rendezvous is outlives the nodes.
    rendezvous = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mark = uuid.uuid4().hex
    made = Nodes(tmp_path, f"127.0.0.1:{rendezvous.port}", mark)
    yield made
    for agent in made.agents:
        agent.process.terminate()
    for agent in made.agents:
        try:
            agent.process.wait(3)
        except TimeoutExpired:
            agent.process.kill()
            agent.process.wait()
    wait_until(lambda: not marked(f"{MARK}={mark}"), "the end of all that was started", 20)


def marked(variable: str) -> set[int]:
    """Processes that were started with ``NAME=value`` in their environment."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # ended, or somebody else's
            if variable.encode() in path.read_bytes().split(b"\0"):
                found.add(int(path.parent.name))
    return found


def lives(agent: Agent, job_id: str) -> list[Life]:
    store = Store(f"sqlite:///{agent.database}", as_found=True)
    found = Overviews(store).overview(job_id).lives
    store.close()
    return list(found)


def test_what_is_known_outlives_the_host_of_rank_0(nodes: Nodes) -> None:
    lost, first = nodes.await_life(nodes=2, trials=2)
    nodes.agents.remove(lost)
    for pid in [*lost.workers(), lost.process.pid]:
        os.kill(pid, signal.SIGKILL)
    (left,) = nodes.agents
    found = newest(left.database, set())
    assert found is None or found[0].id != first, "the other node's store knew nothing of it"

    _, second = nodes.await_life(nodes=1, trials=2)
    seen = lives(left, second)
    # Before them there may be one of the first node alone.
    ends = [(life.job, life.end) for life in seen[-2:]]
    assert ends == [(first, "resized"), (second, "running")]
    assert seen[-2].trials_measured >= 1
