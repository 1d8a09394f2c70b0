"""The service that rank 0 starts beside itself, and that never outlives it."""

from __future__ import annotations

import atexit
import importlib.util
import logging
import os
import re
import secrets
import subprocess
import sys
import threading

from bagua_client.announcement import announce_end

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
