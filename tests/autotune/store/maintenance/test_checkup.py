"""What is told of a database that is well, whichever it is."""

from __future__ import annotations

from bagua_autotune.store import Store
from bagua_autotune.store.maintenance import checkup


def test_a_database_that_is_well_has_no_faults(store: Store, job: str) -> None:
    findings = list(checkup.examine(store))
    assert not [finding.words for finding in findings if finding.is_fault]
    assert findings[-1].words.startswith("1 of 1 jobs can be read, from 1970-")
    assert len(findings) >= 3
