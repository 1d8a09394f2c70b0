"""Every command of README.md, docs/ and examples/ runs as printed, or stands in commands.py."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from bagua_autotune.model.job import Event, Observation
from bagua_autotune.store import Store
from bagua_autotune.tuning.tuner import Tuner
from bagua_simulator import Simulator
from tests.autotune.server import ServeProcess
from tests.autotune.support import Ranks, make_spec
from tests.deploy.slurm import free_ports
from tests.docs.checks import Parsed, Place
from tests.docs.commands import (
    INSTEAD,
    MENTIONED,
    NOT_COMMANDS,
    check_of_mention,
    instead_of,
    is_command_block,
)
from tests.docs.pages import (
    PAGES,
    ROOT,
    SHELLS,
    Block,
    Command,
    blocks,
    commands_of,
    mentions,
)
from tests.simulator.jobs import MIB, make_cluster, make_workload

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

INDENTED = [block for page in PAGES for block in blocks(page) if not block.language]
FENCED = [block for page in PAGES for block in blocks(page) if block.language in SHELLS]
BLOCKS = [*FENCED, *(block for block in INDENTED if is_command_block(block.first_line))]
COMMANDS = [command for block in BLOCKS for command in commands_of(block)]
CHECKED = [command for command in COMMANDS if instead_of(command.text) is not None]
# What is run of a block is run by one shell: a command may need what the one before it set.
RUN = [
    (block.place, "\n".join(run))
    for block in BLOCKS
    if (run := [c.text for c in commands_of(block) if instead_of(c.text) is None])
]
MENTIONS = [command for page in PAGES for command in mentions(page)]
TO_PARSE = [
    command.text
    for command, check in [
        *((command, instead_of(command.text)) for command in CHECKED),
        *((command, check_of_mention(command.text)) for command in MENTIONS),
    ]
    if isinstance(check, Parsed) and "bagua-autotune " not in command.text
]
LIMITS = {
    "BAGUA_AUTOTUNE_MAX_SAMPLES": "2",
    "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S": "0.3",
    "BAGUA_AUTOTUNE_WARMUP_TIME_S": "0.3",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """What looks like a clone, a user's home and data, and a service with its address in a file."""
    folder = tmp_path_factory.mktemp("clone")
    for path in ROOT.iterdir():
        if not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    # Into these something is written.
    (folder / "dashboards").unlink()
    shutil.copytree(ROOT / "dashboards", folder / "dashboards")
    shutil.copy(ROOT / "tests" / "train.py", folder / "train.py")
    place = Place(folder, TO_PARSE)
    place.environment.update(LIMITS)
    (port,) = free_ports(1)
    place.environment["PET_MASTER_PORT"] = str(port)  # torchrun's, where a command says none
    database = folder / "data" / "bagua-autotune" / "autotune.db"
    database.parent.mkdir(parents=True)
    make_tuned_job(database)
    place.run("bagua-autotune export JOB --profile > job.json")
    own = folder / "home" / ".bagua-autotune"
    own.mkdir(parents=True)
    with ServeProcess(own / "autotune.db", BAGUA_AUTOTUNE_TOKEN="a-token") as service:
        (own / "environment").write_text(
            f"BAGUA_AUTOTUNE_URL={service.url}\nBAGUA_AUTOTUNE_TOKEN=a-token\n"
        )
        yield place


def make_tuned_job(database: Path) -> None:
    """A job whose name is JOB, as the pages call it: profiled, tuned, and ended."""
    workload = make_workload([MIB // 8, MIB // 2] * 30, milliseconds=1.0)
    measured = Simulator(workload, make_cluster(latency_seconds=1e-4))
    tensors = [asdict(tensor) for tensor in workload.tensors]
    spec = make_spec(name="JOB", tensors=tensors, world_size=8, ranks_per_node=[2] * 4)
    tuner, ranks = Tuner(Store(f"sqlite:///{database}")), Ranks(noise=0.001, world_size=8)
    tuner.register("job", spec)
    first = tuner.open_trial("job")
    assert first is not None
    for step in range(3):
        profile = measured.profile(first.configuration, step)
        assert tuner.store.profiles.add("job", first.index, profile, at=1.0)
    while trial := tuner.open_trial("job"):
        steps = ranks.run(trial.configuration, 10)
        seen = [Observation(step, tuple(seconds)) for step, seconds in steps]
        tuner.observe("job", trial.index, seen)
    tuner.take_event("job", Event("ended"))
    tuner.store.close()


@pytest.mark.parametrize(("where", "script"), RUN, ids=[where for where, _ in RUN])
def test_it_runs_as_printed(where: str, script: str, place: Place) -> None:
    place.run(script)


@pytest.mark.parametrize("command", CHECKED, ids=lambda command: f"{command.place} {command.text}")
def test_what_is_not_run_is_checked(command: Command, place: Place) -> None:
    check = instead_of(command.text)
    assert check is not None
    check(command.text, place)


@pytest.mark.parametrize("command", MENTIONS, ids=lambda command: f"{command.place} {command.text}")
def test_a_command_in_a_sentence_is_one_that_there_is(command: Command, place: Place) -> None:
    check_of_mention(command.text)(command.text, place)


@pytest.mark.parametrize("pattern", [pattern for pattern, _, _ in (*INSTEAD, *MENTIONED)])
def test_each_exception_is_one_of_a_command_that_there_is(pattern: str) -> None:
    assert any(re.fullmatch(pattern, command.text) for command in (*COMMANDS, *MENTIONS))


@pytest.mark.parametrize("pattern", NOT_COMMANDS)
def test_each_block_that_is_no_command_is_there(pattern: str) -> None:
    assert any(re.fullmatch(pattern, block.first_line) for block in INDENTED)


def test_commands_are_found_as_a_reader_finds_them() -> None:
    text = "$ one --a \\\n    b   # why\nprinted\n$ A=1 two\n\n$ not this"
    found = [command.text for command in commands_of(Block("page:1", "", text))]
    assert found == ["one --a b", "A=1 two"]
    assert len(COMMANDS) > 60
    assert not is_command_block("location / {")
