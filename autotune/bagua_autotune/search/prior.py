"""What is believed of the candidates' costs before they are measured."""

from __future__ import annotations

from typing import NamedTuple

from bagua_autotune.search.points import Floats


class Prior(NamedTuple):
    """What the cost model says of the points: means, and how wrong they may be; see Predictor."""

    means: Floats
    deviations: Floats
    misfit: float
