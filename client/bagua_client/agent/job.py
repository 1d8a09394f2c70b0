"""What a model's ranks have to do with the service, by way of rank 0's reporter: they describe the
job when its turn has come, take commands, and tell what there is to tell of each trial."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import sys
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bagua_client.agent.report import Report, gathered
from bagua_client.agent.several_models import Turn
from bagua_client.announcement import announce
from bagua_client.communication.communicator import NOBODY_ELSE
from bagua_client.configuration import Configuration, ConfigurationFile
from bagua_client.environment import Choice, Environment
from bagua_client.measuring.rank_measurement import RankMeasurement
from bagua_client.reporter import Event, Handover, Reporter
from bagua_client.tunable.tunable import Tunable
from bagua_wire.cutting import Tensor
from bagua_wire.knob_kinds import Value
from bagua_wire.knobs import ALLOWED_WORDS, domains

logger = logging.getLogger(__name__)

NO_BLOCKS = "no block of the model is recomputed in a way that can be switched"
LONGEST_RANKS = 40
"""Characters of a list of ranks in a job's name."""


def name_of(
    environment: Environment, model: str, ranks: Sequence[int], position: int, job_ranks: int
) -> str:
    """The job's name, equal on all ranks: the user's, else made from program and model. Models on
    other ranks, such as those of another pipeline stage, are other jobs.

    Args:
        ranks: those that train the model, of the default process group, in ascending order.
        position: counts the models that these ranks wrapped, from 1.
        job_ranks: how many that process group has.
    """
    name = environment.job or f"{Path(sys.argv[0]).stem or 'python'}-{model}"
    if len(ranks) < job_ranks:
        place = f"@{_ranks(ranks)}"
        name = name[: 190 - len(place)] + place
    return name[:190] if position == 1 else f"{name[:190]}#{position}"


def _ranks(ranks: Sequence[int]) -> str:
    """``4-7``, ``1,3`` or ``0-12:4``, as a slice counts; what is long is a hash."""
    first, last, step = ranks[0], ranks[-1], ranks[-1] - ranks[-2] if len(ranks) > 1 else 1
    if len(ranks) > 2 and list(ranks) == list(range(first, last + 1, step)):
        return f"{first}-{last}" + (f":{step}" if step > 1 else "")
    text = ",".join(map(str, ranks))
    if len(text) <= LONGEST_RANKS:
        return f"{first}-{last}" if len(ranks) == 2 and step == 1 else text
    return f"{first}-{last}.{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def without_unwatched(environment: Environment, knows_losses: bool) -> Environment:
    """The settings, without the algorithms that they list where nobody tells the loss: speed alone
    is no reason for one."""
    precisions = environment.allowed & frozenset(ALLOWED_WORDS.values())
    if knows_losses or environment.allowed == precisions:
        return environment
    logger.warning(
        "autotune tries no other algorithm, as it does not know the loss: call "
        "model.report_loss(loss) in every step, from the first one on. An algorithm that harms the "
        "training is then no longer used"
    )
    return replace(environment, allowed=precisions)


def nothing_to_try(tunable: Tunable, allowed: Collection[str]) -> str:
    """Why nothing can be tried where nothing is sent; empty: something can, or may turn out to be
    possible in the first steps."""
    offer = tunable.offer
    is_known = tunable.order_is_agreed or not tunable.recomputation
    if not (offer.is_alone and is_known) or offer.has_choice(allowed):
        return ""
    return "; ".join([NOBODY_ELSE, *(offer.reasons() or [NO_BLOCKS])])


def tell_left_alone(tunable: Tunable, reasons: Sequence[str]) -> None:
    """Say on rank 0 why some settings stay as they are, if any do."""
    if reasons and tunable.communicator.rank == 0:
        announce(logger, "autotune leaves some settings alone: %s", "; ".join(reasons))


def is_warming_up(tunable: Tunable, environment: Environment) -> bool:
    """Whether an algorithm that may be tried has another phase to come."""
    choices = tunable.offer.algorithms(environment.allowed)
    return any(each.is_warming_up for each in (tunable.algorithm, *choices))


