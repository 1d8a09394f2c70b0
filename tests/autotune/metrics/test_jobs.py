"""Which jobs a scrape shows, what it costs the store, and that labels stay few."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bagua_autotune.metrics.jobs import (
    BUCKETS,
    CHANGED_BUDGET_SECONDS,
    ENDED_SECONDS,
    HEARD_SECONDS,
    MOST_JOBS,
    NEW_BUDGET_SECONDS,
    TUNED_SECONDS,
    Jobs,
    StepHistograms,
)
from bagua_autotune.model.job import SILENT_SECONDS, Event, Observation, Trial
from bagua_autotune.store import Store
from bagua_autotune.store.jobs import Contact
from bagua_autotune.store.trials import Move
from bagua_autotune.tuning.tuner import Tuner
from bagua_autotune.views.summary import JobSum, Summaries
from bagua_wire.configuration import Configuration
from tests.autotune.api.driving import of, parsed
from tests.autotune.store.samples import RESULT
from tests.autotune.support import MIB, Clock, make_spec

HOSTILE = '\\"}{digits="1"} 7 # HELP \\n<img src=x onerror=alert(1)>\N{SNOWMAN}'


class Read(Summaries):
    """Notes the jobs that are read, each of which takes so many seconds."""

    def __init__(self, store: Store, stopwatch: Clock) -> None:
        super().__init__(store)
        self.jobs: list[str] = []
        self.seconds, self._stopwatch = 0.0, stopwatch

    def of(self, contact: Contact) -> JobSum:
        self.jobs.append(contact.id)
        self._stopwatch.now += self.seconds
        return super().of(contact)


class Scene:
    """The jobs of a store, a clock, and scrapes of them."""

    def __init__(self, store: Store) -> None:
        self.clock, self.stopwatch = Clock(1e9, step=0), Clock(1e9, step=0)
        self.store = store
        self.steps = StepHistograms()
        self.tuner = Tuner(store, "random", [], self.clock)
        self.read = Read(store, self.stopwatch)
        self.jobs = Jobs(store, self.read, self.steps, self.clock, self.stopwatch)

    def add(self, job_id: str, **changes: object) -> None:
        self.tuner.register(job_id, make_spec(**{"name": job_id, **changes}))

    def names(self) -> set[str]:
        return {name for name, _ in of(parsed(self.scrape()), "job_state")}

    def told(self) -> set[str]:
        """The jobs that more than their state is told of."""
        return {name for (name,) in of(parsed(self.scrape()), "job_ranks")}

    def scrape(self) -> str:
        return self.jobs.exposition().decode()


@pytest.fixture
def scene(store: Store) -> Scene:
    return Scene(store)


def test_a_job_that_ended_leaves(scene: Scene) -> None:
    scene.add("job")
    scene.tuner.take_event("job", Event("ended"))
    scene.clock.now += ENDED_SECONDS
    assert scene.names() == {"job"}
    scene.clock.now += 1
    assert scene.names() == set()


def test_a_silent_job_leaves_later_where_it_is_tuned(scene: Scene) -> None:
    for job in ("tuning", "tuned"):
        scene.add(job)
    scene.store.trials.advance("tuned", Move(at=1e9, closes=0, failure="x", result=RESULT))
    scene.clock.now += SILENT_SECONDS
    assert scene.names() == {"tuning", "tuned"}
    scene.clock.now += 1
    assert scene.names() == {"tuned"}
    scene.clock.now = 1e9 + TUNED_SECONDS
    assert scene.names() == {"tuned"}
    scene.clock.now += 1
    assert scene.names() == set()


def test_a_job_leaves_as_it_is_taken_for_gone_and_comes_back(scene: Scene) -> None:
    scene.add("job")
    scene.clock.now += SILENT_SECONDS
    scene.tuner.leases.look()
    assert of(parsed(scene.scrape()), "job_state")["job", "tuning"] == 1
    scene.clock.now += 1
    scene.tuner.leases.look()
    assert scene.names() == set()
    scene.tuner.observe("job", 0, [Observation(1, (0.1,) * 4)])
    assert of(parsed(scene.scrape()), "job_state")["job", "tuning"] == 1


def test_only_what_changed_is_read_again(scene: Scene) -> None:
    for job in ("one", "two"):
        scene.add(job)
    first = scene.scrape()
    assert sorted(scene.read.jobs) == ["one", "two"]
    assert scene.scrape() == first
    scene.tuner.observe("two", 0, [Observation(1, (0.1,) * 4)])
    assert scene.scrape() != first
    assert scene.read.jobs[2:] == ["two"]


def test_steps_counted_after_the_scrape_of_their_revision_are_told(scene: Scene) -> None:
    scene.add("job")
    scene.scrape()
    scene.steps.observe(scene.store.jobs.get("job"), [Observation(1, (0.2,) * 4)])
    assert of(parsed(scene.scrape()), "step_seconds_count") == {("job",): 1}


def test_what_left_the_exposition_leaves_the_memory(scene: Scene) -> None:
    for number in range(3):
        scene.add(f"job{number}")
        scene.tuner.observe(f"job{number}", 0, [Observation(1, (0.1,) * 4)])
        scene.steps.observe(scene.store.jobs.get(f"job{number}"), [Observation(1, (0.1,) * 4)])
    assert len(scene.told()) == 3
    for number in range(3):
        scene.tuner.take_event(f"job{number}", Event("ended"))
    scene.clock.now += ENDED_SECONDS + 1
    assert scene.names() == set()
    assert not scene.steps.job_ids()
    scene.read.jobs.clear()
    scene.clock.now -= 1  # nothing else has changed
    assert len(scene.told()) == 3
    assert len(scene.read.jobs) == 3


def test_histograms_are_bounded_without_scrapes(scene: Scene) -> None:
    scene.add("job")
    job = scene.store.jobs.get("job")
    for number in range(MOST_JOBS + 2):
        scene.steps.observe(replace(job, id=str(number)), [Observation(1, (0.1,) * 4)])
    assert len(scene.steps.job_ids()) == MOST_JOBS
    assert "0" not in scene.steps.job_ids()


def test_a_scrape_has_a_budget_and_the_rest_comes_next(scene: Scene) -> None:
    for number in range(5):
        scene.add(f"job{number}")
    scene.read.seconds = NEW_BUDGET_SECONDS / 2
    told = [len(scene.told()) for _ in range(3)]
    assert told == [3, 5, 5]
    # What is not read in time keeps its old text, but its state, its last word and its steps are
    # today's.
    scene.clock.now += 1
    for number in range(5):
        scene.tuner.observe(f"job{number}", 0, [Observation(1, (0.1,) * 4)])
        scene.steps.observe(scene.store.jobs.get(f"job{number}"), [Observation(1, (0.1,) * 4)])
    scene.read.seconds = CHANGED_BUDGET_SECONDS * 0.7
    counts = []
    for _ in range(4):
        found = parsed(scene.scrape())
        assert sum(of(found, "step_seconds_count").values()) == 5
        assert set(of(found, "job_last_contact_timestamp_seconds").values()) == {1e9 + 1}
        counts.append(sum(of(found, "search_steps_total").values()))
    assert counts == [2, 4, 5, 5]


def test_of_several_jobs_of_one_name_one_that_runs_is_shown(scene: Scene) -> None:
    def shown() -> float:
        (ranks,) = of(parsed(scene.scrape()), "job_ranks").values()
        return ranks

    for place, job_id in enumerate(("oldest", "middle", "newest")):
        scene.clock.now += 1
        scene.add(job_id, name="digits", world_size=place + 1, ranks_per_node=(place + 1,))
    assert shown() == 3
    scene.store.trials.advance("newest", Move(at=1e9, closes=0, failure="x", result=RESULT))
    assert shown() == 2  # is being tuned
    scene.clock.now += HEARD_SECONDS + 1
    assert shown() == 3  # the others may be gone
    scene.tuner.take_event("newest", Event("ended"))
    assert shown() == 2
    for job_id in ("middle", "oldest"):
        scene.tuner.take_event(job_id, Event("ended"))
    assert shown() == 3


def test_hostile_names_are_labels_and_nothing_else(scene: Scene) -> None:
    knobs = make_spec().model_dump(mode="json")["knobs"]
    knobs["hostile"] = {"type": "categorical", "values": [HOSTILE[:64], "b"]}
    default = {"bucket_bytes": 25 * MIB, "hierarchical": "off", "hostile": HOSTILE[:64]}
    scene.add("job", name=HOSTILE, knobs=knobs, default_configuration=default)
    scene.tuner.observe("job", 0, [Observation(1, (0.1,) * 4)])
    text = scene.scrape()
    families = list(text_string_to_metric_families(text))
    samples = [sample for family in families for sample in family.samples]
    assert {sample.labels["job_name"] for sample in samples} == {HOSTILE}
    knobs_told = {s.labels["state"] for s in samples if s.labels.get("knob") == "hostile"}
    assert knobs_told == {HOSTILE[:64]}
    assert len({family.name for family in families}) == len(families)


def test_labels_do_not_grow_with_trials(scene: Scene) -> None:
    scene.add("job", limits={"max_samples": 500})
    job = scene.store.jobs.get("job")

    def series() -> Counter[str]:
        found = parsed(scene.scrape())
        return Counter(key[0] for key in found)

    before = series()
    for index in range(100):
        tried = Configuration(bucket_bytes=MIB + index, hierarchical="off")
        following = Trial(index + 1, "search", tried)
        failure = f"rank {index} disagreed"
        step = Move(at=1e9, closes=index, failure=failure, next_trial=following)
        assert scene.store.trials.advance("job", step)
        scene.steps.observe(job, [Observation(index, (0.1 * (index + 1),) * 4)])
    after = series()
    histogram = "bagua_autotune_step_seconds"
    added = {
        f"{histogram}_bucket": len(BUCKETS) + 1,
        f"{histogram}_count": 1,
        f"{histogram}_sum": 1,
    }
    assert after - before == Counter(added)
