"""Records to store."""

from __future__ import annotations

from typing import Any

from bagua_autotune.model.job import Result, Trial
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.store.trials import Move
from bagua_wire.configuration import Configuration
from bagua_wire.profile import BucketTiming, Profile
from tests.autotune.support import registration

BASELINE = Configuration(bucket_bytes=25 << 20, hierarchical="off")
FIRST = Move(at=1.0, next_trial=Trial(0, "search", BASELINE))
MEASURED = Move(2.0, 0, Estimate(1.0, 0.1, 5), next_trial=Trial(1, "search", BASELINE))
RESULT = Result(BASELINE, "baseline", 1.0, 1.0, 1.0, 1, 3, 2.0, "kept")
PROFILE = Profile(
    step=7,
    step_seconds=0.3,
    ready_seconds=(0.1, 0.2) * 125,
    buckets=(
        BucketTiming(bytes=26_400_000, started_seconds=0.1, ended_seconds=0.25),
        BucketTiming(bytes=73_600_000, started_seconds=0.2, ended_seconds=0.3),
    ),
)


def with_buckets_of_its_own() -> dict[str, Any]:
    """Changes to a registration: a knob for an explicit list of buckets."""
    body = registration()
    return {
        "knobs": {**body["knobs"], "buckets": {"type": "partition"}},
        "default_configuration": {**body["default_configuration"], "buckets": []},
    }
