"""The service that rank 0 starts beside itself, and that never outlives it.

Where a job's models train on different ranks, the first rank of each talks to a service. If the
user gave no address of one, the first of them on a host starts it, and the others on that host find
it in the store of the ranks' rendezvous. If it ends with the process that started it, another of
them starts it again. All of this runs in the reporters' threads, and no rank waits for ever for one
that is gone.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import json
import logging
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import urlsplit

from bagua_client.announcement import announce_end
from bagua_client.communication.topology import host_name
from bagua_client.torch_private import groups as torch_groups

logger = logging.getLogger(__name__)

START_SECONDS = 120.0
"""A service that does not listen by then is ended; perhaps its disk hangs."""


class SidecarError(Exception):
    """The service cannot be started; another try would fail, too."""


class Sidecar:
    """A service that this process starts.

    It watches its parent's process id, so it ends with the job even if the job is killed. Other
    programs of the machine can reach it, such as a browser that shows any page. So it needs a
    token, which only the job knows.

    Args:
        port: 0: any free port.
        token: None: a random one is made.

    Attributes:
        token: the service's.
        page_token: the token for the printed address: the random one, which is useless once the
            job has ended; empty if the user gave a token.
        endings: how each service ended that was started again, in words.
        shown: the jobs whose page the user was told of, by name.
    """

    def __init__(self, port: int = 0, token: str | None = None) -> None:
        self._port = port
        self.page_token = "" if token else secrets.token_urlsafe()
        self.token = token or self.page_token
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._url = ""
        self.endings: list[str] = []
        self.shown: list[str] = []
        self._owner = os.getpid()
        self._stopped = False
        atexit.register(self.stop)

    def url(self) -> str:
        """Return the service's address; starts it if it does not run.

        Raises:
            SidecarError: it is not installed, ended before it listened, or was stopped.
        """
        with self._lock:
            if self._stopped:
                raise SidecarError("the job is over")
            if self._process is None:
                self._start()
            elif (status := self._process.poll()) is not None:
                if self._process.stdout is not None:
                    self._process.stdout.close()
                self._start()
                self.endings.append(
                    f"ended with exit code {status}"
                    if status >= 0
                    else f"was killed by signal {-status}"
                )
            return self._url

    @property
    def is_running(self) -> bool:
        """Whether this process started it, and it has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def is_stopped(self) -> bool:
        """Whether there will be none any more."""
        return self._stopped

    def stop(self) -> None:
        """End the service, if this process itself and not its parent started it, and say how to
        see its jobs again: the addresses of their pages end with it."""
        if os.getpid() == self._owner:
            self._stopped = True
            announce_end(logger, self.shown)
            self.shown.clear()
            if self._process is not None:
                self._process.terminate()

    def _start(self) -> None:
        if importlib.util.find_spec("bagua_autotune") is None or not importlib.util.find_spec(
            "flask"
        ):
            raise SidecarError(
                "the service is not installed here: pip install '.[service]' in a clone, or "
                "set BAGUA_AUTOTUNE_URL to one that runs elsewhere"
            )
        command = [sys.executable, "-m", "bagua_autotune", "serve", "--host", "127.0.0.1"]
        command += ["--port", str(self._port), "--parent-pid", str(os.getpid())]
        # The reporter logs what the service would say of the job.
        command += ["--log-level", "warning"]
        # A session of its own: Ctrl-C reaches the training only, and the service ends with that.
        try:
            self._process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stdin=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
                # Not as an argument: every user of the machine can read those. No other token is
                # accepted.
                env={
                    **os.environ,
                    "BAGUA_AUTOTUNE_TOKEN": self.token,
                    "BAGUA_AUTOTUNE_PREVIOUS_TOKEN": "",
                },
            )
        except OSError as error:
            raise SidecarError(f"the service could not be started: {error}") from error
        if self._stopped:  # Meanwhile, so that nobody has ended it.
            self._process.terminate()
        line = _first_line(self._process)
        address = re.search(r"http://\S+", line)
        if address is None:
            raise SidecarError(
                f"the service ended with exit code {self._process.wait()} before it listened; "
                f"its own message is above. Try it by hand: python {' '.join(command[1:4])}"
            )
        self._url = address.group()


