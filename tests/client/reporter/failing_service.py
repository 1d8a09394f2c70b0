"""A scripted service that fails from a certain request on, in one of the ways in which services do,
until the test lets it come back."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from tests.client.agent.scripted_service import Configuration, ScriptedService

WAYS = ("killed", "hangs", "server error")
"""What else may be answered in its place is in tests/client/service/test_client.py."""


class FailingService(ScriptedService):
    """See ScriptedService.

    Args:
        way: of WAYS.
        begins: whether the failure begins with the request of this kind, with this body, which is
            the first that is not answered.

    Attributes:
        fails: is set while it does.
    """

    def __init__(
        self,
        rounds: Sequence[Sequence[Configuration]],
        way: str,
        begins: Callable[[str, Any], bool],
        **more: Any,
    ) -> None:
        self.way, self._begins = way, begins
        self.fails, self._is_back = threading.Event(), threading.Event()
        self._refuser: socket.socket | None = None
        super().__init__(rounds, **more)

    def take(self, kind: str, job: str, body: Any) -> tuple[int, Any]:
        if not self._is_back.is_set() and (self.fails.is_set() or self._begins(kind, body)):
            self.fails.set()
            if self.way != "hangs":
                return (500, b"Traceback") if self.way == "server error" else (0, b"")
            self._is_back.wait(60)
        return super().take(kind, job, body)

    def stop_listening(self) -> None:
        """Where it is killed: from now on connections are refused."""
        if self.way != "killed":
            return
        self._refuser = socket.socket()
        self._refuser.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._refuser.bind(self._server.server_address)
        super().__exit__(None, None, None)

    def come_back(self, *, forgets: bool) -> None:
        """From now on it answers.

        Args:
            forgets: with an empty database.
        """
        if forgets:
            self.forget()
        self._is_back.set()
        if self._refuser is not None:
            self._server = self.listen(self._refuser.getsockname()[1])
            self._refuser.close()
            self.__enter__()
