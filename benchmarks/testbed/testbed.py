"""Several hosts on this machine, and the jobs and services that run on them."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import PIPE
from types import TracebackType
from urllib.parse import urlsplit

from .host import Host, dealt_gpus, first_gpus, gpu_variables
from .job import Job, ProcessError, end, read_line
from .network import INTERFACE, Network, add_namespaces, bridge, bring_up, delayed
from .records import Record, clean
from .tools import ToolError, before_others

SERVICE = "service"
SWITCH = "switch"
SUBNET = "10.77.0"
MOST_NODES = 200


class Testbed:
    """Hosts, each in a network namespace, and one more for the service; a context manager.

    It needs iproute2, and root or the namespaces of ``rootless.enter``; for a delay a C compiler
    and ``/dev/net/tun``, too. Otherwise everything runs on this machine's loopback, unshaped, and
    ``fallback`` says why.

    Args:
        ordinary_priority: ranks and switch wait like any process; for ranks that compute much,
            which would leave the rest of the machine no time.
        gpus: every rank has a GPU, and NCCL takes the link between the hosts. Such ranks wait like
            any process, too. True: this machine's first ones; else their numbers, rank by rank, of
            which hosts may share one.

    Attributes:
        network: of every host, the service's too.
        hosts: the nodes of a job.
        service_host: where ``serve`` starts the service.
        fallback: why it is loopback, in a sentence; None if the hosts are real.
        folder: for temporary files; gone with the testbed.
    """

    __test__ = False  # its name makes pytest take it for a test

    def __init__(
        self,
        network: Network,
        nodes: int = 2,
        ranks_per_node: int = 2,
        ordinary_priority: bool = False,
        gpus: bool | Sequence[str] = False,
    ) -> None:
        if not 1 <= nodes <= MOST_NODES or ranks_per_node < 1:
            raise ValueError(
                f"1 to {MOST_NODES} nodes with at least one rank each, not {nodes} "
                f"with {ranks_per_node}"
            )
        self.network = network
        self.nodes = nodes
        self.ranks_per_node = ranks_per_node
        # On a single host there is no link that they could go past.
        numbers = first_gpus(nodes * ranks_per_node) if gpus is True else gpus or []
        self._gpus = dealt_gpus(numbers, nodes, ranks_per_node) if gpus and nodes > 1 else []
        self._priority = () if ordinary_priority or gpus else before_others()
        self.fallback: str | None = None
        self._services: list[subprocess.Popen[bytes]] = []
        self._jobs: list[Job] = []

    def __enter__(self) -> Testbed:
        with contextlib.suppress(ToolError):  # what another run left does not hinder this one
            clean()
        names = [*(f"host{node}" for node in range(self.nodes)), SERVICE]
        self._record = Record.create(str(self.network), [*names, SWITCH])
        self.folder = Path(self._record.folder)
        try:
            self._build(names)
        except ToolError as error:
            self._remove()
            self.fallback = f"loopback instead of hosts with a network of their own: {error}"
            self._record = Record.create("loopback", [])
            self.folder = Path(self._record.folder)
            self._place(names, "lo", [None] * len(names))
        except BaseException:
            self._remove()
            raise
        return self

    def __str__(self) -> str:
        what = self.fallback or f"{self.network} (run {self._record.run})"
        return f"{self.nodes} hosts x {self.ranks_per_node} ranks, {what}"

    def _build(self, names: Sequence[str]) -> None:
        if os.geteuid() != 0:
            raise ToolError("this kernel lets only root make network namespaces")
        *namespaces, switch = self._record.namespaces
        hosts = self._place(names, INTERFACE, namespaces)
        add_namespaces([*namespaces, switch])
        if self.network.round_trip_seconds:
            place = Host(SWITCH, "", "", switch, self._record.mark, self._priority)
            delay = self.network.round_trip_seconds
            self._services.append(delayed(hosts, place, delay, self.folder))
        else:
            bridge(hosts, switch)
        bring_up(hosts, self.network)

    def _place(
        self, names: Sequence[str], interface: str, namespaces: Sequence[str | None]
    ) -> list[Host]:
        """All hosts, the service's last; nothing is made yet."""
        hosts = []
        for number, (name, namespace) in enumerate(zip(names, namespaces, strict=True)):
            variables = self._variables(interface)
            if number < len(self._gpus):
                identity = f"{self._record.run}-{name}"
                variables |= gpu_variables(identity, self._gpus[number])
            if namespace is None:
                address = "127.0.0.1"
            else:
                address = f"{SUBNET}.{number + 1}"
                variables |= {"no_proxy": "*", "NO_PROXY": "*"}
            hosts.append(Host(name, address, interface, namespace, variables, self._priority))
        *self.hosts, self.service_host = hosts
        return hosts

    def _variables(self, interface: str) -> dict[str, str]:
        return {
            **self._record.mark,
            # It would warn that the hosts' addresses have no names.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
            "GLOO_SOCKET_IFNAME": interface,
            "NCCL_SOCKET_IFNAME": interface,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.folder),
        }

    def start(
        self,
        script: Sequence[str],
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> Job:
        """Start torchrun on every host; see ``Job``. It is ended with the testbed."""
        job = Job(self.hosts, self.ranks_per_node, script, environment or {}, log)
        self._jobs.append(job)
        return job

    def serve(self, database: Path, token: str, log: Path | None = None) -> str:
        """Start the service on its host; returns its address, as the hosts reach it.

        Args:
            log: what it says is added here; None: its warnings are printed.

        Raises:
            RuntimeError: it ended before it listened, or did not listen within 30 s.
        """
        command = [sys.executable, "-m", "bagua_autotune", "serve", "--port", "0"]
        command += ["--host", self.service_host.address, "--database", f"sqlite:///{database}"]
        # Not in a hurry: on hosts of its own it would not take the ranks' time.
        with contextlib.ExitStack() as files:
            errors = None if log is None else files.enter_context(log.open("ab"))
            process = self.service_host.popen(
                [*command, "--log-level", "warning" if log is None else "info"],
                {"BAGUA_AUTOTUNE_TOKEN": token},
                stdout=PIPE,
                stderr=errors,
            )
        self._services.append(process)
        try:
            line = read_line(process)
        except ProcessError as error:
            # The log may lie in our own folder, which goes with us.
            said = "" if log is None else f":\n{log.read_text()}"
            raise RuntimeError(f"the service {error}, before it listened{said}") from None
        address = re.search(r"http://\S+", line)
        if address is None:
            raise RuntimeError(f"the service said {line!r} and no address")
        return address.group()

    def publish(self, url: str, listening: socket.socket) -> str:
        """Let a browser on this machine reach the service.

        Args:
            url: the service's address, as the hosts reach it.
            listening: see ``relay.listener``.

        Returns:
            Its address on this machine; without the token, which it wants.
        """
        there = urlsplit(url)
        words = [str(listening.fileno()), str(there.hostname), str(there.port)]
        command = [sys.executable, str(Path(__file__).with_name("relay.py")), *words]
        process = self.service_host.popen(command, pass_fds=[listening.fileno()])
        self._services.append(process)
        return "http://{}:{}".format(*listening.getsockname())

    def probe(self, seconds: float = 3.0) -> tuple[float, float]:
        """Measure the link between the first host and the last one, for so long.

        Returns:
            Round trip in seconds (median), and TCP's rate in bits per second.

        Raises:
            RuntimeError: one of the two did not reach the other, or lost it.
        """
        asking, answering = self.hosts[0], self.hosts[-1]
        address = answering.address
        try:
            answer = self._probe(answering, "answer", address)
            read_line(answer)
            ask = self._probe(asking, "ask", address, str(seconds))
            # They end by themselves when they hear nothing.
            return float(read_line(ask, None)), float(read_line(answer, None))
        except ProcessError as error:
            link = f"{asking.name} and {answering.name}"
            raise RuntimeError(f"the probe of the link between {link} {error}") from None

    def _probe(self, host: Host, *words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(Path(__file__).with_name("probe.py")), *words]
        process = host.popen(command, hurried=True, stdout=PIPE, stderr=PIPE)
        self._services.append(process)
        return process

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        try:
            for job in self._jobs:
                job.kill()
            end(self._services)
        finally:
            self._record.remove()
