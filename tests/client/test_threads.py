"""No thread of ours that may call torch outlives the interpreter: C++ would end the process."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import bagua_client

PACKAGES = Path(bagua_client.__file__).parents[1]
# What these do is neither torch's nor in C++: they wait for a time or a process, or write a file.
CALL_NO_TORCH = {
    "bagua_training/data/redis_store.py": "Thread",
    "bagua_client/reporter/copies.py": "Thread",
    "bagua_client/service/sidecar.py": "Timer",
    "bagua_client/service/client.py": "Timer",
}
CALL_TORCH = {
    "bagua_client/agent/several_models.py",
    "bagua_client/communication/pipeline.py",
    "bagua_client/reporter/reporter.py",
}
MAKERS = {"Thread", "Timer", "TorchThread", "start_new_thread", "ThreadPoolExecutor", "ThreadPool"}


def test_each_thread_is_ended_or_calls_no_torch() -> None:
    made: dict[str, str] = {}
    for path in PACKAGES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name in MAKERS:
                    made[path.relative_to(PACKAGES).as_posix()] = name
    assert made == {**CALL_NO_TORCH, **dict.fromkeys(CALL_TORCH, "TorchThread")}


PROGRAM = """
    import atexit, socket, threading, time

    def ours():
        return sorted(t.name for t in threading.enumerate() if t.name.startswith("bagua"))

    atexit.register(lambda: print("last", ours()))  # runs after what is registered later

    import torch, torch.distributed as dist
    from bagua_client.agent.several_models import Turn, Turns
    from bagua_client.communication.operations import AllReduce
    from bagua_client.communication.pipeline import ThreadPipeline
    from bagua_client.environment import Environment
    from bagua_client.reporter.reporter import Reporter

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    turns = Turns(lambda: store)
    Turn("job", lambda: turns).take(0)
    sums = [AllReduce(dist.group.WORLD), AllReduce(dist.group.WORLD)]
    ThreadPipeline().start(torch.ones(1), sums).wait()
    silent = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{silent.getsockname()[1]}"
    default = {"bucket_bytes": 512}
    description = {"name": "job", "world_size": 2, "default_configuration": default}
    Reporter(Environment(url=address), description)
    asked = silent.accept()  # it waits for the answer
    print("before", ours(), flush=True)
    """


def test_they_have_ended_when_the_interpreter_ends() -> None:
    """Whether they sleep, or wait for a service that is silent."""
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    names = ["bagua-relay-1", "bagua-relay-2", "bagua-reporter", "bagua-turns"]
    assert run.stdout.splitlines() == [f"before {names}", "last []"], run.stderr
