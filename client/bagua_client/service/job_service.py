"""The one service of a job whose models train on different ranks.

The first rank of each model talks to a service. If the user gave no address of one, the first of
them on a host starts it, and the others on that host find it in the store of the ranks' rendezvous.
If it ends with the process that started it, another of them starts it again. All of this runs in
the reporters' threads, and no rank waits for ever for one that is gone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import urlsplit

from bagua_client.communication.topology import host_name
from bagua_client.service.sidecar import START_SECONDS, Sidecar
from bagua_client.torch_private import groups as torch_groups

logger = logging.getLogger(__name__)

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
