"""A job of one process, which sends nothing: tuned, told, shown and exported without a word of
buckets or a network."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from click.testing import CliRunner
from flask.testing import FlaskClient

from bagua_autotune.app import create_app
from bagua_autotune.cli import main
from bagua_autotune.settings import Settings
from bagua_autotune.store import Store
from bagua_wire.configuration import Value
from tests.autotune.api.driving import JOB, drive
from tests.autotune.support import Ranks, registration

KNOB = "recomputed_blocks"
BODY = registration(
    world_size=1,
    ranks_per_node=[1],
    knobs={KNOB: {"type": "categorical", "values": [12, 9, 6, 3, 0]}},
    default_configuration={KNOB: 12},
    software={"torch": "2.13.0"},
)


def _seconds(configuration: Mapping[str, Value]) -> float:
    return 0.1 + 0.002 * int(str(configuration[KNOB]))


def _ranks() -> Ranks:
    return Ranks(seed=1, noise=0.01, step_seconds=_seconds, world_size=1)


def test_it_is_tuned_and_nothing_is_said_of_what_it_does_not_have(client: FlaskClient) -> None:
    assert client.put(JOB, json=BODY).status_code == 201
    result = drive(client, _ranks(), steps=10)["result"]
    assert (result["configuration"], result["kept"]) == ({KNOB: 0}, "winner")
    assert result["summary"].startswith("0 blocks recomputed: 1.2")
    assert "the default (12 blocks recomputed)" in result["summary"]
    overview = client.get(f"{JOB}/overview").get_json()
    assert overview["job"]["world_size"] == 1
    assert overview["ranks"] == []
    assert "with transformers, gradient_checkpointing=False" in overview["stock_ddp"]
    curve, layouts = (client.get(f"{JOB}/{part}").get_json() for part in ("curve", "buckets"))
    assert (curve["curves"], layouts["layouts"]) == ([], [])
    assert layouts["tensors"] == 250, "which the page calls the model's gradients"
    metrics = client.get("/metrics").get_data(as_text=True)
    assert re.search(r"^bagua_autotune_job_ranks\{.*digits.*\} 1", metrics, re.MULTILINE)
    told = [overview["why"], overview["job"], overview["trials"], overview["events"], curve]
    for word in ("bucket", "ommunication", "network", "DistributedDataParallel"):
        assert word not in json.dumps(told)


def test_it_is_exported(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}"
    client = create_app(Settings(database=url), Store(url)).test_client()
    client.put(JOB, json=BODY)
    drive(client, _ranks(), steps=10)
    found = {
        name: CliRunner().invoke(main, [*command, "job", "--database", url])
        for name, command in {
            "show": ["show"],
            "csv": ["export", "--csv"],
            "json": ["export", "--json"],
            "file": ["export", "--configuration"],
        }.items()
    }
    assert {name: done.exit_code for name, done in found.items()} == dict.fromkeys(found, 0)
    assert json.loads(found["file"].stdout)["configuration"] == {KNOB: 0}
    assert "stock DDP" not in found["show"].stdout
    assert "bucket" not in found["show"].stdout
