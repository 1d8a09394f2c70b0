"""The metrics of the whole database: the room that it takes and has, and whose jobs run."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric

from bagua_autotune.model.team import Team
from bagua_autotune.store import Store
from bagua_autotune.store.engine.location import is_in_memory
from bagua_autotune.store.engine.postgresql import SIZE

# Of jobs without a team that is in the file of teams: names of others must not become labels.
NOBODY = "none"


def families(store: Store, teams: Sequence[Team]) -> list[Metric]:
    """Always the same ones in the same order. Raises SQLAlchemyError if the store failed."""
    size = GaugeMetricFamily(
        "bagua_autotune_database_bytes",
        "What the database takes on its disk; of SQLite with the files beside it.",
    )
    free = GaugeMetricFamily(
        "bagua_autotune_database_free_bytes",
        "Free room on the disk of a SQLite file; of a server it is not known.",
    )
    running = GaugeMetricFamily(
        "bagua_autotune_team_running",
        "Jobs that have not ended, by team; none: of no team.",
        labels=["team"],
    )
    if not store.database.is_sqlite:
        ((used,),) = store.database.read(SIZE)
        size.add_metric([], float(used))
    elif not is_in_memory(store.database.url):
        file = Path(str(store.database.url.database)).resolve()
        size.add_metric([], sum(_bytes(each) for each in file.parent.glob(f"{file.name}*")))
        with suppress(OSError):
            free.add_metric([], shutil.disk_usage(file.parent).free)
    counts = Counter({NOBODY: 0} | {team.name: 0 for team in teams})
    for name, count in store.jobs.count_running().items():
        counts[name if name and name in counts else NOBODY] += count
    for name, count in counts.items():
        running.add_metric([name], count)
    return [size, free, running]


def _bytes(file: Path) -> int:
    try:
        return file.stat().st_blocks * 512
    except OSError:  # it went just now
        return 0
