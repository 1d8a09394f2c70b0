"""Algorithms are found by name, with the errors that Bagua's registry has."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagua_client.algorithms import (
    Algorithm,
    ByteGradAlgorithm,
    GlobalAlgorithmRegistry,
    GradientAllReduceAlgorithm,
    PowerSGDAlgorithm,
    find,
    register,
)
from tests.strangers import lay

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def registry_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    known = dict(GlobalAlgorithmRegistry._declarations)
    monkeypatch.setattr(GlobalAlgorithmRegistry, "_declarations", known)


def test_bagua_names_are_there_and_take_arguments() -> None:
    assert isinstance(find("gradient_allreduce"), GradientAllReduceAlgorithm)
    assert find("gradient_allreduce") is not find("gradient_allreduce")
    assert "bytegrad" in GlobalAlgorithmRegistry.available_algorithms()
    found = Algorithm.init("bytegrad", hierarchical=False, average=False)
    assert isinstance(found, ByteGradAlgorithm)
    assert (found.hierarchical, found.average, found.name) == (False, False, "bytegrad")
    with pytest.raises(TypeError, match="peers"):
        Algorithm.init("bytegrad", peers=3)


def test_torchs_power_sgd_is_there_with_torchs_arguments() -> None:
    found = Algorithm.init("powersgd", matrix_approximation_rank=8, start_powerSGD_iter=20)
    assert isinstance(found, PowerSGDAlgorithm)
    assert (found.state.matrix_approximation_rank, found.state.start_powerSGD_iter) == (8, 20)
    with pytest.raises(TypeError, match="orthogonalization_epsilon"):
        Algorithm.init("powersgd", orthogonalization_epsilon=1e-8)


STRANGERS = """
from bagua_client import Algorithm, register


class Aside(Algorithm):
    pass


@register("theirs")
class Theirs(Algorithm):
    pass
"""


def test_one_of_another_package_is_found_and_a_broken_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"aside": "Aside", "theirs": "Theirs", "broken": "Lacking"}
    entries = {name: f"aside_algorithm:{value}" for name, value in names.items()}
    lay(tmp_path, {"aside_algorithm.py": STRANGERS}, {"bagua_client.algorithms": entries})
    monkeypatch.syspath_prepend(tmp_path)
    assert {"aside", "broken"} <= set(GlobalAlgorithmRegistry.available_algorithms())
    assert "aside" in GlobalAlgorithmRegistry.available_algorithms("replicated")
    assert "broken" not in GlobalAlgorithmRegistry.available_algorithms("replicated")
    assert (find("aside").name, find("theirs").name) == ("aside", "theirs")
    assert str(GlobalAlgorithmRegistry).startswith("Registered Algorithms: ")
    told = r"'broken' \(aside_algorithm:Lacking\) cannot be imported: AttributeError"
    with pytest.raises(ValueError, match=told):
        find("broken")


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'bitgrad'; known are: .*bytegrad, .*gradient_allreduce"):
        find("bitgrad")
    with pytest.raises(KeyError, match="'bitgrad'"):
        GlobalAlgorithmRegistry.get("bitgrad")


def test_a_name_is_a_string_and_given_once() -> None:
    register("gradient_allreduce")(GradientAllReduceAlgorithm)
    with pytest.raises(ValueError, match="'gradient_allreduce' already"):
        register("gradient_allreduce")(Algorithm)
    with pytest.raises(TypeError, match="must be a string"):
        GlobalAlgorithmRegistry.register(3, Algorithm)  # type: ignore[arg-type]
