"""torchrun of an elastic job, with a disk of its own, and what its service stored."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, run

from bagua_autotune.model.job import Job, Trial
from bagua_autotune.store import Store
from bagua_autotune.store.errors import StoreError
from tests.autotune.support import stored_jobs

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "elastic.py"
NAME = "elastic"
DIES_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()
PATIENCE = "is_host=0,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
VARIABLES = {
    # Else gloo's ranks look for one another where those of the life before were.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "BAGUA_AUTOTUNE": "1",
    "BAGUA_AUTOTUNE_JOB": NAME,
    "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S": "0.5",
    "BAGUA_AUTOTUNE_WARMUP_TIME_S": "0.5",
}


class Agent:
    """torchrun on this machine, with a disk of its own.

    Args:
        variables: of its environment, beside this process's and ours.
        disk: for what its services and nodes keep.
        endpoint: of the rendezvous.
        training: arguments of the example.
        log: what the ranks print is added here.
    """

    def __init__(
        self,
        variables: Mapping[str, str],
        ranks: int,
        disk: Path,
        endpoint: str,
        training: Sequence[str],
        log: Path,
    ) -> None:
        self.disk = disk
        self.database = disk / "bagua-autotune" / "autotune.db"
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2"]
        command += [f"--nproc-per-node={ranks}", "--max-restarts=3", f"--rdzv-id={NAME}"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-conf={PATIENCE}"]
        command += ["--local-addr=127.0.0.1", "--no-python"]
        # Ranks must not outlive a torchrun that is killed.
        command += [*DIES_WITH_PARENT, sys.executable, "-u", str(SCRIPT)]
        with log.open("ab") as output:
            self.process = Popen(
                [*DIES_WITH_PARENT, *command, *training],
                env={**os.environ, **variables, **VARIABLES, "XDG_DATA_HOME": str(disk)},
                stdin=DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
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


def newest(database: Path, seen: set[str]) -> tuple[Job, list[Trial]] | None:
    """The newest job in a database that was not seen before; it may be made at this moment."""
    if not database.exists():
        return None
    try:
        store = Store(f"sqlite:///{database}", as_found=True)
    except StoreError:
        return None
    try:
        found = [job for job in stored_jobs(store)[:1] if job.id not in seen]
        return (found[0], store.trials.of(found[0].id)) if found else None
    finally:
        store.close()
