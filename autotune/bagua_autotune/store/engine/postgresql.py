"""PostgreSQL's engine: how connections are made, and how long they wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from sqlalchemy import URL, Engine, create_engine, event
from sqlalchemy import text as sql_text

from bagua_autotune.store.errors import NoAnswer

# Fewer than the threads that answer requests: some stay free while all of these wait.
CONNECTIONS = 12
CONNECTION_WAIT_SECONDS = 2.0
# Longer than the server lets a statement take, so that its own error message comes first.
ANSWER_SECONDS = 10.0
SERVER_LIMITS_SECONDS = {
    "statement_timeout": 8.0,
    "lock_timeout": 5.0,
    # Frees what a hanging replica has locked.
    "idle_in_transaction_session_timeout": 30.0,
}
# After a server gave no answer.
RETRY_SECONDS = 2.0
# How many bytes the database takes.
SIZE = sql_text("SELECT pg_database_size(current_database())")


class Circuit:
    """After a failure lets one request in RETRY_SECONDS through until one is answered, and refuses
    the others at once: they must not all wait for a server that does not answer.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._next_try: float | None = None

    def enter(self) -> None:
        """Raise NoAnswer unless the server may be asked now."""
        with self._lock:
            if self._next_try is None:
                return
            now = self._clock()
            if now < self._next_try:
                raise NoAnswer("the database gave no answer a moment ago")
            self._next_try = now + RETRY_SECONDS

    def answered(self) -> None:
        """The server answered."""
        self._next_try = None

    def failed(self) -> None:
        """The server could not be reached, or did not answer in time."""
        with self._lock:
            self._next_try = self._clock() + RETRY_SECONDS


def open_engine(url: URL) -> Engine:
    """The engine of a server, with the time limits above.

    Raises ImportError if the URL's driver is missing, ArgumentError if SQLAlchemy knows none.
    """
    is_pg8000 = url.get_driver_name() == "pg8000"
    engine = create_engine(
        url,
        pool_size=CONNECTIONS,
        max_overflow=0,
        pool_timeout=CONNECTION_WAIT_SECONDS,
        # A hanging server closes no connection: only the socket's time limit ends the wait.
        connect_args={"timeout": ANSWER_SECONDS} if is_pg8000 else {},
    )
    if is_pg8000:
        connect = _pg8000_connect()
        event.listen(engine, "do_connect", lambda _d, _r, _args, options: connect(**options))

    @event.listens_for(engine, "connect")
    def _connected(connection: Any, _record: Any) -> None:
        connection.rollback()
        connection.autocommit = True  # the driver begins no transaction by itself
        limits = SERVER_LIMITS_SECONDS if engine.dialect.name == "postgresql" else {}
        for name, seconds in limits.items():
            connection.cursor().execute(f"SET {name} = {round(seconds * 1e3)}")

    return engine


def run_pg8000(lent: Any, text: str, given: Mapping[str, Any], is_kept: bool) -> Sequence[Any]:
    """pg8000's rows of a statement; one that is kept is prepared once on each connection."""
    connection = lent.dbapi_connection
    if not (is_kept and given):
        cursor = connection.cursor()
        cursor.paramstyle = "named"
        cursor.execute(text, given)
        return cursor.fetchall() if cursor.description else ()
    prepared = lent.info.setdefault("prepared", {})
    if text not in prepared:
        prepared[text] = connection.prepare(text)
    found: Sequence[Any] = prepared[text].run(**given)
    # The driver would keep these rows until the connection runs the statement again.
    prepared[text]._context = None
    return found


def _pg8000_connect() -> Callable[..., Any]:
    """pg8000's connect, which here raises pg8000's error also when a read takes too long."""
    import pg8000.legacy as pg8000

    class Connection(pg8000.Connection):  # type: ignore[misc]  # it has no types
        def handle_messages(self, context: Any) -> None:
            with _told():
                super().handle_messages(context)

        def close(self) -> None:
            with suppress(pg8000.InterfaceError):  # the server is gone
                super().close()

    @contextmanager
    def _told() -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise pg8000.InterfaceError("network error") from error

    return _told()(Connection)
