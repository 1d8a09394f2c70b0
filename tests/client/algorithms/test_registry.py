"""Algorithms are found by name."""

from __future__ import annotations

import pytest

from bagua_client.algorithms import Algorithm, GradientAllReduce, base, find, register


@pytest.fixture(autouse=True)
def registry_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_algorithms", dict(base._algorithms))


def test_the_built_in_algorithm_is_found_and_each_time_new() -> None:
    assert isinstance(find("gradient_allreduce"), GradientAllReduce)
    assert find("gradient_allreduce") is not find("gradient_allreduce")


def test_an_algorithm_registered_from_outside_is_found() -> None:
    @register("mine")
    class Mine(Algorithm):
        pass

    assert isinstance(find("mine"), Mine)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'bytegrad'; known are: gradient_allreduce"):
        find("bytegrad")


def test_a_name_is_given_once() -> None:
    register("gradient_allreduce")(GradientAllReduce)
    with pytest.raises(ValueError, match="'gradient_allreduce' already"):
        register("gradient_allreduce")(Algorithm)
