"""``bagua-autotune check``: how much a tuning could gain at most, from a short run of the job."""

from __future__ import annotations

import json
import logging
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

from bagua_autotune.cli.output import INTERRUPTED, say, say_beside
from bagua_autotune.costs import Layouts, Predictor, ShardedModel, fit_model, is_sharded, kinds_of
from bagua_autotune.deciding.ending import least_shown
from bagua_autotune.measuring.visits import Visits
from bagua_autotune.model.job import JobSpec, Observation, Trial
from bagua_autotune.model.received import PROFILE
from bagua_autotune.model.statistics import estimate
from bagua_autotune.model.text import describe_seconds
from bagua_autotune.search.candidates import enumerate_candidates, travels_in_stripes
from bagua_autotune.views.steps import exposed_seconds, step_seconds
from bagua_runs.hindrances import Hindrance, hindrances
from bagua_runs.job import Interrupted, Job, stopping
from bagua_runs.outcomes import Outcome, StepTimes, read_document
from bagua_wire.configuration import Configuration
from bagua_wire.knob_kinds import describe_bytes

# Below so many times what remains without exposed communication: no gain that a job shows, and
# none that is worth much.
NOTHING, LITTLE = 1.02, 1.10
TOLD = ("ranks", "nodes", "backend", "device", "models", "kind", "backward_passes")
WAYS = {"bits16": "16 bits", "bits8": "8 bits", "powersgd": "PowerSGD of rank 1"}


@dataclass(frozen=True)
class Recomputed:
    """What a rank recomputes in a step, and its device's memory; None: that is not known.

    Attributes:
        blocks: that recompute their activations, and could keep them.
        seconds: of a step, that this takes.
        kept_bytes: what all of them would keep, at most.
        peak_bytes: what the training takes at its peak.
        limit_bytes: what it may take.
        device_bytes: what there is.
        left_alone: why blocks have to be recomputed; empty: nothing forbids to keep them.
    """

    blocks: int
    seconds: float | None
    kept_bytes: int | None
    left_alone: str
    peak_bytes: int | None = None
    limit_bytes: int | None = None
    device_bytes: int | None = None

    def most_speedup(self, step_seconds: float) -> float:
        """If as many blocks kept their activations as there is room for; 1 where that is not
        known."""
        if not self.seconds or self.left_alone:
            return 1.0
        share = 1.0
        if self.kept_bytes and self.peak_bytes is not None and self.limit_bytes is not None:
            share = min(max(self.limit_bytes - self.peak_bytes, 0) / self.kept_bytes, 1.0)
        return step_seconds / max(step_seconds - share * self.seconds, 1e-9)

    def words(self, step_seconds: float) -> str:
        """A line for people."""
        parts = []
        if self.peak_bytes is not None and self.device_bytes is not None:
            free = describe_bytes(max(self.device_bytes - self.peak_bytes, 0))
            parts.append(
                f"memory: {free} of {describe_bytes(self.device_bytes)} are free at the peak"
            )
        if self.blocks and self.seconds is not None:
            percent = 100 * self.seconds / step_seconds
            parts.append(
                f"recomputing {self.blocks} blocks takes {describe_seconds(self.seconds)} "
                f"({percent:.0f} %) of a step"
            )
        if self.kept_bytes:
            parts.append(f"keeping their activations takes up to {describe_bytes(self.kept_bytes)}")
        if self.left_alone:
            parts.append(f"left alone: {self.left_alone}")
        elif self.most_speedup(step_seconds) > 1:
            parts.append(f"at most {self.most_speedup(step_seconds):.2f}x by keeping them")
        return "; ".join(parts)