def describe_job(
    tunable: Tunable, environment: Environment, name: str, file: ConfigurationFile | None = None
) -> dict[str, Any]:
    """The body of the registration (API v2), tensors in gradient-ready order."""
    communicator = tunable.communicator
    tensors = [tunable.tensors[index] for index in tunable.order]
    software = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        **({"backend": communicator.backend} if communicator.backend else {}),
        "device": device_name(communicator.device),
    }
    if not tunable.algorithm.is_torchs:  # a job of another algorithm is another job
        software["algorithm"] = tunable.algorithm.name
    software.update(tunable.offer.carried_by)
    knobs = _knobs(tunable, environment)
    # The service knows all algorithms by their names.
    default = {**tunable.default.values, "algorithm": tunable.algorithm.name}
    description: dict[str, Any] = {
        "name": name,
        "world_size": communicator.world_size,
        "ranks_per_node": list(communicator.topology.ranks_per_node),
        "tensors": [{each.name: getattr(t, each.name) for each in fields(Tensor)} for t in tensors],
        "knobs": knobs,
        "default_configuration": {knob: default[knob] for knob in knobs},
        "software": software,
    }
    description["fingerprint"] = _fingerprint(description)
    # What torchrun calls a run of which nothing was said is "none", and no name.
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")[:200]
    if run not in ("", "none") and run.isprintable():
        description["run"] = run
    description["limits"] = {
        "max_samples": environment.max_samples,
        "max_rounds": environment.max_rounds,
        "trial_seconds": environment.trial_seconds,
        "warmup_seconds": environment.warmup_seconds,
        "remaining_steps": environment.remaining_steps,
    }
    if environment.max_minutes is not None:
        description["limits"]["max_seconds"] = environment.max_minutes * 60
    if environment.fresh:
        description["fresh"] = True
    if file is not None and (first := _first(tunable, file, description)):
        description["begin_with"] = first
    return description


def _first(
    tunable: Tunable, file: ConfigurationFile, description: dict[str, Any]
) -> dict[str, Any] | None:
    """Return what the file says by the job's knobs; None, with a line, if the job cannot try it."""
    values = file.configuration.values
    values["algorithm"] = values["algorithm"] or tunable.algorithm.name
    default = tunable.default.values | {"algorithm": tunable.algorithm.name}
    knobs = description["knobs"]
    reason = tunable.refusal or file.obstacle(tunable.tensors)
    for knob, value in values.items():
        if knob not in knobs:
            is_tried = value == default[knob]
        elif knobs[knob]["type"] == "log_integer":
            is_tried = knobs[knob]["low"] <= value <= knobs[knob]["high"]
        else:
            is_tried = value in knobs[knob].get("values", [value])
        if not is_tried:
            reason = reason or f"{knob} {value} is not among what is tried"
    if reason:
        logger.warning("BAGUA_CONFIGURATION: the tuning does not begin with this file: %s", reason)
    return None if reason else {knob: values[knob] for knob in knobs}


def _knobs(tunable: Tunable, environment: Environment) -> dict[str, Any]:
    """Return the part of the user's choice that may be tried here."""
    values = tunable.default.values | {"algorithm": tunable.algorithm.name}
    offer, found = tunable.offer, {}
    few = offer.values(environment.allowed)
    for knob, offered in domains(offer.bucket_bytes, few, offer.has_explicit_buckets).items():
        choice = environment.knobs.get(knob)
        domain = choice.within(knob, offered, values[knob]) if choice else offered
        if domain is None:
            continue
        if domain["type"] == "categorical":
            kept = [value for value in domain["values"] if _works(tunable, knob, value)]
            domain = {**domain, "values": kept}
        if choice:
            _tell_choice(knob, choice, domain, values[knob])
        found[knob] = domain
    return found


def _tell_choice(knob: str, choice: Choice, domain: dict[str, Any], default: Value) -> None:
    """Say where what is tried is not what the user chose; of a pinned knob that is told already."""
    values = domain.get("values", ())
    if choice.pinned is not None:
        return
    lacking = [str(value) for value in choice.values if values and value not in values]
    tried = values or [domain["low"], domain["high"]]
    if lacking:
        logger.warning("BAGUA_AUTOTUNE_KNOBS: %s=%s is not possible here", knob, "/".join(lacking))
    if choice.values and default not in choice.values and default in tried:
        logger.warning("BAGUA_AUTOTUNE_KNOBS: the default %s, %s, is tried too", knob, default)


def _works(tunable: Tunable, knob: str, value: int | str) -> bool:
    """Whether it can be carried out, with this value of a knob."""
    changed: dict[str, Any] = {knob: value}
    try:
        tunable.plan(replace(tunable.default, **changed))
    except ValueError:
        return False
    return True


def device_name(device: torch.device) -> str:
    """The name, for people, of what the ranks train on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} cpu"


def _fingerprint(description: dict[str, Any]) -> str:
    """A hash of all that decides which configuration is fast; the job's name does not."""
    parts = {key: value for key, value in description.items() if key != "name"}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


class Command(NamedTuple):
    """What the service wants the ranks to do; see
    :class:`bagua_client.reporter.conversation.Conversation`.

    Attributes:
        waits: there is no trial now, and the tuning has not ended.
        configuration: None: this rank could not read it, or cannot carry it out.
    """

    trial: int | None = None
    waits: bool = False
    watch: bool = False
    told: Mapping[str, Any] = {}
    configuration: Configuration | None = None


