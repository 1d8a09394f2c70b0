"""``bagua-autotune check``: how much a tuning could gain at most, from a short run of the job."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import click

from bagua_autotune.cli.output import INTERRUPTED, say
from bagua_autotune.model.characters import clean
from bagua_autotune.model.job import Observation
from bagua_autotune.model.text import describe_seconds
from bagua_autotune.system.exposure import Exposure
from bagua_autotune.system.hindrances import Hindrance, hindrances
from bagua_autotune.system.running.job import Interrupted, Job, stopping
from bagua_autotune.system.running.runs import Outcome
from bagua_autotune.views.likely import prospect
from bagua_autotune.views.steps import exposed_seconds, step_seconds

# Below so many times what remains without exposed communication: no gain that a job shows, and
# none that is worth much.
NOTHING, LITTLE = 1.02, 1.10
WAYS = {"bits16": "16 bits", "bits8": "8 bits", "powersgd": "PowerSGD of rank 1"}


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
        likely_speedup: of the best setting, from what the cost model expects to one standard
            deviation more; None: it cannot tell.
        shown_speedup: the smallest that a tuning would mostly show, by what steps vary.
        step_spread: by what steps vary, as a share of one.
        hindrances: what keeps communication from running beside computing, as far as it was seen.
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

    @property
    def verdict(self) -> str:
        """The result in one word, for programs."""
        if self.most_speedup < NOTHING:
            return "nothing_to_gain"
        if self.most_speedup < LITTLE:
            return "little_to_gain"
        likely = self.likely_speedup[1] if self.likely_speedup else self.most_speedup
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
    """Say how much faster COMMAND could train, at most and likely, if its communication were tuned.

    Runs it, measures some steps after a warm-up, and ends it with all the processes that it
    started. What it writes until then, such as logs and checkpoints, it writes. The script stays as
    it is, and so do the numbers that it computes: nothing is tuned.

    Exposed communication is what a step waits for after the last gradient is ready, and for
    broadcasts of buffers; on GPUs the device's own clock says how long. All else counts as
    computing: waiting for data and the optimizer, too. A warning names what keeps communication
    from running beside computing, such as a variable for debugging that was left set. A job of
    several machines is started so on each of them.

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
        _tell(f"the command {outcome.failure}; these are the steps before that")
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
        raise click.ClickException(_why_unknown(facts))
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
        **{name: facts[name] for name in ("ranks", "nodes", "backend", "device", "models")},
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
    if figures.models > 1:
        found.append(
            f"Each process wraps {figures.models} models: only the first is measured, and what the "
            "others communicate counts as computing."
        )
    found += map(_warning, figures.hindrances)
    if figures.most_speedup_of and figures.verdict != "nothing_to_gain":
        found.append(_fewer_bytes(figures.most_speedup_of))
    return [*found, _advice(figures, command)]


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
    if figures.verdict == "nothing_to_gain":
        return f"Nothing to gain: {share}."
    most = f"at most {figures.most_speedup:.2f}x"
    if figures.verdict == "little_to_gain":
        return f"Little to gain, {most}: {share}."
    likely = ""
    if figures.likely_speedup is not None:
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
    """The same with our launcher before the script; empty where the script is not found in it."""
    for place, word in enumerate(command):
        following = command[place + 1] if place + 1 < len(command) else ""
        is_launcher = following.startswith(("torch.distributed.", "accelerate.", "bagua_client"))
        if word.endswith(".py") or (word == "-m" and following and not is_launcher):
            python = ["python"] if place == 0 else []
            launcher = [*python, "-m", "bagua_client", "--autotune"]
            return shlex.join([*command[:place], *launcher, *command[place:]])
    return ""


def _why_unknown(facts: Mapping[str, Any]) -> str:
    passes = facts["backward_passes"]
    if passes > 1:
        return (
            f"each optimizer step has {passes} backward passes that communicate, so computing and "
            "communication cannot be told apart. If they accumulate gradients, run all but the "
            "last under model.no_sync(): that alone saves most of the communication"
        )
    return (
        "computing and communication cannot be told apart: the model is on several devices, or on "
        f"another than {facts['backend']} communicates from"
    )


def _tell_failure(outcome: Outcome, command: Sequence[str]) -> None:
    _tell(f"Error: the command {outcome.failure}")
    if outcome.exit_code is not None:
        _tell(f"No step was measured. First make this run: {shlex.join(command)}")
    if outcome.last_lines:
        _tell("The last that it printed:")
    for line in outcome.last_lines:
        _tell(f"    {line}")


def _tell_first(seconds: float) -> None:
    _tell(f"measuring: the first steps took {describe_seconds(seconds)} each")


def _tell(line: str) -> None:
    click.echo(clean(line), err=True)