@dataclass(frozen=True)
class Figures:
    """Medians over the measured steps, in seconds.

    Attributes:
        step_seconds: of the slowest rank.
        computing_seconds: what is not exposed communication: passes forward and backward, the
            optimizer, waiting for data; of the rank that computes longest.
        communication_seconds: in which gradients travelled; None: not known.
        exposed_seconds: of it, in which no rank had anything else to do; with it, the broadcasts
            of buffers.
        exposed_share: of the step.
        most_speedup: if no communication were exposed any more.
        models: wrapped by each process; only the first is measured.
        most_speedup_of: what fewer bytes on the wire could bring at most, by the key of WAYS: if
            communication took as much less time as it sends fewer bytes, and all of that came off
            what is exposed. Empty: that is not known.
        likely_speedup, shown_speedup, step_spread: see Prospect; the first is at most
            ``most_speedup``.
        hindrances: what keeps communication from running beside computing, as far as it was seen.
        recomputed: of the rank that wrote last; None: nobody told.
        kind: of the model: ``replicated``, ``sharded``, ``zero`` or ``single``.
        backward_passes: of a step, that communicate.
    """

    step_seconds: float
    computing_seconds: float
    communication_seconds: float | None
    exposed_seconds: float
    exposed_share: float
    most_speedup: float
    steps: int
    ranks: int
    nodes: int
    backend: str
    device: str
    models: int
    most_speedup_of: dict[str, float] = field(default_factory=dict)
    likely_speedup: tuple[float, float] | None = None
    shown_speedup: float = 1.0
    step_spread: float = 0.0
    hindrances: list[Hindrance] = field(default_factory=list)
    recomputed: Recomputed | None = None
    kind: str = "replicated"
    backward_passes: int = 1

    @property
    def most_kept_speedup(self) -> float:
        """By keeping activations that are recomputed."""
        return self.recomputed.most_speedup(self.step_seconds) if self.recomputed else 1.0

    @property
    def most_gained(self) -> float:
        """By both: no step is shorter than what is left of it."""
        kept = self.step_seconds * (1 - 1 / self.most_kept_speedup)
        return self.step_seconds / max(self.computing_seconds - kept, 1e-9)

    @property
    def verdict(self) -> str:
        """The result in one word, for programs."""
        if self.most_gained < NOTHING:
            return "nothing_to_gain"
        if self.most_gained < LITTLE:
            return "little_to_gain"
        likely = self.likely_speedup[1] if self.likely_speedup else self.most_speedup
        likely = max(likely, self.most_kept_speedup)
        return "not_shown" if likely < max(self.shown_speedup, NOTHING) else "worth_tuning"


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--steps", type=click.IntRange(5), default=60, show_default=True,
              help="Steps to measure; then the run is ended.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(0, min_open=True), default=60.0,
              show_default=True,
              help="End the run, too, once the measured steps took so long in all.")  # fmt: skip
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=300.0,
              show_default=True, metavar="SECONDS",
              help="End the run after so long in any case.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def check(
    steps: int, seconds: float, timeout: float, as_json: bool, command: Sequence[str]
) -> None:
    """Say how much faster COMMAND could train, at most and likely, if it were tuned. What it sends
    and which activations it recomputes may be.

    Runs it, measures some steps after a warm-up, and ends it with all the processes that it
    started. What it writes until then, such as logs and checkpoints, it writes. The script stays as
    it is, and so do the numbers that it computes: nothing is tuned.

    Exposed communication is what a step waits for after the last gradient is ready, and for
    broadcasts of buffers; on GPUs the device's own clock says how long. All else counts as
    computing: waiting for data and the optimizer, too. A warning names what keeps communication
    from running beside computing, such as a variable for debugging that was left set. A job of
    several machines is started so on each of them.

    Of a training of one process, and of any that recomputes activations, it tells what memory is
    free at the peak and what recomputing takes of a step.

    For example: bagua-autotune check -- torchrun --nproc-per-node 4 train.py
    """
    measure = Exposure(steps, seconds, _tell_first)
    with stopping() as signals:
        try:
            outcome = Job(command, measure, lambda: bool(signals))({}, timeout)
        except Interrupted:
            raise click.exceptions.Exit(INTERRUPTED) from None
    if not measure.steps:
        _tell_failure(outcome, command)
        raise click.exceptions.Exit(outcome.exit_code or 1)
    if outcome.failure:
        say_beside(f"the command {outcome.failure}; these are the steps before that")
    figures = _figures(measure)
    if as_json:
        document = {"verdict": figures.verdict, **asdict(figures)}
        click.echo(json.dumps(document, indent=2))
        return
    for line in _lines(figures, command):
        say(line)


