from __future__ import annotations

import csv
import logging
from pathlib import Path

import pytest

from bagua_autotune.store import Store
from bagua_autotune.tuning.tuner import Tuner
from bagua_v1.csv_log import CsvLog
from tests.autotune.support import Ranks, drive, make_spec


def finish(tuner: Tuner) -> int:
    tuner.register("job", make_spec(limits={"max_samples": 6}))
    drive(tuner, "job", Ranks(noise=0.001))
    return len(tuner.store.trials.of("job"))


def test_each_measured_trial_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        trials = finish(Tuner(Store("sqlite://"), "random", [CsvLog(tmp_path)]))
    path = tmp_path / "bagua_autotune_job.csv"
    with path.open() as file:
        lines = list(csv.DictReader(file))
    assert [int(line["trial"]) for line in lines] == list(range(trials))
    assert lines[0]["bucket_bytes"] == str(25 << 20)
    assert float(lines[0]["seconds"]) > 0
    assert caplog.text.count(str(path)) == 1
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_folder_that_cannot_be_written_does_not_stop_tuning(tmp_path: Path) -> None:
    assert finish(Tuner(Store("sqlite://"), "random", [CsvLog(tmp_path / "missing")])) > 3
