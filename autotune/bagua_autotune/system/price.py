"""What a search cost, and when that is earned."""

from __future__ import annotations

import math

from bagua_autotune.model.statistics import Interval
from bagua_autotune.model.text import describe_seconds


def describe_price(seconds: float, gpus: int, gain: Interval | None) -> str:
    """Return one line: ``spent 34 GPU-minutes (17.0 min on 2 GPUs); pays after 3.1 h of training at
    1.09x (2.4 h to 5.0 h)``.

    Args:
        seconds: that the search took.
        gpus: on which it ran; 0: that is not known, or there are none.
        gain: of the settings that are kept, how many times as fast they are; None: the user's own
            settings stay, which pays nothing.
    """
    spent = describe_seconds(seconds)
    if gpus:
        minutes = gpus * seconds / 60
        number = f"{minutes:.3g}" if minutes < 100 else f"{minutes:.0f}"
        spent = f"{number} GPU-minutes ({spent} on {gpus} GPU{'s' if gpus > 1 else ''})"
    if gain is None:
        return f"spent {spent}"
    paid = [pays_after_seconds(seconds, times) for times in (gain.center, gain.high, gain.low)]
    center, soonest, latest = (
        "never" if math.isinf(each) else describe_seconds(each) for each in paid
    )
    between = f" ({soonest} to {latest})" if soonest != latest else ""
    return f"spent {spent}; pays after {center} of training at {gain.center:.2f}x{between}"


def pays_after_seconds(seconds: float, speedup: float) -> float:
    """How long it takes to train at this speed-up until it has saved so many seconds: in a second
    it does what took ``speedup`` seconds before."""
    return seconds / (speedup - 1) if speedup > 1 else math.inf
