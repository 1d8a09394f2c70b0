"""How the benchmark judges tunings of a model whose memory is limited."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.sharded import judged

pytestmark = pytest.mark.slow


def setting(kept: int) -> dict[str, Any]:
    return {"kept_units": kept, "channels": 1}


SWEPT = [
    {"configuration": setting(kept), "seconds": 1 - kept / 10, "peak_bytes": 100 + 10 * kept}
    for kept in (0, 2, 4)
]


@pytest.mark.parametrize(
    ("limit", "kept", "is_found", "is_over"),
    [(125, 2, True, False), (125, 0, False, False), (125, 4, False, True), (145, 4, True, False)],
)
def test_the_best_that_fits_is_that_of_the_sweep(
    limit: int, kept: int, is_found: bool, is_over: bool
) -> None:
    tuning = {"allowed_bytes": limit / 0.9, "configuration": setting(kept)}
    (found,) = judged({"swept": SWEPT, "tunings": [tuning]})
    assert (found["is_found"], found["is_over"]) == (is_found, is_over)
    assert found["best"] == setting(2 if limit == 125 else 4)
