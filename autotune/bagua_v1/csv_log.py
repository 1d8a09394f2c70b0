"""One CSV line for each measured trial, if BAGUA_IS_OUTPUT_AUTOTUNE_LOG asks for it."""

from __future__ import annotations

import csv
import logging
import os
import threading
from pathlib import Path

from bagua_autotune.measuring.comparison import OBJECTIVES
from bagua_autotune.model.job import Job, Trial
from bagua_autotune.store.engine.location import FILE_MODE
from bagua_autotune.tuning.background import TunerListener

logger = logging.getLogger(__name__)


class CsvLog(TunerListener):
    """Appends to ``bagua_autotune_<job id>.csv`` in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()

    def on_measured(self, job: Job, trial: Trial) -> None:
        if trial.estimate is None:
            return
        path = self._folder / f"bagua_autotune_{job.id}.csv"
        row = {
            "trial": trial.index,
            "purpose": trial.purpose,
            **trial.configuration,
            "steps": trial.estimate.count,
            "outliers": trial.estimate.outliers,
            "cost": trial.estimate.center,
            "seconds": OBJECTIVES[job.protocol].seconds(trial.estimate.center),
        }
        try:
            with self._lock, open(path, "a", newline="", opener=_private) as file:
                writer = csv.DictWriter(file, fieldnames=row, lineterminator="\n")
                if file.tell() == 0:
                    logger.info("job %s: its trials are written to %s", job.id, path)
                    writer.writeheader()
                writer.writerow(row)
        except OSError as error:  # a log that cannot be written must not stop the tuning
            lost = "job %s: trial %d is not in the CSV log: %s"
            logger.warning(lost, job.id, trial.index, error)


def _private(path: str, flags: int) -> int:
    """Open it; if it is new, for this user alone."""
    return os.open(path, flags, FILE_MODE)
