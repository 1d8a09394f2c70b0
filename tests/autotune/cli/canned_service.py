"""A service that answers what a test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

UNKNOWN = {"detail": "The requested URL was not found on the server."}


class CannedService:
    """Context manager; answers any request below ``/api/v2`` whose path it knows, others with 404.

    Args:
        answers: by path; JSON, or the bytes that are sent. May be changed at any time.
        cut_off: say that each answer is longer than it is, and end the connection.
    """

    def __init__(self, answers: Mapping[str, Any], cut_off: bool = False) -> None:
        self.answers = dict(answers)
        self.cut_off = cut_off
        self.asked: list[str] = []
        """Paths."""
        handler = type("Handler", (_Handler,), {"service": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> CannedService:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    service: CannedService

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].removeprefix("/api/v2")
        self.service.asked.append(path)
        answer = self.service.answers.get(path, UNKNOWN)
        text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(404 if answer is UNKNOWN else 200)
        self.send_header("Content-Length", str(len(text) + 1000 * self.service.cut_off))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass
