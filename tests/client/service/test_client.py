"""What the client makes of whatever may answer in the service's place."""

from __future__ import annotations

import contextlib
import math
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_client.service import client
from bagua_client.service.client import (
    JobState,
    JobUnknown,
    NotSupported,
    ServiceClient,
    ServiceDenied,
    ServiceRefused,
    ServiceUnavailable,
    Transport,
)

Talk = Callable[[socket.socket], None]


@contextmanager
def listening(talk: Talk, greets: bool = True) -> Iterator[tuple[str, list[bytes]]]:
    """A server that reads what comes first, if that is text, and then talks; its address, and what
    came."""
    came: list[bytes] = []

    def serve() -> None:
        while True:
            connection, _ = server.accept()
            with suppress(OSError), connection:
                if greets:
                    came.append(connection.recv(65536))
                talk(connection)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=lambda: _until_closed(serve), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", came
        server.shutdown(socket.SHUT_RDWR)
        thread.join(60)


def _until_closed(serve: Callable[[], None]) -> None:
    with suppress(OSError):
        serve()


def saying(status: str, body: bytes = b"{}", *headers: str) -> Talk:
    head = "\r\n".join(
        [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    )
    return lambda connection: connection.sendall(f"{head}\r\n\r\n".encode() + body)


def endlessly(head: bytes, piece: bytes) -> Talk:
    def talk(connection: socket.socket) -> None:
        connection.sendall(head)
        while True:
            connection.sendall(piece)
            time.sleep(0.01)

    return talk


def error_of(talk: Talk, token: str | None = None) -> Exception:
    with listening(talk) as (url, _), pytest.raises(Exception) as found:
        Transport(token).send("POST", f"{url}/path", {})
    return found.value


def test_a_document_is_what_it_was() -> None:
    with listening(saying("200 OK", b'{"a": [1]}')) as (url, _):
        assert Transport(None).send("GET", url, None) == {"a": [1]}


@pytest.mark.parametrize(
    ("talk", "kind", "says"),
    [
        (saying("503 Busy"), ServiceUnavailable, "answered 503"),
        (saying("500 Oops", b"Traceback"), ServiceUnavailable, "answered 500"),
        (saying("401 No", b'{"detail": "wrong"}'), ServiceDenied, "wrong.*BAGUA_AUTOTUNE_TOKEN"),
        (saying("403 No", b'{"detail": "not this host"}'), ServiceDenied, "not this host"),
        (saying("404 None"), JobUnknown, "404"),
        (saying("405 No"), NotSupported, "405"),
        (saying("422 Bad", b'{"detail": "step"}'), ServiceRefused, "step"),
        (saying("200 OK", b"\n<html>log in"), ServiceUnavailable, "a web page"),
        (saying("200 OK", b"\x00\xff"), ServiceUnavailable, "not JSON"),
        (saying("200 OK", b"[" * 10**5), ServiceUnavailable, "not JSON"),
        (lambda _: None, ServiceUnavailable, "broke off"),
        (lambda c: c.sendall(b"\x00\xff\r\n"), ServiceUnavailable, "broke off"),
        (
            lambda c: c.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\n{"),
            ServiceUnavailable,
            "broke off",
        ),
    ],
)
def test_each_answer_has_its_error(talk: Talk, kind: type[Exception], says: str) -> None:
    with listening(talk) as (url, _), pytest.raises(kind, match=says) as found:
        Transport("token").send("POST", url, {})
    assert type(found.value) is kind


@pytest.mark.parametrize(
    "talk",
    [
        endlessly(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        endlessly(b"HTTP/1.1 200 OK\r\nContent-Length: 999999\r\n\r\n", b" "),
        endlessly(b"HTTP/1.0 200 OK\r\n\r\n", b" "),
        endlessly(b"HTTP/1.1 200 OK\r\nName: ", b"x"),
        endlessly(b"HTTP/1.0 200 OK\r\n\r\n", b" " * 2**20),
    ],
    ids=["chunks", "length", "until closed", "headers", "large"],
)
def test_an_answer_that_never_ends_is_none(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "WHOLE_SECONDS", 0.3)
    assert isinstance(error_of(talk), ServiceUnavailable)


@pytest.mark.parametrize(
    ("header", "least", "most"),
    [
        ("7", 7, 7),
        ("0", 0, 0),
        ("-5", 0, 0),
        ("soon", 0, 0),
        ("9" * 400, 0, client.MOST_RETRY_AFTER_SECONDS),
        ("86400", client.MOST_RETRY_AFTER_SECONDS, client.MOST_RETRY_AFTER_SECONDS),
        (formatdate(time.time() + 10**6, usegmt=True), 300, 300),
        (formatdate(time.time() - 60, usegmt=True), 0, 0),
    ],
    # By value the dates would differ between the processes that collect the tests.
    ids=["seconds", "none", "negative", "a word", "digits", "a day", "a date", "a date gone by"],
)
def test_a_service_says_when_to_come_again(header: str, least: float, most: float) -> None:
    error = error_of(saying("429 Slowly", b"{}", f"Retry-After: {header}"))
    assert isinstance(error, ServiceUnavailable)
    assert least <= error.retry_after_seconds <= most


def test_no_redirect_is_followed() -> None:
    """Its answer would look as if the report had been taken."""
    with listening(saying("200 OK")) as (target, came):
        error = error_of(saying("302 Found", b"", f"Location: {target}/login"))
        assert isinstance(error, ServiceDenied)
        assert f"{target}/login" in str(error)
        assert "BAGUA_AUTOTUNE_URL" in str(error)
        assert came == []


def test_without_a_token_it_says_that_one_is_wanted() -> None:
    error = error_of(saying("401 No"))
    assert "it needs a token" in str(error)
    assert "does not accept this token" in str(error_of(saying("401 No"), "another"))


@pytest.mark.parametrize(
    ("url", "token", "kind", "says"),
    [
        ("http://127.0.0.1:1", None, ServiceUnavailable, "nothing listens"),
        ("http://nowhere.invalid", None, ServiceUnavailable, "no host with that name"),
        ("127.0.0.1:8123", None, ServiceRefused, "like http://host:8123"),
        ("http://host:99999999", None, ServiceRefused, "like http://host:8123"),
        (f"http://{'a' * 70}.example", None, ServiceRefused, "like http://host:8123"),
        ("http://127.0.0.1:1", "t\u00f6\u20ac", ServiceRefused, "BAGUA_AUTOTUNE_TOKEN"),
        ("http://127.0.0.1:1", "a\nb", ServiceRefused, "BAGUA_AUTOTUNE_TOKEN"),
    ],
)
def test_a_setting_that_is_wrong_is_named(
    url: str, token: str | None, kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        Transport(token).send("GET", url, None)


def test_https_where_http_is_spoken_is_said() -> None:
    with listening(saying("400 Bad")) as (url, _), pytest.raises(ServiceDenied, match="http://"):
        Transport(None).send("GET", url.replace("http:", "https:"), None)


def certificate(folder: Path) -> Path:
    """One for 127.0.0.1 that nobody but itself vouches for, with its key."""
    path = folder / "service.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=service -keyout -"
    made = subprocess.run(
        [*command.split(), "-addext", "subjectAltName=IP:127.0.0.1"],
        capture_output=True,
        check=True,
    )
    path.write_bytes(made.stdout)
    return path


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_a_certificate_of_ones_own_is_trusted_if_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)

    def talk(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secured:
            secured.recv(65536)
            saying("200 OK")(secured)

    with listening(talk, greets=False) as (plain, _):
        url = plain.replace("http://", "https://")
        with pytest.raises(ServiceDenied, match="REQUESTS_CA_BUNDLE"):
            Transport(None).send("GET", url, None)
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(file))
        assert Transport(None).send("GET", url, None) == {}


STATE: dict[str, Any] = {
    "trial": {"index": 3, "purpose": "search", "state": "proposed", "configuration": {}},
    "configuration": {"bucket_bytes": 1024, "hierarchical": "off"},
    "progress": {"trials_measured": 3, "max_trials": 60, "speedup": 1.25},
    "result": None,
    "deciding": False,
    "round": 0,
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def test_a_jobs_state_is_read() -> None:
    state = JobState.from_json(STATE)
    assert (state.trial, state.speedup, state.summary) == (3, 1.25, None)
    assert not state.deciding
    assert JobState.from_json({**STATE, "deciding": True}).deciding
    assert state.configuration == {"bucket_bytes": 1024, "hierarchical": "off"}


def test_numbers_that_are_lacking_or_no_numbers_are_not_known() -> None:
    result = {"summary": "earlier", "low": None, "high": math.inf, "trials": 3}
    state = JobState.from_json({**STATE, "trial": None, "result": result})
    assert (state.result, state.summary) == ({"trials": 3}, "earlier")
    progress = {**STATE["progress"], "speedup": math.inf}  # no line of JSON could say it
    assert JobState.from_json({**STATE, "progress": progress}).speedup is None


@pytest.mark.parametrize(
    ("parts", "deciding"),
    [
        ({"state": "tuning"}, True),
        ({"state": "confirming"}, True),
        ({"state": "finished"}, False),
        ({"state": "ended"}, False),
        ({}, False),
    ],
)
def test_no_trial_ends_the_tuning_but_not_between_two(
    parts: dict[str, str], deciding: bool
) -> None:
    assert JobState.from_json({**STATE, "trial": None, **parts}).deciding is deciding


@given(JSON)
def test_any_other_document_is_no_answer(document: Any) -> None:
    with pytest.raises(ServiceUnavailable):
        JobState.from_json(document)


@given(st.sampled_from(sorted(STATE)), JSON)
def test_a_state_with_a_broken_part_is_no_answer_or_a_state(part: str, broken: Any) -> None:
    with contextlib.suppress(ServiceUnavailable):
        JobState.from_json({**STATE, part: broken})


def test_an_address_may_end_with_a_slash() -> None:
    assert ServiceClient("http://127.0.0.1:1/", "job").url == "http://127.0.0.1:1"
