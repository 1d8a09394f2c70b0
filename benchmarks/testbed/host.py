"""One host: a network namespace with a link of its own, or this machine's loopback."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .tools import dies_with_parent, path_of


@dataclass(frozen=True)
class Host:
    """Where processes are started.

    Attributes:
        address: at which the other hosts reach it.
        interface: the name of its link.
        namespace: None if it is this machine itself.
        environment: what its processes get beside this process's variables.
        priority: what precedes a command that is in a hurry; empty: it has to wait like others.
    """

    name: str
    address: str
    interface: str
    namespace: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    priority: Sequence[str] = ()

    def popen(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        hurried: bool = False,
        **popen_arguments: Any,
    ) -> subprocess.Popen[bytes]:
        """Start ``command`` there; it is killed when the calling thread is gone, however.

        Args:
            environment: variables beside this process's.
            hurried: at the host's ``priority``.
        """
        prefix = [*dies_with_parent()]
        if self.namespace is not None:
            prefix += [path_of("ip"), "netns", "exec", self.namespace]
        if hurried:
            prefix += self.priority
        variables = {**os.environ, **self.environment, **(environment or {})}
        # A session of its own: Ctrl-C goes to us, and we end what we started.
        arguments = {"start_new_session": True, "stdin": subprocess.DEVNULL, **popen_arguments}
        return subprocess.Popen([*prefix, *command], env=variables, **arguments)
