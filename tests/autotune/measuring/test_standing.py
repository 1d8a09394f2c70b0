from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bagua_autotune.measuring.rounds import Round
from bagua_autotune.measuring.standing import best, course
from bagua_autotune.model.job import Trial
from tests.autotune.views.jobs import DEFAULT, FASTER, SLOWER, job, trial

TRIALS = st.lists(
    st.tuples(
        st.sampled_from([DEFAULT, FASTER, SLOWER]),
        st.one_of(st.none(), st.floats(0.1, 0.9)),  # failed, or measured
    ),
    max_size=12,
)


@given(TRIALS)
def test_the_best_is_what_the_course_ends_with(told: list[tuple[object, float | None]]) -> None:
    trials = [
        trial(index, tried, seconds)  # type: ignore[arg-type]
        if seconds
        else Trial(index, "search", tried, "failed", failure="no")  # type: ignore[arg-type]
        for index, (tried, seconds) in enumerate(told)
    ]
    leaders = [leader for _, leader in course(Round(job(), trials))]
    assert best(Round(job(), trials)) == (leaders[-1] if leaders else None)