def _figures(measure: Exposure) -> Figures:
    """Raises click.ClickException where the ranks could not tell what they compute."""
    steps, facts = measure.steps, measure.facts
    observations = [
        Observation(number, (seconds,), (computing,))
        for number, (seconds, computing, _) in enumerate(steps)
        if computing is not None
    ]
    took, exposed = step_seconds(observations), exposed_seconds(observations, [])
    if took is None or exposed is None:
        raise click.ClickException(
            "computing and communication cannot be told apart: the model is on several devices, or "
            f"on another than {facts['backend']} communicates from"
        )
    travelled = [travelling for _, _, travelling in steps if travelling is not None]
    computing_seconds = took - exposed
    communicating = max(median(travelled), exposed) if travelled else None
    saved = {
        way: (1 - share) * communicating
        for way, share in facts["shares"].items()
        if communicating is not None
    }
    most_speedup = took / max(computing_seconds, 1e-9)
    slowest = [each.values[0] for each in observations if each.values[0]]
    found = prospect(slowest, facts.get("job"), facts.get("profiles", []))
    likely = None
    if found.speedup is not None:
        low, high = found.speedup
        likely = min(low, most_speedup), min(high, most_speedup)
    return Figures(
        step_seconds=took,
        computing_seconds=computing_seconds,
        communication_seconds=communicating,
        exposed_seconds=exposed,
        exposed_share=exposed / took,
        most_speedup=most_speedup,
        likely_speedup=likely,
        shown_speedup=found.shown_speedup,
        step_spread=found.step_spread,
        steps=len(observations),
        most_speedup_of={
            way: took / max(took - seconds, computing_seconds, 1e-9)
            for way, seconds in saved.items()
        },
        hindrances=hindrances(facts),
        recomputed=Recomputed(**told) if (told := facts.get("recomputing")) else None,
        **{name: facts[name] for name in TOLD},
    )


def _lines(figures: Figures, command: Sequence[str]) -> list[str]:
    nodes = "1 node" if figures.nodes == 1 else f"{figures.nodes} nodes"
    share = f"{figures.exposed_share * 100:.0f} %"
    exposed = f"{describe_seconds(figures.exposed_seconds)} ({share})"
    communication = f"exposed communication {exposed}"
    if figures.communication_seconds is not None:
        all_of_it = describe_seconds(figures.communication_seconds)
        communication = f"communication {all_of_it}, of which {exposed} is exposed"
    found = [
        f"step {describe_seconds(figures.step_seconds)} on {figures.ranks} ranks of {nodes} "
        f"({figures.device}, {figures.backend}; median of {figures.steps} steps): "
        f"computing {describe_seconds(figures.computing_seconds)}, {communication}"
    ]
    if figures.ranks == 1:
        found = [
            f"step {describe_seconds(figures.step_seconds)} of one process ({figures.device}; "
            f"median of {figures.steps} steps)"
        ]
    if figures.recomputed and (words := figures.recomputed.words(figures.step_seconds)):
        found.append(words)
    if figures.backward_passes > 1 and figures.ranks > 1:
        found.append(_accumulating(figures))
    if figures.models > 1:
        found.append(
            f"Each process wraps {figures.models} models: only the first is measured, and what the "
            "others communicate counts as computing."
        )
    found += map(_warning, figures.hindrances)
    if figures.most_speedup_of and figures.verdict != "nothing_to_gain":
        found.append(_fewer_bytes(figures.most_speedup_of))
    return [*found, _advice(figures, command)]


def _accumulating(figures: Figures) -> str:
    """What it costs to communicate in more than one backward pass of a step."""
    passes = figures.backward_passes
    saved = (1 - 1 / passes) * figures.exposed_seconds
    advice = "run all but the last under model.no_sync(), which leaves the others' out"
    if figures.kind == "sharded":
        advice = (
            "what one has gathered may be kept for the others (kept_over_micro_batches), and "
            "gradients be reduced in the last alone (deferred_reduction): docs/sharded.md"
        )
    return (
        f"Each step has {passes} backward passes that communicate: up to "
        f"{describe_seconds(saved)} ({100 * saved / figures.step_seconds:.0f} %) of a step is "
        f"waiting in all but one of them. If they accumulate gradients, {advice}"
    )


def _warning(found: Hindrance) -> str:
    return (
        f"Warning: {found.name}: {found.seen}. What it does: {found.costs}. What to do: "
        f"{found.advice}. Source: {found.source}"
    )


def _fewer_bytes(most_speedup_of: Mapping[str, float]) -> str:
    ways = [
        f"{words} {most_speedup_of[way]:.2f}x"
        for way, words in WAYS.items()
        if way in most_speedup_of
    ]
    return (
        f"Fewer bytes on the wire could bring at most: {', '.join(ways)}. That changes the "
        "numbers; docs/algorithms.md says what is tried, and when."
    )


