"""What was kept and harmed the training is not tried again: in its job, and in those after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from bagua_autotune.earlier.copies import adopt, copy_of
from bagua_autotune.measuring.rounds import Round
from bagua_autotune.model.job import Event
from bagua_autotune.store import Store
from bagua_autotune.tuning.status import JobState
from bagua_autotune.tuning.tuner import Tuner
from bagua_wire.configuration import Configuration, Value
from tests.autotune.support import MIB, Ranks, drive, make_spec, peaked, present, registration

BODY = registration()
CHANGES: dict[str, Any] = {
    "knobs": {
        **BODY["knobs"],
        "wire_precision": {"type": "categorical", "values": ["as_is", "bf16"]},
    },
    "default_configuration": {**BODY["default_configuration"], "wire_precision": "as_is"},
    "limits": {"max_samples": 12},
}
MESSAGE = "the loss is 2.31, and 2.05 to 2.1 was to be expected"
FAILURE = f"the training suffered in the long run: {MESSAGE}"


def step_seconds(configuration: Mapping[str, Value]) -> float:
    return peaked(configuration) * (0.6 if configuration["wire_precision"] == "bf16" else 1)


def tune(tuner: Tuner, job_id: str, seed: int = 0, **changes: Any) -> JobState:
    tuner.register(job_id, make_spec(**{**CHANGES, **changes}))
    return drive(tuner, job_id, Ranks(seed, 0.01, step_seconds, changes.get("world_size", 4)))


def later(step: int) -> Ranks:
    ranks = Ranks(1, 0.01, step_seconds)
    ranks.step = step
    return ranks


def precisions(tuner: Tuner, job_id: str, round_: int = 0) -> set[Value]:
    trials = tuner.store.trials.of(job_id)
    return {trial.configuration["wire_precision"] for trial in trials if trial.round == round_}


@pytest.fixture
def tuner() -> Tuner:
    """Has a job whose winner harmed its training."""
    tuner = Tuner(Store("sqlite://"))
    kept = tune(tuner, "first").configuration
    seconds = Round.of(tuner.store.jobs.get("first"), tuner.store.trials.of("first")).seconds
    assert kept["wire_precision"] == "bf16"
    for _ in range(2):  # It may be told twice.
        tuner.take_event("first", Event("diverged", None, 9000, MESSAGE))
    *_, before, harmful = tuner.store.trials.of("first")
    assert (before.state, harmful.state) == ("measured", "failed")
    assert (harmful.index, harmful.round) == (before.index + 1, before.round)
    assert (harmful.configuration, harmful.failure) == (kept, FAILURE)
    # The tuning did not take longer for it.
    assert (
        Round.of(tuner.store.jobs.get("first"), tuner.store.trials.of("first")).seconds == seconds
    )
    result = present(tuner.status("first").result)
    assert (result.kept, result.reason_code) == ("baseline", "diverged")
    assert result.reason == FAILURE
    assert "paid back" not in result.summary
    return tuner


def test_a_later_tuning_of_the_job_leaves_it_out(tuner: Tuner) -> None:
    tuner.take_event("first", Event("drift", None, 20_000, "slower"))
    result = present(drive(tuner, "first", later(20_000)).result)
    assert precisions(tuner, "first", 1) == {"as_is"}
    assert (result.kept, result.configuration["wire_precision"]) == ("winner", "as_is")
    # And the next job begins with what that found.
    assert tune(tuner, "second").configuration == result.configuration
    assert precisions(tuner, "second") == {"as_is"}


def test_harm_told_just_after_a_round_was_opened_is_that_of_its_first_trial() -> None:
    """The ranks still run the winner as what was kept, and name no trial."""
    tuner = Tuner(Store("sqlite://"))
    kept = tune(tuner, "job").configuration
    tuner.take_event("job", Event("drift", None, 20_000, "slower"))
    trial = present(tuner.open_trial("job"))
    assert (trial.configuration, kept["wire_precision"]) == (kept, "bf16")
    tuner.take_event("job", Event("diverged", None, 20_001, MESSAGE))
    result = present(drive(tuner, "job", later(20_010)).result)
    assert tuner.store.trials.get("job", trial.index).state == "failed"
    assert result.configuration["wire_precision"] == "as_is"
    tried = [t for t in tuner.store.trials.of("job") if t.round == 1 and t.index > trial.index]
    assert {t.configuration["wire_precision"] for t in tried} == {"as_is"}


def test_harm_told_before_a_rounds_first_trial_is_decided_is_not_lost() -> None:
    tuner = Tuner(Store("sqlite://"))
    kept = tune(tuner, "job").configuration
    assert kept["wire_precision"] == "bf16"
    assert tuner.store.jobs.open_round("job", 30_000.0)
    for _ in range(2):  # It may be told twice.
        tuner.take_event("job", Event("diverged", None, 20_001, MESSAGE))
    harmful = tuner.store.trials.of("job")[-1]
    assert (harmful.round, harmful.state, harmful.configuration) == (1, "failed", kept)
    tuner.ask("job")  # Which begins what was left undecided.
    result = present(drive(tuner, "job", later(20_010)).result)
    assert result.configuration["wire_precision"] == "as_is"
    tried = [t for t in tuner.store.trials.of("job") if t.round == 1 and t.index > harmful.index]
    assert {t.configuration["wire_precision"] for t in tried} == {"as_is"}


def test_the_next_jobs_neither_begin_with_it_nor_try_it(tuner: Tuner) -> None:
    for number in range(2):
        state = tune(tuner, f"next{number}", number)
        assert precisions(tuner, f"next{number}") == {"as_is"}
        assert state.result is not None
        assert (state.result.kept, state.configuration["wire_precision"]) == ("winner", "as_is")
    notes = [event.message for event in tuner.store.events.of("next0")]
    assert any("the numbers are not changed again" in note for note in notes)


def test_a_job_that_is_resized_or_was_killed_does_not_try_it(tuner: Tuner) -> None:
    resized = {"world_size": 2, "ranks_per_node": [1, 1], "fingerprint": "r"}
    tune(tuner, "resized", **resized)
    assert precisions(tuner, "resized") == {"as_is"}
    tuner.register("killed", make_spec(**CHANGES))
    drive(tuner, "killed", Ranks(0, 0.01, step_seconds), polls=20)
    tuner.take_event("killed", Event("ended"))
    tune(tuner, "again")
    assert precisions(tuner, "again") == {"as_is"}


def test_a_job_that_begins_afresh_tries_it_again(tuner: Tuner) -> None:
    tune(tuner, "fresh", fresh=True)
    assert precisions(tuner, "fresh") == {"as_is", "bf16"}
    assert not [event for event in tuner.store.events.of("fresh") if event.kind == "note"]


def test_a_job_of_another_name_tries_it_and_does_not_begin_with_it(tuner: Tuner) -> None:
    tune(tuner, "other", name="another training")
    first, second, *_ = tuner.store.trials.of("other")
    assert second.configuration != tuner.store.trials.of("first")[-1].configuration
    assert first.configuration == Configuration(CHANGES["default_configuration"])


def test_what_begins_with_the_same_change_of_the_numbers_is_not_begun_with(tuner: Tuner) -> None:
    """Of a job of another name, which did not suffer, with other buckets."""
    other = {"name": "another training", "fingerprint": BODY["fingerprint"]}
    best = tune(tuner, "other", **other).configuration
    assert best["wire_precision"] == "bf16"
    state = present(tuner.status("other").result)
    elsewhere = Configuration({**best, "bucket_bytes": 3 * MIB})
    tuner.store.jobs.replace_result("other", replace(state, configuration=elsewhere))
    tune(tuner, "second")
    assert precisions(tuner, "second") == {"as_is"}


def test_a_copy_of_what_is_known_tells_it_to_another_service(tuner: Tuner) -> None:
    other = Tuner(Store("sqlite://"))
    copy = copy_of(tuner.store, tuner.knowledge, "first")
    assert adopt(other.store, type(copy).model_validate_json(copy.model_dump_json()), 2e9) == 1
    tune(other, "moved")
    assert precisions(other, "moved") == {"as_is"}


def test_harm_in_the_last_trial_that_is_told_once_the_job_is_tuned_revokes_the_winner() -> None:
    tuner = Tuner(Store("sqlite://"))
    assert tune(tuner, "job").configuration["wire_precision"] == "bf16"
    trials = tuner.store.trials.of("job")
    default = next(trial for trial in trials if trial.configuration["wire_precision"] == "as_is")
    last = next(trial for trial in trials[::-1] if trial.configuration["wire_precision"] == "bf16")
    for trial, precision in ((default, "bf16"), (last, "as_is")):
        tuner.take_event("job", Event("diverged", trial.index, 9000, MESSAGE))
        assert tuner.status("job").configuration["wire_precision"] == precision
