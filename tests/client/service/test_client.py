"""What the client makes of a service's answers; whole exchanges are in tests/e2e."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_client.service.client import JobState, ServiceClient
from bagua_client.service.transport import ServiceUnavailable

STATE: dict[str, Any] = {
    "trial": {"index": 3, "purpose": "search", "state": "proposed", "configuration": {}},
    "configuration": {"bucket_bytes": 1024, "hierarchical": "off"},
    "progress": {"trials_measured": 3, "max_trials": 60, "speedup": 1.25},
    "result": None,
    "deciding": False,
    "round": 0,
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def test_a_jobs_state_is_read() -> None:
    state = JobState.from_json(STATE)
    assert (state.trial, state.speedup, state.summary) == (3, 1.25, None)
    assert not state.deciding
    assert JobState.from_json({**STATE, "deciding": True}).deciding
    assert state.configuration == {"bucket_bytes": 1024, "hierarchical": "off"}


@pytest.mark.parametrize(
    ("parts", "deciding"),
    [
        ({"state": "tuning"}, True),
        ({"state": "confirming"}, True),
        ({"state": "finished"}, False),
        ({"state": "ended"}, False),
        ({}, False),
    ],
)
def test_no_trial_ends_the_tuning_but_not_between_two(
    parts: dict[str, str], deciding: bool
) -> None:
    assert JobState.from_json({**STATE, "trial": None, **parts}).deciding is deciding


@given(JSON)
def test_any_other_document_is_no_answer(document: Any) -> None:
    with pytest.raises(ServiceUnavailable):
        JobState.from_json(document)


@given(st.sampled_from(sorted(STATE)), JSON)
def test_a_state_with_a_broken_part_is_no_answer_or_a_state(part: str, broken: Any) -> None:
    with contextlib.suppress(ServiceUnavailable):
        JobState.from_json({**STATE, part: broken})


def test_an_address_may_end_with_a_slash() -> None:
    assert ServiceClient("http://127.0.0.1:1/", "job").url == "http://127.0.0.1:1"