def _advice(figures: Figures, command: Sequence[str]) -> str:
    share = f"{figures.exposed_share * 100:.0f} % of a step is exposed communication"
    if figures.ranks == 1:
        share = "one process communicates nothing"
    if figures.recomputed is not None:
        kept = (figures.most_kept_speedup - 1) * 100
        share += f", and {kept:.0f} % is gained by keeping what is recomputed"
    if figures.verdict == "nothing_to_gain":
        return f"Nothing to gain: {share}."
    most = f"at most {figures.most_gained:.2f}x"
    if figures.verdict == "little_to_gain":
        return f"Little to gain, {most}: {share}."
    likely = ""
    if figures.likely_speedup is not None and figures.most_kept_speedup < NOTHING:
        likely = ", {:.2f}x to {:.2f}x is likely".format(*figures.likely_speedup)
    if figures.verdict == "not_shown":
        return (
            f"Not worth a search: {most} is possible{likely}, and steps vary by "
            f"{figures.step_spread * 100:.2g} %, so that less than {figures.shown_speedup:.2f}x "
            "could not be shown."
        )
    started = tuned_command(command)
    how = f": {started}" if started else "; docs/launching.md says how to start it"
    return f"Worth tuning, {most} could be gained{likely}{how}"


def tuned_command(command: Sequence[str]) -> str:
    """A training's command with our launcher before its script; empty where no script is found."""
    for place, word in enumerate(command):
        following = command[place + 1] if place + 1 < len(command) else ""
        is_launcher = following.startswith(("torch.distributed.", "accelerate.", "bagua_client"))
        if word.endswith(".py") or (word == "-m" and following and not is_launcher):
            python = ["python"] if place == 0 else []
            launcher = [*python, "-m", "bagua_client", "--autotune"]
            return shlex.join([*command[:place], *launcher, *command[place:]])
    return ""


def _tell_failure(outcome: Outcome, command: Sequence[str]) -> None:
    say_beside(f"Error: the command {outcome.failure}")
    if outcome.exit_code is not None:
        say_beside(f"No step was measured. First make this run: {shlex.join(command)}")
    if outcome.last_lines:
        say_beside("The last that it printed:")
    for line in outcome.last_lines:
        say_beside(f"    {line}")


def _tell_first(seconds: float) -> None:
    say_beside(f"measuring: the first steps took {describe_seconds(seconds)} each")


# How much of a step is communication that computing does not hide, as the job's ranks measure it
# under this project's subclass of DistributedDataParallel, which is put in torch's place: see
# bagua_client.checking.check.

CHECK_FILE = "check.json"
PROBED_STEPS = 10
"""Steps after the warm-up that show that no DistributedDataParallel is in the job."""
NEEDED_STEPS = 10
"""Steps of the training until there are some to read: the warm-up, and the first block."""
SHARDED = "only DistributedDataParallel has buckets to tune"
WHY_NOT = {
    "FullyShardedDataParallel": f"the model is sharded by FSDP; {SHARDED}",
    "FSDPModule": "fully_shard was called in a way that the launcher does not follow",
    "DeepSpeedEngine": "DeepSpeed was imported in a way that the launcher does not follow",
}


class Exposure:
    """See ``measures.Measure``; the score is the time of a step.

    Args:
        steps: so many end the run,
        seconds: or those that take so long together.
        tell: is called when the first steps are measured, with the time of one.

    Attributes:
        facts: what the ranks have written; see bagua_client.checking.check.
    """

    def __init__(self, steps: int, seconds: float, tell: Callable[[float], None]) -> None:
        self._steps = steps
        self._seconds = seconds
        self._tell = tell
        self._has_told = False
        self._probe = StepTimes(PROBED_STEPS)
        self.facts: Mapping[str, Any] = {}

    @property
    def steps(self) -> Sequence[tuple[float, float | None, float | None]]:
        """Return for each step, in seconds: the time of the slowest rank, how long the rank
        computed that computed longest, and how long buckets travelled; None: that was not measured.
        """
        return [tuple(step) for step in self.facts.get("steps", [])]

    def environment(self, folder: Path) -> dict[str, str]:
        """See Measure."""
        return {
            **self._probe.environment(folder),
            "BAGUA_REPLACES_DDP": "1",
            "BAGUA_AUTOTUNE_CHECK": str(folder / CHECK_FILE),
        }

    def result(self, folder: Path, is_over: bool) -> Outcome | None:
        """See Measure."""
        self.facts = read_document(folder / CHECK_FILE)
        if "refusal" in self.facts:
            return Outcome(failure=f"has nothing to measure: {self.facts['refusal']}")
        seconds = [step[0] for step in self.steps]
        if seconds and not self._has_told:
            self._has_told = True
            self._tell(median(seconds))
        if len(seconds) >= self._steps or sum(seconds) >= self._seconds or (is_over and seconds):
            return Outcome(score=median(seconds))
        if is_over and self.facts:
            return Outcome(failure=f"ended too early: {NEEDED_STEPS} steps are needed at least")
        if not self.facts and self._probe.result(folder, is_over) is not None:
            return Outcome(failure=_without_ddp(self._probe.facts))
        return None

    def describe(self, score: float) -> str:
        """See Measure."""
        return self._probe.describe(score)


