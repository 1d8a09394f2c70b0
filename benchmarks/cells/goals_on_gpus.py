"""What cells on GPUs must show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .figures import Figures
from .goal import Check, Goal, every, mean_speedup, with_interval

OVER_BEST = 1.05
OVER_SOCKETS = 1.01
TUNING_STEPS = 250
Places = Mapping[tuple[str, str], float]
EXACT: Places = {
    ("vgg16", "unshaped"): 3.2,
    ("bert-base", "unshaped"): 2.4,
    ("gpt2-small", "unshaped"): 1.9,
    ("resnet50", "unshaped"): 1.4,
}
"""Of model and network: how many times as fast as stock DDP's default at least."""
ALLOWED: Places = {
    ("vgg16", "unshaped"): 5.0,
    ("bert-base", "unshaped"): 2.7,
    ("gpt2-small", "unshaped"): 2.1,
    ("resnet50", "10gbit"): 1.65,
    ("bert-base", "10gbit"): 1.8,
}
"""The same where gradients may travel in 16 bits."""


def goals_on_gpus(cells: Sequence[Figures]) -> list[Goal]:
    """All of them; at least one cell."""
    with_sockets = [cell for cell in cells if cell.beside.sockets]
    best_sockets = "tuned over stock DDP with the best socket variables at most"
    return [
        every(1, f"tuned over the sweep's best at most {OVER_BEST}", cells, _over_best),
        every(1, f"{best_sockets} {OVER_SOCKETS}", with_sockets, _over_sockets),
        _exact(cells),
        _allowed(cells),
        every(3, f"tuning takes at most {TUNING_STEPS} steps", cells, _steps),
    ]


def _over_best(cell: Figures) -> Check:
    found = cell.tuned_over_best
    return found.paired_ratio, with_interval(found), found.paired_ratio <= OVER_BEST


def _over_sockets(cell: Figures) -> Check:
    assert cell.beside.sockets is not None
    found = cell.beside.sockets.tuned_over
    return found.paired_ratio, with_interval(found), found.paired_ratio <= OVER_SOCKETS


def _steps(cell: Figures) -> Check:
    """Of the longer one of its tunings."""
    tunings = [cell.tuning, *([cell.beside.allowed.tuning] if cell.beside.allowed else [])]
    steps = max(int(tuning["tuning_steps"]) for tuning in tunings)
    ended = all(tuning["ended"] and tuning["stored"]["result"] for tuning in tunings)
    words = f"{steps} steps" if ended else f"no result after {steps} steps"
    return steps, words, ended and steps <= TUNING_STEPS


def _exact(cells: Sequence[Figures]) -> Goal:
    first = _first(cells)
    over_stock = mean_speedup(cell.over_stock for cell in first)
    over_best = mean_speedup(cell.over_best_stock for cell in first)
    beside = f"; geometric means of all {len(first)} cells: {over_stock:.3f}, and {over_best:.3f} "
    beside += "over stock DDP at its best size"
    found = {_place(cell): cell.over_stock.found.paired_ratio for cell in first}
    return _wanted("speed-up over stock DDP's default", EXACT, found, beside)


def _allowed(cells: Sequence[Figures]) -> Goal:
    found = {
        _place(cell): allowed.over_stock.paired_ratio
        for cell in _first(cells)
        if (allowed := cell.beside.allowed)
    }
    return _wanted("the same with 16 bits allowed", ALLOWED, found)


def _first(cells: Sequence[Figures]) -> list[Figures]:
    return [cell for cell in cells if cell.cell.run == 1]


def _place(cell: Figures) -> tuple[str, str]:
    return cell.cell.model, cell.cell.network


def _wanted(what: str, least: Places, found: Places, beside: str = "") -> Goal:
    asked = ", ".join(f"{'/'.join(place)} {value:g}" for place, value in least.items())
    measured = {place: found[place] for place in least if place in found}
    words = [
        f"{'/'.join(place)} {value:.2f}{'' if value >= least[place] else ' (too little)'}"
        for place, value in measured.items()
    ]
    missing = ["/".join(place) for place in least if place not in found]
    if missing:
        words.append(f"not measured: {', '.join(missing)}")
    is_met = all(value >= least[place] for place, value in measured.items()) if measured else None
    return Goal(2, f"{what} at least {asked}", ", ".join(words) + beside, is_met)
