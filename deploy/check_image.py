"""Build the service's image, and see it tune a real training.

The container has a read-only root, no capabilities and an ordinary user. A training of 2 ranks is
tuned against it. SIGTERM during the tuning must end it in time and with exit code 0. Started again
on the same volume, it must finish the tuning. Without Docker, for instance:

    python deploy/check_image.py --engine "podman --runtime runc" --build "buildah bud --format
        docker" --base localhost/pybase:1 --run-options "--read-only-tmpfs=false --network host"
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import requests

ROOT = Path(__file__).parents[1]
URL = "http://127.0.0.1:8123"
NAME = "bagua-autotune"
IMAGE = f"{NAME}:check"
LIMITS = {
    "BAGUA_AUTOTUNE_MAX_SAMPLES": "10",
    "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S": "1",
    "BAGUA_AUTOTUNE_WARMUP_TIME_S": "2",
}
TRAINING = ["--nodes", "2", "--ranks-per-node", "1", "examples/digits.py", "--minutes", "3"]
LARGEST_BYTES = 400e6
STOP_SECONDS = 5.0
ASKING_THREADS = 8
# Whether it can write where it must not, and who it is.
LOOK = 'touch /venv/x /tmp/x 2>/dev/null && echo "can write"; id -u'


class Container:
    """The image, run as docs/operating.md says, until the block ends."""

    def __init__(self, engine: list[str], options: list[str]) -> None:
        self._engine = engine
        self._options = options
        self._name = f"{NAME}-check-{os.getpid()}"
        self.token = secrets.token_hex(16)

    def __enter__(self) -> Container:
        self._call(
            "run", "--detach", "--name", self._name, "--read-only", "--cap-drop", "ALL",
            "--security-opt", "no-new-privileges", "--publish", "127.0.0.1:8123:8123",
            "--volume", f"{self._name}:/data", "--env", f"BAGUA_AUTOTUNE_TOKEN={self.token}",
            *self._options, IMAGE,
        )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run([*self._engine, "logs", "--tail", "5", self._name], check=False)
        self._call("rm", "--force", "--volumes", self._name)
        self._call("volume", "rm", "--force", self._name)

    def look(self) -> str:
        return self._call("exec", self._name, "sh", "-c", LOOK)

    def stop(self) -> tuple[float, str]:
        """Seconds from SIGTERM to the end, and the exit code."""
        begin = time.monotonic()
        self._call("stop", "--time", "30", self._name)
        seconds = time.monotonic() - begin
        return seconds, self._call("inspect", "--format", "{{.State.ExitCode}}", self._name)

    def start(self) -> None:
        self._call("start", self._name)

    def get(self, path: str) -> requests.Response:
        headers = {"Authorization": f"Bearer {self.token}"}
        return requests.get(URL + path, headers=headers, timeout=30)

    def job(self) -> dict[str, Any]:
        with contextlib.suppress(requests.ConnectionError):
            jobs = self.get("/api/v2/jobs").json()["jobs"]
            return dict(jobs[0]) if jobs else {}
        return {}

    def _call(self, *arguments: str) -> str:
        command = [*self._engine, *arguments]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def size_bytes(engine: list[str], image: str) -> int:
    command = [*engine, "image", "inspect", "--format", "{{.Size}}", image]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        expect(time.monotonic() < deadline, f"{what} did not come in {seconds:g} s")
        time.sleep(0.2)


def expect(condition: bool, message: str) -> None:
    if not condition:
        sys.exit(message)


def answers(container: Container, path: str) -> bool:
    with contextlib.suppress(requests.ConnectionError):
        return container.get(path).ok
    return False


@contextlib.contextmanager
def training(container: Container) -> Iterator[subprocess.Popen[bytes]]:
    variables = {"BAGUA_AUTOTUNE": "1", "BAGUA_AUTOTUNE_URL": URL, **LIMITS}
    process = subprocess.Popen(
        [sys.executable, "examples/launch.py", *TRAINING],
        cwd=ROOT,
        env={**os.environ, **variables, "BAGUA_AUTOTUNE_TOKEN": container.token},
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)  # it then ends its ranks
        process.wait()


@contextlib.contextmanager
def asked(container: Container) -> Iterator[None]:
    """Requests come from several connections at once, whatever becomes of them."""
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            with contextlib.suppress(requests.RequestException):
                container.get("/metrics")
                container.get("/api/v2/jobs")

    threads = [threading.Thread(target=ask) for _ in range(ASKING_THREADS)]
    for thread in threads:
        thread.start()
    yield
    over.set()
    for thread in threads:
        thread.join()


def check(container: Container) -> None:
    wait_until(lambda: answers(container, "/readyz"), "readiness", 60)
    seen = container.look()
    expect(seen == "10001", f"it should be user 10001 and write nowhere, but: {seen}")
    for path in ("/healthz", "/", "/metrics", "/api/v2/jobs"):
        expect(answers(container, path), f"{path} does not answer")
    expect(requests.get(f"{URL}/api/v2/jobs", timeout=30).status_code == 401, "no token was wanted")
    print("read-only root, user 10001: /healthz, the page, /metrics and the API answer", flush=True)
    with training(container):
        wait_until(lambda: ((container.job().get("trial") or {}).get("index", 0)) >= 4, "trial 4")
        with asked(container):
            time.sleep(1)
            seconds, code = container.stop()
        print(f"SIGTERM in the middle of a tuning: ended in {seconds:.1f} s, exit code {code}")
        expect(seconds < STOP_SECONDS and code == "0", f"not in {STOP_SECONDS:g} s, or not with 0")
        container.start()
        wait_until(lambda: container.job().get("result") is not None, "the tuning's end")
    print(f"started again, it ended the tuning: {container.job()['result']['summary']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", type=shlex.split, default=["docker"])
    parser.add_argument("--build", type=shlex.split, help="command  [default: ENGINE build]")
    parser.add_argument("--base", help="image to build on  [default: the Dockerfile's]")
    parser.add_argument("--run-options", type=shlex.split, default=[], help="further ones of run")
    arguments = parser.parse_args()
    build = arguments.build or [*arguments.engine, "build"]
    base = ["--build-arg", f"BASE={arguments.base}"] if arguments.base else []
    subprocess.run([*build, *base, "--tag", IMAGE, str(ROOT)], check=True)
    size = size_bytes(arguments.engine, IMAGE)
    print(f"the image has {size / 1e6:.0f} MB", flush=True)
    if arguments.base:
        beyond = size - size_bytes(arguments.engine, arguments.base)
        print(f"of these {beyond / 1e6:.0f} MB beyond its base", flush=True)
        expect(beyond < LARGEST_BYTES, f"that should be less than {LARGEST_BYTES / 1e6:g} MB")
    with Container(arguments.engine, arguments.run_options) as container:
        check(container)


if __name__ == "__main__":
    main()
