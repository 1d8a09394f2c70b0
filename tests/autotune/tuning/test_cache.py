from __future__ import annotations

import threading

import pytest

from bagua_autotune.tuning.cache import Cache


def test_an_answer_is_made_once_per_version() -> None:
    cache: Cache[int] = Cache(9)
    made = iter(range(9))
    answers = [cache.get("job", version, lambda: next(made)) for version in (1, 1, 2, 2, 1)]
    assert answers == [0, 0, 1, 1, 2]


def test_what_fails_is_tried_again() -> None:
    cache: Cache[int] = Cache(9)
    with pytest.raises(ZeroDivisionError):
        cache.get("job", 1, lambda: 1 // 0)
    assert cache.get("job", 1, lambda: 7) == 7


def test_only_so_many_jobs_are_kept_and_the_latest_looked_at() -> None:
    cache: Cache[str] = Cache(2)
    for job in ("a", "b", "a", "c"):
        cache.get(job, 1, lambda job=job: job)  # type: ignore[misc]
    assert cache.get("a", 1, lambda: "again") == "a"
    assert cache.get("b", 1, lambda: "again") == "again"


def test_of_one_job_one_answer_is_made_at_a_time_and_others_do_not_wait() -> None:
    cache: Cache[str] = Cache(9)
    begun, may_end = threading.Event(), threading.Event()
    made: list[str] = []

    def slow() -> str:
        begun.set()
        may_end.wait()
        made.append("slow")
        return "slow"

    answers: list[str] = []
    threads = [
        threading.Thread(target=lambda: answers.append(cache.get("job", 1, slow))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    begun.wait()
    assert cache.get("other", 1, lambda: "quick") == "quick"
    may_end.set()
    for thread in threads:
        thread.join()
    assert (answers, made) == (["slow"] * 3, ["slow"])
