"""Who is let through to a server that gave no answer."""

from __future__ import annotations

import pytest

from bagua_autotune.store.circuit import RETRY_SECONDS, Circuit
from bagua_autotune.store.errors import NoAnswer


def test_after_a_failure_one_at_a_time_tries_until_there_is_an_answer() -> None:
    now = [0.0]
    circuit = Circuit(lambda: now[0])
    circuit.enter()
    circuit.enter()
    circuit.failed()
    with pytest.raises(NoAnswer):
        circuit.enter()
    now[0] = RETRY_SECONDS
    circuit.enter()
    with pytest.raises(NoAnswer):
        circuit.enter()
    circuit.answered()
    circuit.enter()
    circuit.enter()
