"""What ``bagua-autotune check`` says of figures, and how it tells to start a tuned job."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from bagua_autotune.model.job import JobSpec
from bagua_runs.check import (
    Exposure,
    Figures,
    Recomputed,
    _figures,
    _lines,
    prospect,
    tuned_command,
)
from tests.autotune.simulated_job import KNOBS, truth
from tests.autotune.tuning.jobs import simulator

LAUNCHER = "-m bagua_client --autotune"


def figures(computing_seconds: float, exposed_seconds: float, models: int = 1) -> Figures:
    step_seconds = computing_seconds + exposed_seconds
    return Figures(
        step_seconds=step_seconds,
        computing_seconds=computing_seconds,
        communication_seconds=0.23,
        exposed_seconds=exposed_seconds,
        exposed_share=exposed_seconds / step_seconds,
        most_speedup=step_seconds / computing_seconds,
        steps=60,
        ranks=4,
        nodes=2,
        backend="nccl",
        device="NVIDIA H200",
        models=models,
        most_speedup_of={},
    )


def test_a_step_is_one_line_and_what_follows_from_it_another() -> None:
    step, advice = _lines(figures(0.290, 0.122), ["torchrun", "train.py"])
    assert step == (
        "step 412 ms on 4 ranks of 2 nodes (NVIDIA H200, nccl; median of 60 steps): computing "
        "290 ms, communication 230 ms, of which 122 ms (30 %) is exposed"
    )
    assert advice == f"Worth tuning, at most 1.42x could be gained: torchrun {LAUNCHER} train.py"


@pytest.mark.parametrize(
    ("exposed_seconds", "advice"),
    [
        (0.001, "Nothing to gain: 1 % of a step is exposed communication."),
        (0.005, "Little to gain, at most 1.05x: 5 % of a step is exposed communication."),
    ],
)
def test_a_small_share_is_not_worth_a_tuning(exposed_seconds: float, advice: str) -> None:
    assert _lines(figures(0.1, exposed_seconds), ["torchrun", "train.py"])[-1] == advice


def test_a_search_whose_gain_could_not_be_shown_is_not_advised() -> None:
    """A bound of 1.69x says little where 1.03x is likely and steps vary by an eighth."""
    found = replace(
        figures(0.1, 0.069), likely_speedup=(1.01, 1.03), shown_speedup=1.07, step_spread=0.12
    )
    assert found.verdict == "not_shown"
    assert _lines(found, ["torchrun", "train.py"])[-1] == (
        "Not worth a search: at most 1.69x is possible, 1.01x to 1.03x is likely, and steps vary "
        "by 12 %, so that less than 1.07x could not be shown."
    )
    much = replace(found, likely_speedup=(1.02, 1.3))
    assert _lines(much, ["torchrun", "train.py"])[-1] == (
        f"Worth tuning, at most 1.69x could be gained, 1.02x to 1.30x is likely: torchrun "
        f"{LAUNCHER} train.py"
    )
    unknown = replace(found, likely_speedup=None, shown_speedup=1.8)
    assert "at most 1.69x is possible, and steps vary" in _lines(unknown, ["./train.sh"])[-1]
    assert replace(unknown, shown_speedup=1.5).verdict == "worth_tuning"


def test_what_is_likely_comes_from_the_cost_model_and_what_is_shown_from_the_noise() -> None:
    """A simulated job, steady and noisy."""
    usual = simulator()
    default, *others = truth(usual).items()
    spec = JobSpec(
        name="check",
        world_size=8,
        ranks_per_node=(2,) * 4,
        tensors=tuple(usual.tensors),
        knobs={knob: usual.space[knob] for knob in KNOBS},
        default_configuration=dict(default[0]),
        fingerprint="f",
    )
    told = json.loads(spec.model_dump_json(exclude={"team"}))
    profile = asdict(usual.profile(default[0]))
    steady = prospect([0.2, 0.201] * 10, told, [profile])
    truly = default[1] / min(seconds for _, seconds in others)
    assert steady.speedup is not None
    assert 1 <= steady.speedup[0] < truly < steady.speedup[1]
    noisy = prospect([0.2, 0.26, 0.23, 0.31] * 5, None, [])
    assert noisy.speedup is None, "an earlier client tells no job"
    assert 1.01 < steady.shown_speedup < noisy.shown_speedup
    assert noisy.step_spread > 10 * steady.step_spread


def test_fewer_bytes_bring_no_more_than_the_time_in_which_they_travel() -> None:
    """Of 0.3 s of communication, 0.1 s are exposed; half the bytes would save 0.15 s of it."""
    measure = Exposure(10, 10.0, lambda _: None)
    few, many = [[0.5, 0.4, 0.3]] * 10, [[0.5, 0.1, 0.4]] * 10
    facts = {"ranks": 2, "nodes": 1, "backend": "gloo", "device": "cpu", "models": 1, "seen": []}
    facts |= {"kind": "replicated", "backward_passes": 1}
    shares = {"bits16": 0.5, "bits8": 0.25}
    measure.facts = {**facts, "steps": few, "shares": shares}
    assert _figures(measure).most_speedup_of == pytest.approx({"bits16": 1.25, "bits8": 1.25})
    measure.facts = {**facts, "steps": many, "shares": shares}
    assert _figures(measure).most_speedup_of == pytest.approx({"bits16": 5 / 3, "bits8": 2.5})
    # Where it is not known how long they travel.
    measure.facts = {**facts, "steps": [[0.5, 0.1, None]] * 10, "shares": shares}
    assert _figures(measure).most_speedup_of == {}


def test_models_that_are_not_measured_are_told() -> None:
    assert "wraps 2 models" in _lines(figures(0.1, 0.1, models=2), ["./train.sh"])[1]


@pytest.mark.parametrize(
    ("command", "tuned"),
    [
        ("torchrun --standalone train.py --lr 1", "torchrun --standalone {} train.py --lr 1"),
        ("torchrun -m package.train -m 3", "torchrun {} -m package.train -m 3"),
        ("python -u train.py", "python -u {} train.py"),
        ("python -m torch.distributed.run train.py", "python -m torch.distributed.run {} train.py"),
        ("python -m torch.distributed.run -m train", "python -m torch.distributed.run {} -m train"),
        ("./train.py", "python {} ./train.py"),
        ("accelerate launch train.py", "accelerate launch {} train.py"),
        ("./train.sh", ""),
    ],
)  # fmt: skip
def test_the_launcher_goes_before_the_script(command: str, tuned: str) -> None:
    assert tuned_command(command.split()) == tuned.format(LAUNCHER)


GIB = 2**30


@pytest.mark.parametrize(
    ("kept_gib", "left_alone", "most", "verdict"),
    [
        (25, "", 1.25, "worth_tuning"),
        (200, "", 1.12, "worth_tuning"),
        (25, "recomputed blocks: blocks write buffers", 1.0, "nothing_to_gain"),
    ],
)
def test_what_is_recomputed_can_be_kept_as_far_as_there_is_room(
    kept_gib: int, left_alone: str, most: float, verdict: str
) -> None:
    """Of one process, which has nothing else to gain."""
    told = Recomputed(16, 0.08, kept_gib * GIB, left_alone, 20 * GIB, 126 * GIB, 140 * GIB)
    found = replace(figures(0.4, 0.0), ranks=1, nodes=1, backend="", recomputed=told)
    assert found.most_gained == pytest.approx(most, abs=0.02)
    assert found.verdict == verdict
    step, memory, advice = _lines(found, ["python", "train.py"])
    assert step == "step 400 ms of one process (NVIDIA H200; median of 60 steps)"
    assert "120 GiB of 140 GiB are free at the peak" in memory
    assert "recomputing 16 blocks takes 80 ms (20 %) of a step" in memory
    assert (left_alone or "at most 1.") in memory
    assert ("Worth tuning" in advice) == (verdict == "worth_tuning")


def test_what_is_not_known_of_recomputing_promises_nothing() -> None:
    for unknown in (
        Recomputed(0, None, None, ""),
        Recomputed(4, None, GIB, ""),
        Recomputed(4, 0.1, GIB, "", 20 * GIB, 10 * GIB, 21 * GIB),
    ):
        assert unknown.most_speedup(0.4) == 1.0
