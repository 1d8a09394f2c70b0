"""Why a job was left with what it has and why a trial failed: for people, and as a code for
programs."""

from __future__ import annotations

from bagua_autotune.model.job import EarlierTrial, Trial
from bagua_wire.messages import DISAGREED

# Why the default is kept.
NOTHING_FASTER = "nothing was clearly faster"
ONLY_DEFAULT = "only the default was measured"
ONE_SAMPLE = f"{ONLY_DEFAULT} (BAGUA_AUTOTUNE_MAX_SAMPLES=1)"
NOT_SHOWN = "no gain could be shown"
TIME_WAS_UP = "BAGUA_AUTOTUNE_MAX_MINUTES was over"
BEST_BEFORE = "it was the best in an earlier run"
NOTHING_FITS = "nothing else fits in memory"
NOTHING_TO_TRY = "there is nothing else to try"
TOO_FEW_STEPS = "too few steps remain to make up for a search"
# The same for programs.
WINNER_CODE = "winner"
DISAGREEMENT_CODE = "disagreement"
DIVERGED_CODE = "diverged"
INFEASIBLE_CODE = "infeasible"
OTHER_CODE = "other"
RUN_FAILED_CODE = "run_failed"
RUN_FAILED = "the run failed"
"""Of a search with whole runs; the reason follows behind a colon."""
HARM = "the training suffered"
LASTING_HARM = f"{HARM} in the long run"
"""Of what was kept, and harmed the training only then."""
NO_REASON = "no reason given"
# By the event with which ranks give up what they run: what happened, and its code.
GIVING_UP = {
    "disagreement": ("the ranks disagreed", DISAGREEMENT_CODE),
    "diverged": (HARM, DIVERGED_CODE),
    "infeasible": ("the memory did not suffice", INFEASIBLE_CODE),
}
REASON_CODES = {
    NOTHING_FASTER: "nothing_faster",
    NOT_SHOWN: "nothing_faster",
    f"{NOTHING_FASTER} before {TIME_WAS_UP}": "nothing_faster",
    ONE_SAMPLE: "only_default",
    f"{ONLY_DEFAULT} before {TIME_WAS_UP}": "only_default",
    BEST_BEFORE: "earlier_best",
    NOTHING_FITS: INFEASIBLE_CODE,
    NOTHING_TO_TRY: "nothing_to_try",
    TOO_FEW_STEPS: "too_few_steps",
    DISAGREED: DISAGREEMENT_CODE,
}


def failure_code(failure: str) -> str:
    """Why a trial failed, for programs."""
    if failure.startswith(RUN_FAILED):
        return RUN_FAILED_CODE
    return DIVERGED_CODE if failure.startswith(HARM) else DISAGREEMENT_CODE


def did_lasting_harm(trial: Trial | EarlierTrial) -> bool:
    """Whether the training suffered from a configuration after it was kept."""
    return (trial.failure or "").startswith(LASTING_HARM)
