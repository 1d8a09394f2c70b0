"""A small run of the benchmark of upgrades on a real PostgreSQL, to the same release."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bagua_autotune.store.engine.tables import SCHEMA_VERSION
from benchmarks import upgrade
from tests.autotune.store.postgresql import find_binaries

pytestmark = pytest.mark.slow


def test_replicas_are_restarted_while_a_job_and_a_model_use_them() -> None:
    if find_binaries() is None:
        pytest.skip("PostgreSQL is not installed")
    outcome = upgrade.upgrade(upgrade.HERE, jobs=1, models=1, between_seconds=0.5)
    assert outcome.schemas == (SCHEMA_VERSION, SCHEMA_VERSION)
    assert len(outcome.start_seconds) == upgrade.REPLICAS
    (model,) = outcome.models
    assert model.pairs > 0
    assert model.changes > 0
    assert outcome.show(), "all is right"
    assert not replace(outcome, statuses={503: 1}).show()
    assert not replace(outcome, models=[replace(model, apart=1)]).show()
    assert not replace(outcome, schemas=(SCHEMA_VERSION, SCHEMA_VERSION - 1)).show()
