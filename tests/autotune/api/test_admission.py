"""Who may ask: hosts, pages of other sites, content types; tokens are in test_service. And what is
told of requests with a wrong token: few lines, with addresses and counts, and a metric."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from flask.testing import FlaskClient

from bagua_autotune.api.admission import MOST_ADDRESSES, MOST_NAMED, Refusals
from bagua_autotune.app import create_app
from bagua_autotune.settings import Settings
from bagua_autotune.store import Store
from tests.autotune.api.driving import assert_problem, of, scrape
from tests.autotune.support import registration

PATHS = ("/", "/healthz", "/metrics", "/api/v2/jobs", "/api/v1/health_check")
ENDED = {"kind": "ended"}


@contextmanager
def client_of(**given: str) -> Iterator[FlaskClient]:
    """A service with these variables of the environment, and a host to listen on."""
    store = Store("sqlite://")
    host = given.pop("host", None)
    settings = Settings.load(given, host=host, database="sqlite://")
    yield create_app(settings, store).test_client()
    store.close()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example:8123", "127.0.0.1.nip", ""]
)
def test_a_name_that_was_made_to_point_here_is_refused(path: str, host: str) -> None:
    with client_of() as client:
        response = client.get(path, headers={"Host": host})
    assert_problem(response, 403, "--allowed-host")


@pytest.mark.parametrize(
    "host",
    [
        "localhost:8123",
        "127.0.0.1",
        "[::1]:8123",
        "10.1.2.3:8123",
        "page.localhost",
        "LocalHost.",
        f"{socket.gethostname()}:8123",
    ],
)
def test_addresses_and_this_machine_s_names_are_its_own(host: str) -> None:
    """An address cannot be made to point elsewhere; Kubernetes asks a pod by its own."""
    with client_of() as client:
        assert client.get("/api/v2/jobs", headers={"Host": host}).status_code == 200


def test_a_reverse_proxy_s_name_can_be_allowed() -> None:
    names = "tuning.example.org, other.example.org:443"
    with client_of(BAGUA_AUTOTUNE_ALLOWED_HOSTS=names) as client:
        for host, status in (
            ("tuning.example.org:8080", 200),
            ("other.example.org", 200),
            ("example.org", 403),
        ):
            assert client.get("/api/v2/jobs", headers={"Host": host}).status_code == status
    with pytest.raises(ValueError, match="not the name of a host"):
        Settings.load({"BAGUA_AUTOTUNE_ALLOWED_HOSTS": "https://tuning.example.org"})


def test_on_a_network_names_without_dots_are_those_of_containers() -> None:
    with client_of(host="0.0.0.0") as client:
        assert client.get("/metrics", headers={"Host": "autotune:8123"}).status_code == 200
        assert client.get("/metrics", headers={"Host": "evil.example"}).status_code == 403


def test_on_a_network_a_token_guards_under_any_name() -> None:
    with client_of(host="0.0.0.0", BAGUA_AUTOTUNE_TOKEN="open") as client:
        named = {"Host": "bagua-autotune.training.svc:8123"}
        assert client.get("/metrics", headers=named).status_code == 200
        assert client.get("/api/v2/jobs", headers=named).status_code == 401
        shown = {**named, "Authorization": "Bearer open"}
        assert client.get("/api/v2/jobs", headers=shown).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},  # another port of this machine
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
        {"Origin": "http://evil.example"},
        {"Origin": "http://localhost:3000"},
        {"Origin": "null"},
        {"Origin": "http://["},
    ],
)
def test_a_page_of_another_site_is_refused(client: FlaskClient, headers: dict[str, str]) -> None:
    client.put("/api/v2/jobs/job", json=registration())
    for path in PATHS:
        assert client.get(path, headers=headers).status_code == 403
    ended = client.post("/api/v2/jobs/job/events", json=ENDED, headers=headers)
    assert ended.status_code == 403
    assert client.get("/api/v2/jobs/job").get_json()["state"] == "tuning"


def test_a_link_from_another_site_may_be_followed(client: FlaskClient) -> None:
    followed = {
        "Sec-Fetch-Site": "cross-site",
        "Sec-Fetch-Mode": "navigate",
        "Sec-Fetch-Dest": "document",
    }
    assert client.get("/jobs/job", headers=followed).status_code == 200
    client.put("/api/v2/jobs/job", json=registration())
    posted = client.post("/api/v2/jobs/job/events", json=ENDED, headers=followed)
    assert posted.status_code == 403


@pytest.mark.parametrize("site", ["same-origin", "none"])
def test_the_service_s_own_page_may_ask(client: FlaskClient, site: str) -> None:
    assert client.get("/api/v2/jobs", headers={"Sec-Fetch-Site": site}).status_code == 200
    own = {"Origin": "http://localhost"}
    assert client.get("/api/v2/jobs", headers=own).status_code == 200


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", None])
def test_a_body_must_be_declared_as_json(client: FlaskClient, content_type: str | None) -> None:
    """A page sends other bodies to any site, and need not ask before."""
    client.put("/api/v2/jobs/job", json=registration())
    path = "/api/v2/jobs/job/events"
    response = client.post(path, data='{"kind": "ended"}', content_type=content_type)
    assert_problem(response, 415, "application/json")
    assert client.get("/api/v2/jobs/job").get_json()["state"] == "tuning"


TOLD = "refused requests without a token that this service takes: "


def test_many_refusals_are_one_line_and_a_metric(caplog: pytest.LogCaptureFixture) -> None:
    with client_of(BAGUA_AUTOTUNE_TOKEN="right") as guarded:
        assert of(scrape(guarded), "refused_tokens_total") == {(): 0}, "so that the first one shows"
        for _ in range(100):
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                assert guarded.get("/api/v2/jobs", headers=headers).status_code == 401
        allowed = {"Authorization": "Bearer right"}
        assert guarded.get("/api/v2/jobs", headers=allowed).status_code == 200
        lines = [record.message for record in caplog.records if "token" in record.message]
        assert lines == [TOLD + "1 from 127.0.0.1"]
        assert of(scrape(guarded), "refused_tokens_total") == {(): 200}


def test_after_a_while_a_line_says_how_many_there_were_and_from_where(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[threading.Timer] = []
    monkeypatch.setattr(threading.Timer, "start", lambda timer: waiting.append(timer))
    caplog.set_level(logging.WARNING)
    refusals = Refusals()

    def lines_after_a_while() -> list[str]:
        caplog.clear()
        (timer,) = waiting
        waiting.clear()
        timer.function()
        return [record.message for record in caplog.records]

    refusals.count("10.0.0.1")
    for _ in range(6400):
        refusals.count("10.0.0.1")
    refusals.count("10.0.0.2")
    assert lines_after_a_while() == [TOLD + "6400 from 10.0.0.1, 1 from 10.0.0.2"]
    for number in range(3 * MOST_ADDRESSES):
        refusals.count(f"10.0.{number // 256}.{number % 256}")
    (line,) = lines_after_a_while()
    assert f"{2 * MOST_ADDRESSES} from further addresses" in line
    assert line.endswith(f"{MOST_ADDRESSES - MOST_NAMED + 1} from others")
    assert lines_after_a_while() == []
    assert waiting == [], "no timer runs while nothing is refused"
    refusals.count("10.0.0.1")
    assert caplog.records[-1].message == TOLD + "1 from 10.0.0.1"