def _first_line(process: subprocess.Popen[str]) -> str:
    """The line that says it listens; empty: it ended, or took too long and was ended."""
    assert process.stdout is not None
    watchdog = threading.Timer(START_SECONDS, process.kill)
    watchdog.daemon = True
    watchdog.start()
    try:
        return process.stdout.readline()
    finally:
        watchdog.cancel()


POLL_SECONDS = 0.1
CONNECT_SECONDS = 5.0


class _Entry(NamedTuple):
    """What the store says of a host's service.

    Attributes:
        process: who started it, or is about to.
        url: empty while it is being started.
        page_token: as a Sidecar's. Who can read the store can disturb the training itself.
    """

    process: str
    url: str
    page_token: str


class JobService(Sidecar):
    """The service of all models of the job that have their first rank on this host.

    Takes the arguments, and has the attributes, of :class:`Sidecar`, of which it is one if no other
    process was faster.
    """

    def __init__(self, port: int = 0, token: str | None = None) -> None:
        super().__init__(port, token)
        self._name = uuid.uuid4().hex
        self._key = f"bagua/service/{_host()}"

    def url(self) -> str:
        """Return the service's address; starts it if it does not run, or waits while another
        process does so.

        Raises:
            SidecarError: see Sidecar.
        """
        store = torch_groups.store()
        try:
            if store is not None and not self.is_running and (found := self._others(store)):
                return found
        except RuntimeError as error:
            logger.info("autotune: the ranks' store cannot be read (%s)", error)
            store = None
        url = ""
        try:
            url = super().url()
        finally:
            if store is not None and not self.is_stopped:  # The interpreter ends.
                self._publish(store, url)
        return url

    def _others(self, store: torch_groups.Store) -> str:
        """The address of another process's service; empty: this one's is to be used, and others
        wait for it."""
        seen, since = "", time.monotonic()
        while not self.is_stopped:
            text = store.get(self._key).decode() if store.check([self._key]) else ""
            if text != seen:
                seen, since = text, time.monotonic()
            entry = _Entry(*json.loads(text or '["", "", ""]'))
            is_others = entry.process not in ("", self._name)
            if is_others and entry.url and _listens(entry.url):
                self._adopt(entry)
                return entry.url
            if is_others and not entry.url and time.monotonic() - since < START_SECONDS:
                time.sleep(POLL_SECONDS)
                continue
            claim = json.dumps(_Entry(self._name, "", ""))
            if store.compare_set(self._key, text, claim).decode() == claim:
                if is_others:
                    self._adopt(entry)  # The addresses of its pages keep their token.
                    self.endings.append("ended with its process")
                break
        return ""

    def _adopt(self, entry: _Entry) -> None:
        if entry.page_token:
            self.token = self.page_token = entry.page_token

    def _publish(self, store: torch_groups.Store, url: str) -> None:
        """Publish the address to the other ranks. Without an address they start one themselves."""
        entry = json.dumps(_Entry(self._name, url, self.page_token) if url else ("", "", ""))
        with suppress(RuntimeError):  # The store ends with the job.
            if not store.check([self._key]) or store.get(self._key).decode() != entry:
                store.set(self._key, entry)


def _listens(url: str) -> bool:
    """Whether anything does there. It is on this host, so that this takes no time."""
    place = urlsplit(url)
    try:
        socket.create_connection((place.hostname, place.port or 80), CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def _host() -> str:
    """The name of the processes that reach one another on 127.0.0.1."""
    network = ""
    with suppress(OSError):
        network = os.readlink("/proc/self/ns/net")
    return hashlib.sha256(f"{host_name()} {network}".encode()).hexdigest()[:16]


_service: JobService | None = None
_lock = threading.Lock()


def job_service(port: int, token: str | None = None) -> JobService:
    """The service as this process finds it; see JobService."""
    global _service
    with _lock:
        if _service is None:
            _service = JobService(port, token)
        return _service


def _forget() -> None:
    """Forget service and lock in a forked child: they belong to the parent."""
    global _service, _lock
    _service, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
