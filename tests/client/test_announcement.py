"""Rank 0's lines: seen by who configured nothing, once by who did, and never where not wanted."""

from __future__ import annotations

import logging
import re
import socket
import subprocess
import sys

import pytest

from bagua_client.announcement import announce, announce_page
from tests.client.agent.scripted_service import ScriptedService

TRAINING = """
import json, logging, sys, time, zlib
from bagua_client.reporter.inbox import RankTimes, GatheredTimes
from bagua_client.reporter.reporter import Reporter
from bagua_client.environment import Environment

size = {"bucket_bytes": 512}
description = {"name": "digits", "world_size": 1, "default_configuration": size}
reporter = Reporter(Environment(url=sys.argv[1]), description)
trial, step = 0, 0
while trial is not None:
    if command := reporter.take_command():
        trial = json.loads(zlib.decompress(command))["trial"]
        reporter.put(GatheredTimes(trial, [RankTimes(step, [0.1])]))
        step += 1
    time.sleep(0.001)
reporter.finish()
"""


def _printed() -> list[str]:
    """By a process of its own in which a job is tuned in 21 trials, and its page."""
    trials = [{"bucket_bytes": size} for size in range(1, 22)]
    with ScriptedService([trials], steps=1) as service:
        command = [sys.executable, "-c", TRAINING, service.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == ""
    page, port = rf"{service.url}/jobs/[0-9a-f]{{32}}$", service.url.rpartition(":")[2]
    return re.sub(page, "PAGE", done.stderr, flags=re.M).replace(port, "PORT").split("\n")


TUNNEL = f"ssh -L PORT:127.0.0.1:PORT {socket.gethostname()}"
LINES = [
    "autotune: job digits is being tuned, see PAGE",
    f"autotune: to see it from another machine, run there first: {TUNNEL}",
    "autotune: trial 10 of at most 60, best so far 1.25x, not confirmed",
    "autotune: trial 20 of at most 60, best so far 1.25x, not confirmed",
    "autotune: the result",
]


@pytest.mark.slow
def test_a_user_who_configured_nothing_sees_the_start_every_tenth_trial_and_the_end() -> None:
    assert _printed() == [*LINES, ""]


@pytest.mark.parametrize(
    ("page", "tunnel"),
    [
        ("http://127.0.0.1:8123/jobs/x#token=y", "8123:127.0.0.1:8123"),
        ("http://[::1]:8123/jobs/x", "8123:[::1]:8123"),
        ("http://tuner:8123/jobs/x", None),
    ],
)
def test_the_way_from_another_machine_is_said_where_the_address_is_of_this_one_alone(
    page: str, tunnel: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "bagua_client")
    announce_page(logging.getLogger("bagua_client.test"), "digits", page)
    first, *rest = (record.message for record in caplog.records)
    assert first == f"autotune: job digits is being tuned, see {page}"
    expected = f"ssh -L {tunnel} {socket.gethostname()}"
    assert [line.rpartition("first: ")[2] for line in rest] == ([expected] if tunnel else [])


def test_levels_that_a_user_set_count_without_a_handler_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package, logger = logging.getLogger("bagua_client"), logging.getLogger("bagua_client.test")
    monkeypatch.setattr(package, "propagate", False)  # pytest's own handlers are above it
    try:
        announce(logger, "line %d", 1)
        package.setLevel(logging.WARNING)
        announce(logger, "line %d", 2)
        package.setLevel(logging.DEBUG)
        announce(logger, "line %d", 3)
        logging.disable(logging.INFO)
        announce(logger, "line %d", 4)
    finally:
        package.setLevel(logging.NOTSET)
        logging.disable(logging.NOTSET)
    assert capsys.readouterr().err == "line 1\nline 3\n"


def test_where_there_is_a_handler_its_levels_decide(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("bagua_client.test")
    announce(logger, "below the root's level, which is WARNING")
    caplog.set_level(logging.INFO)
    announce(logger, "once, in the handler's form")
    assert caplog.messages == ["once, in the handler's form"]
    assert capsys.readouterr().err == ""