def _without_ddp(facts: Mapping[str, Any]) -> str:
    """Why a training, of which some steps were seen, has written nothing.

    Args:
        facts: see ``measures.StepTimes``.
    """
    if not facts:
        return (
            "made no step of a PyTorch optimizer on this machine's rank 0; where the job has "
            "several machines, start the same command on each"
        )
    wrappers = facts.get("wrappers", [])
    if not facts["backend"]:
        return (
            "has one process only, which communicates nothing; start it as the job is started, "
            "such as: bagua-autotune check -- torchrun --nproc-per-node 2 train.py"
        )
    if not facts["has_client"]:
        return (
            "cannot be measured: its Python has no bagua_client; install bagua-autotune in the "
            "job's own environment, and run bagua-autotune from there"
        )
    for wrapper, why in WHY_NOT.items():
        if wrapper in wrappers:
            return f"has nothing to tune: {why}"
    return (
        "has nothing to tune: no model of it is wrapped in DistributedDataParallel, and only that "
        "has buckets to tune"
    )


# What a tuning would likely gain, and what it could show, from a few steps of the default.

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prospect:
    """What a tuning is likely to come to.

    Attributes:
        speedup: of the best setting, from what the cost model expects to one standard deviation
            more: the default's steps alone do not tell what smaller or parallel messages cost.
            None: it has too little to go by.
        shown_speedup: the smallest that a confirmation would mostly show.
        step_spread: by what steps of one setting vary, as a share of one.
    """

    speedup: tuple[float, float] | None
    shown_speedup: float
    step_spread: float


def prospect(
    step_seconds: Sequence[float], job: Mapping[str, Any] | None, profiles: Sequence[Any]
) -> Prospect:
    """Return the prospect of a job.

    Args:
        step_seconds: of the slowest rank, at the default; one at least.
        job: how the ranks would register it; None: they did not tell.
        profiles: of steps at the default, as they would report them.
    """
    found = estimate([math.log(seconds) for seconds in step_seconds])
    visits = Visits([Trial(0, "search", Configuration(), "measured", found)])
    try:
        speedup = _likely(job, profiles) if job and profiles else None
    except Exception as error:  # what a check measured is told without it
        logger.warning("what a tuning would likely gain is not known: %r", error)
        speedup = None
    return Prospect(speedup, math.exp(least_shown(visits)), visits.step_spread)


def _likely(job: Mapping[str, Any], told: Sequence[Any]) -> tuple[float, float] | None:
    spec = JobSpec.model_validate_json(json.dumps(job))
    layouts, default = Layouts(spec.tensors), Configuration(spec.default_configuration)
    profiled = [(default, PROFILE.validate_python(each)) for each in told]
    model: Predictor | None
    if is_sharded(profiled):
        model = ShardedModel(layouts, profiled)
    else:
        model = fit_model(layouts, kinds_of(spec.knobs, (default,)), profiled)
    if model is None:
        return None
    is_striped = travels_in_stripes(spec.software)
    candidates = enumerate_candidates(spec.knobs, default, spec.tensors, is_striped)
    costs, errors = model.predict(candidates), np.asarray(model.deviations(candidates))
    gains = costs[0] - costs
    together = np.sqrt(np.square(errors - errors[:, :1]).sum(axis=0))
    return math.exp(float(gains.max())), math.exp(float((gains + together).max()))