class Correspondence:
    """One model's, on one rank. Only rank 0 has a reporter, once the job is described; without one
    nothing is told. Nothing of it waits for the service.

    Args:
        tunable: of the model.
        measurement: of this rank's steps.
        environment: the settings.
        job: its name.
        handover: of what is known to the other nodes.
        turn: of this model to be tuned; the job's models are tuned one after the other.
        file: what is tried first, after the default.
    """

    def __init__(
        self,
        tunable: Tunable,
        measurement: RankMeasurement,
        environment: Environment,
        job: str,
        handover: Handover,
        turn: Turn,
        file: ConfigurationFile | None = None,
    ) -> None:
        self._tunable, self._measurement = tunable, measurement
        self._observe = tunable.observers.call
        self._environment = environment
        self.job, self._file = job, file
        self._handover = handover
        self._turn = turn
        self._told = tunable.offer.recomputed.left_alone
        self._reporter: Reporter | None = None
        self._disturbed = False

    def nothing_to_try(self) -> str:
        """Why there is nothing to describe a job for; empty: there is, or it is described."""
        if self._reporter is not None:
            return ""
        return nothing_to_try(self._tunable, self._environment.allowed)

    # What the service wants

    def next_command(
        self, reductions: int, is_watching: bool, may_leave: bool, knows_losses: bool
    ) -> bytes | None:
        """Return the command that the ranks were not told yet, packed; rank 0 asks before each
        report.

        Args:
            reductions: how many there have been.
            is_watching: the tuning is over, and another round begins only by a command.
            may_leave: else what is in force goes on, and the command waits.
            knows_losses: whether the training tells them.
        """
        if is_watching and (self._reporter is None or not self._reporter.has_command):
            return None
        if not self._turn.take(reductions):
            return None
        if self._reporter is None:
            environment = without_unwatched(self._environment, knows_losses)
            if is_warming_up(self._tunable, environment):
                return None
            description = describe_job(self._tunable, environment, self.job, self._file)
            if (why := self._tunable.offer.recomputed.left_alone) != self._told:
                tell_left_alone(self._tunable, [why])  # The first steps have shown it.
            count = self._measurement.count
            self._reporter = Reporter(environment, description, self._handover, count)
        self._reporter.look(reductions)
        return self._reporter.take_command() if may_leave else None

    def read(self, text: bytes) -> Command:
        """Read a packed command, on any rank, as far as that can be done; it does not raise: other
        ranks vote on it."""
        communicator, found = self._tunable.communicator, Command()
        try:
            said = json.loads(zlib.decompress(text))
            found = found._replace(trial=said["trial"], watch=said["watch"])
            found = found._replace(waits=said.get("waits", False))
            self._handover.keep(said.get("copy"))
            asked = Configuration.from_json(said["configuration"])
            found = found._replace(told=said["told"])
            communicator.check(asked)
            found = found._replace(configuration=asked)
        except Exception as error:
            rank = communicator.rank
            logger.warning("rank %d cannot carry out the service's command: %s", rank, error)
        return found

    def suspects(self) -> bool | None:
        """Whether step times may be changing, after the tuning; None: nobody watches them."""
        return None if self._reporter is None else self._reporter.is_suspicious

    @property
    def must_wait(self) -> bool | None:
        """Whether another model of this job is tuned first; None: this rank does not know."""
        return None if self._tunable.communicator.rank else self._turn.is_anothers

    def page(self) -> str:
        """The address of the job's page; empty before it is known, and on other ranks."""
        return "" if self._reporter is None else self._reporter.page()

    # What it is told

    def tell(self, kind: str, trial: int | None, message: str = "", **more: Any) -> None:
        """Tell an event of a trial, or of the tuning."""
        if self._reporter is not None:
            event = Event(kind, trial, self._measurement.step, message, **more)
            self._observe(self._reporter.put, event)

    def tell_times(self, reports: Sequence[Report]) -> None:
        """Tell what the ranks have measured of the trial, and of the one before."""
        if self._reporter is None:
            return
        # These steps may go back to the report before, when another model was still being tuned.
        before, self._disturbed = self._disturbed, self._turn.is_anothers
        if not (before or self._disturbed):
            for told in gathered(reports, self._measurement.spans):
                self._reporter.put(told)
        for recording in self._measurement.take_recordings():
            self._reporter.put(recording)

    # How it ends

    def pass_turn_on(self) -> None:
        """The model is tuned: the next one may be."""
        self._observe(self._turn.leave)

    def finish(self, reason: str = "") -> None:
        """No other round follows; see :meth:`Reporter.finish`."""
        if self._reporter is not None:
            self._reporter.finish(reason)

    def leave(self) -> None:
        """The model will never be tuned again."""
        self._observe(self._turn.close)

    def close(self) -> None:
        """The training is over on this rank."""
        if self._reporter is not None:
            self._reporter.close()
