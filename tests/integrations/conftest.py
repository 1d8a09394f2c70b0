"""Ranks that keep the frameworks imported, and the comparison of what they trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bagua_client.torch_private.reducer import HAS_BUCKET_CAPS
from tests.integrations.arms import Arm, Run, Trained, train
from tests.ranks import RankPool

VARIABLES = {
    # Nothing is fetched, and nobody is told.
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    # As torchrun says: Lightning starts no processes of its own.
    "TORCHELASTIC_RUN_ID": "none",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
FEWEST_CUTS = 3 if HAS_BUCKET_CAPS else 2
"""Ways in which the buckets must have been cut for a comparison to mean anything; torch before 2.11
cuts no explicit ones."""


class Arms:
    """Two ranks in which a framework finds torch's class, and two in which it finds ours."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._torchs, self._ours = (RankPool([2], variables=VARIABLES) for _ in range(2))
        self._references: dict[tuple[str, int], list[Trained]] = {}
        self._runs = 0

    @property
    def untouched(self) -> RankPool:
        """Two ranks in which torch's class is where it was."""
        return self._torchs

    def compare(
        self, arm: Arm, scenario: str, times: int = 1, url: str = "", cuts: int = FEWEST_CUTS
    ) -> list[Trained]:
        """Train with torch's class and with ours: all values must be the same, bit by bit. A sum
        of two ranks has one order only, in whatever buckets it is made.

        Args:
            scenario, times, url: see :func:`train` and :class:`Run`.
            cuts: the buckets must have been cut in at least so many ways.

        Returns:
            The trainings with ours, by rank.
        """
        key = scenario, times
        if key not in self._references:
            self._references[key] = self._train(Arm.TORCH, scenario, times)
        references = self._references[key]
        first, second = (reference.values["losses"] for reference in references)
        assert not np.array_equal(first, second), "the ranks train with the same data"
        ours = self._train(arm, scenario, times, url)
        for rank, (expected, found) in enumerate(zip(references, ours, strict=True)):
            assert list(found.values) == list(expected.values)
            for name, value in expected.values.items():
                assert np.isfinite(value).all()
                np.testing.assert_array_equal(
                    found.values[name], value, f"{name} on rank {rank} of {scenario}"
                )
            assert len(found.cuts) >= cuts, f"cut in {found.cuts} only ({found.refusals})"
        return ours

    def close(self) -> None:
        self._torchs.close()
        self._ours.close()

    def _train(self, arm: Arm, scenario: str, times: int, url: str = "") -> list[Trained]:
        self._runs += 1
        folder = self._folder / str(self._runs)
        folder.mkdir()
        pool = self._ours if arm is Arm.NAMED else self._torchs
        trained: list[Trained] = pool.run(train, Run(arm, str(folder), times, url), scenario)
        return trained


@pytest.fixture(scope="package")
def arms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arms]:
    """Started with the first training that needs them."""
    found = Arms(tmp_path_factory.mktemp("arms"))
    yield found
    found.close()
