"""Tunings of a sharded model whose memory is limited: whether each found the best that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.support.harness import print_table

SHARE = 0.9
AS_GOOD = 1.03
"""So many times as long as with the best that fits a step may take with what was found."""
OUT_OF_MEMORY = "OutOfMemoryError"


def judged(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each tuning with the best of the sweep that fits, and how much slower its own is."""
    return [{**tuning, **_judge(tuning, found["swept"])} for tuning in found["tunings"]]


def _judge(tuning: Mapping[str, Any], swept: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    limit_bytes = SHARE * tuning["allowed_bytes"]
    fitting = [each for each in swept if each["peak_bytes"] <= limit_bytes] or swept[:1]
    best = min(fitting, key=lambda each: each["seconds"])
    own = next((e for e in swept if e["configuration"] == tuning["configuration"]), None)
    ratio = own["seconds"] / best["seconds"] if own is not None else None
    is_over = own is not None and own is not swept[0] and own["peak_bytes"] > limit_bytes
    return {
        "best": best["configuration"],
        "ratio": ratio,
        "is_found": ratio is not None and ratio <= AS_GOOD and not is_over,
        "is_over": is_over,
    }


def show(found: Mapping[str, Any], tunings: Sequence[Mapping[str, Any]]) -> None:
    """Print what was swept, what each tuning found, and whether there was ever too little
    memory."""
    print_table(
        ["by hand", "ms per step", "peak MiB"],
        [
            [
                _said(e["configuration"]),
                f"{1e3 * e['seconds']:.0f}",
                f"{e['peak_bytes'] / 2**20:.0f}",
            ]
            for e in found["swept"]
        ],
    )
    print_table(
        ["limit MiB", "found", "best that fits", "times as long", "steps", "seconds"],
        [
            [
                f"{SHARE * each['allowed_bytes'] / 2**20:.0f}",
                _said(each["configuration"]),
                _said(each["best"]),
                "-" if each["ratio"] is None else f"{each['ratio']:.2f}",
                str(each["steps"]),
                f"{each['seconds']:.0f}",
            ]
            for each in tunings
        ],
    )


def _said(configuration: Mapping[str, Any]) -> str:
    return f"kept {configuration['kept_units']}, channels {configuration['channels']}"
