"""The JSON of cells that never ran, with the step times that a test wants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bagua_client import Configuration
from benchmarks.support.cells.cell import (
    FULL,
    ON_GPUS,
    TUNED,
    TUNED_ALLOWED,
    Cell,
    ours,
    run_off_arms,
    sweep_arms,
)
from benchmarks.support.harness import spread

MIB = 1024 * 1024
JITTER = (0.0, 0.002, -0.001, 0.001)


def blocks(seconds: float, rounds: int, steps: int) -> list[list[float]]:
    """Around a median, always the same ones."""
    return [
        [seconds * (1 + JITTER[(r + s) % len(JITTER)]) for s in range(steps)] for r in range(rounds)
    ]


def made_up_cell(
    cell: Cell,
    step_seconds: Mapping[str, float],
    configuration: Configuration | None = None,
    run_off: Sequence[str] | None = None,
    allow: str = "",
    **changes: Any,
) -> dict[str, Any]:
    """Every arm takes 1.0 s, computing alone 0.5 s, unless ``step_seconds`` says otherwise.

    Args:
        run_off: the arms of stage 2, if others than the bench would choose.
        allow: what a second tuning might send with; none if empty.
    """
    tuned = configuration or Configuration(5 * MIB, "leaders")
    effort = ON_GPUS if cell.device == "cuda" else FULL
    arms = [*sweep_arms(cell, effort), ours(TUNED, tuned.to_json())]
    if allow:
        arms.append(ours(TUNED_ALLOWED, Configuration(25 * MIB, wire_precision="bf16").to_json()))
    times = {arm["name"]: 1.0 for arm in arms} | {"compute": 0.5} | dict(step_seconds)
    sweep = {name: blocks(seconds, 3, 2) for name, seconds in times.items()}
    spreads = {name: spread(measured) for name, measured in sweep.items()}
    chosen = run_off or [arm["name"] for arm in run_off_arms(arms, spreads, cell, effort)]
    result = {"trials": 7, "cost_steps": 4.5, "cost_seconds": 4.5, "kept": "winner"}
    stored = {"state": "finished", "round": 0, "result": result, "trials": []}
    tuning = {"tuning_steps": 130, "tuning_seconds": 130.0, "ended": True, "stored": stored}
    tuning["step_seconds"] = [1.4] * 131 + [3.0, 2.0] + [times["tuned"]] * 8
    tuning["configurations"] = [[0, {}], [13, {}], [123, {}]]
    return {
        "cell": cell.to_json(),
        "effort": effort.to_json(),
        "conditions": {"link": None, "kernel": "6.1", "processor": "made up", "commit": None},
        "fallback": None,
        "arms": {arm["name"]: arm for arm in arms},
        "sweep": {"arms": sweep},
        "run_off": {"arms": {name: blocks(times[name], 6, 4) for name in chosen}},
        "tuning": tuning,
        "allowed": {**tuning, "tuning_steps": 160} if allow else None,
        "seconds": {"tune": 140.0, "sweep": 200.0, "run_off": 100.0, "total": 450.0},
        **changes,
    }


GOOD = {
    "stock default": 1.4,
    "flat 10 MiB": 1.3,
    "flat 5 MiB": 1.25,
    "leaders 5 MiB": 1.0,
    "leaders 10 MiB": 1.05,
    "tuned": 1.01,
    "flat 1 MiB": 1.35,
    "flat 128 KiB": 1.5,
    "flat 512 KiB": 1.45,
    "flat 2 MiB": 1.3,
    "flat 25 MiB": 1.5,
    "flat 50 MiB": 1.6,
}
"""Of a cell that shows all it should: reducing by node wins, at 5 MiB."""
