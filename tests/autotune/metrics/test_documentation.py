"""docs/monitoring.md lists the metrics that there are, with their labels."""

from __future__ import annotations

import re
from pathlib import Path

from flask.testing import FlaskClient
from prometheus_client.parser import text_string_to_metric_families

from tests.autotune.api.driving import JOB, drive
from tests.autotune.support import Ranks, registration

DOCUMENT = Path(__file__).parents[3] / "docs" / "monitoring.md"
ROW = re.compile(r"^\| `(bagua_autotune_\w+)(?:\{([\w,]+)\})?` \|", re.MULTILINE)
# The kind of a sample, not of what it is of.
BUCKET = "le"
MEMORY = {"peak_bytes": 5, "limit_bytes": 9, "device_bytes": 10}


def documented() -> dict[str, set[str]]:
    rows = ROW.findall(DOCUMENT.read_text())
    assert len({name for name, _ in rows}) == len(rows)
    return {name: set(filter(None, labels.split(","))) for name, labels in rows}


def told(client: FlaskClient) -> dict[str, set[str]]:
    text = client.get("/metrics").text
    names = re.findall(r"^# HELP (\S+)", text, re.MULTILINE)
    labels = {name: set[str]() for name in names if name.startswith("bagua_autotune_")}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            base = re.sub(r"_(bucket|sum|count)$", "", sample.name)
            for name in {sample.name, base} & labels.keys():
                labels[name] |= sample.labels.keys() - {BUCKET}
    return labels


def test_the_table_is_that_of_the_metrics(client: FlaskClient) -> None:
    client.put(JOB, json=registration())
    computing = [0.1, 0.1, 0.1, 0.15]  # the last rank is slow
    steps = [{"step": n, "seconds": [0.2] * 4, "compute_seconds": computing} for n in range(1, 9)]
    client.post(f"{JOB}/observations", json={"trial": 0, "steps": steps, "memory": MEMORY})
    running = told(client)
    drive(client, Ranks(noise=0.001), steps=10, memory=MEMORY)
    finished = told(client)
    assert {name: running[name] | finished[name] for name in finished} == documented()
