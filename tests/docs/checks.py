"""What is done with a command of the documentation, if it is not simply run as printed."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import click
import pytest

from bagua_autotune.cli import COMMANDS, OF_OUR_PACKAGES, main
from bagua_client.environment import Environment
from tests.docs.pages import ROOT
from tests.torch_aborts import again_if_torch_aborts

RUN_SECONDS = 300


class Place:
    """A folder in which the documentation's commands work, and the environment that they need.

    Args:
        folder: looks like a clone, with a train.py; new files come here.
        to_parse: commands of which only the arguments are looked at.
    """

    def __init__(self, folder: Path, to_parse: Sequence[str]) -> None:
        self.folder = folder
        self.environment = scratch_environment(folder)
        self._to_parse = to_parse

    def run(self, command: str) -> str:
        """What it prints; an AssertionError unless it ends with 0."""
        code, output = again_if_torch_aborts(lambda: self._run(command), lambda ran: ran[1])
        assert code == 0, f"{command}\n{output[-3000:]}"
        return output

    def _run(self, command: str) -> tuple[int, str]:
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=RUN_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its ranks then
            output, _ = process.communicate()
            raise AssertionError(f"still running: {command}\n{output[-3000:]}") from None
        return process.returncode, output

    @functools.cache  # noqa: B019
    def problems(self) -> dict[str, str | None]:
        """What programs have against their arguments; one process imports torch for all of them."""
        program = Path(__file__).with_name("parse_arguments.py")
        done = subprocess.run(
            [sys.executable, str(program), json.dumps(self._to_parse)],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return dict(zip(self._to_parse, json.loads(done.stdout.splitlines()[-1]), strict=True))


class Check:
    """Does with a command what stands in its place."""

    def __call__(self, command: str, place: Place) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class Run(Check):
    """It is run as printed, but for what cannot be had here; it may have to print something.

    Attributes:
        instead: what is replaced by what.
        prints: a regular expression that its output must match.
        has_service: it finds the service that runs already, and starts none.
    """

    instead: tuple[tuple[str, str], ...] = ()
    prints: str = ""
    has_service: bool = False

    def __call__(self, command: str, place: Place) -> None:
        for printed, other in self.instead:
            assert printed in command, f"{printed} is no longer a part of {command}"
            command = command.replace(printed, other)
        if self.has_service:
            command = f"set -a; . ~/.bagua-autotune/environment; set +a; {command}"
        output = place.run(command)
        assert re.search(self.prints, output), output


@dataclass(frozen=True)
class Serve(Check):
    """A service: it starts with these arguments, but on a free port of loopback, and is ended."""

    def __call__(self, command: str, place: Place) -> None:
        _parse_click(command)
        words = shlex.split(command)
        kept = [word for word in words if word not in ("0.0.0.0", "8123")]
        kept = [word for word in kept if word not in ("--host", "--port")]
        line = shlex.join(["timeout", "--signal=TERM", "60", *kept, "--port", "0"])
        place.run(
            f"exec 3< <(exec {line}); pid=$!; read -r first <&3; echo $first; kill $pid; wait $pid"
        )


@dataclass(frozen=True)
class Parsed(Check):
    """Its program takes its arguments: the program's own parser reads them, and that is all."""

    def __call__(self, command: str, place: Place) -> None:
        if re.search(r"(^|\W)bagua-autotune ", command):
            _parse_click(command)
        else:
            problem = place.problems()[command]
            assert problem is None, f"{command}: {problem}"


@dataclass(frozen=True)
class Read(Check):
    """A training that another command starts, too: the client takes the variables before it."""

    def __call__(self, command: str, place: Place) -> None:
        words = takewhile(lambda word: "=" in word, shlex.split(command))
        variables = {name: value for name, _, value in (word.partition("=") for word in words)}
        assert any(name.startswith("BAGUA_") for name in variables)
        Environment.read(variables)


@dataclass(frozen=True)
class Named(Check):
    """bagua-autotune has the command; its arguments are left out."""

    def __call__(self, command: str, place: Place) -> None:
        assert command.split()[1] in {*COMMANDS, *OF_OUR_PACKAGES}


@dataclass(frozen=True)
class Make(Check):
    """The Makefile has the target."""

    def __call__(self, command: str, place: Place) -> None:
        target = command.split()[1]
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@dataclass(frozen=True)
class Files(Check):
    """It is valid bash, and all files of the project that it names exist.

    Attributes:
        tests: the file that tests what the command does.
    """

    tests: str

    def __call__(self, command: str, place: Place) -> None:
        subprocess.run(["bash", "-n", "-c", command], check=True)
        for word in shlex.split(command):
            path = ROOT / word
            if "/" in word and not word.startswith("/") and (ROOT / word.split("/")[0]).is_dir():
                assert path.exists(), word
        assert (ROOT / self.tests).is_file(), f"{self.tests} tested it"


@dataclass(frozen=True)
class Helm(Check):
    """Helm makes manifests with the same arguments, where it is installed."""

    def __call__(self, command: str, place: Place) -> None:
        Files("tests/deploy/test_helm.py")(command, place)
        if shutil.which("helm") is not None:
            place.run(command.replace("helm upgrade --install", "helm template"))


@dataclass(frozen=True)
class Extras(Check):
    """pip installs this project: the extras that it names exist."""

    def __call__(self, command: str, place: Place) -> None:
        tomllib = pytest.importorskip("tomllib", reason="Python 3.11 and newer")
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for listed in re.findall(r"(?:\.|whl|bagua-autotune)\[([\w,-]+)\]", command):
            assert set(listed.split(",")) <= set(project["optional-dependencies"])


def _parse_click(command: str) -> None:
    if inner := re.search(r"\$\((.*)\)", command):
        command = inner[1]
    words = shlex.split(command.partition(" > ")[0])
    arguments = words[words.index("bagua-autotune") + 1 :]
    group = main.make_context("bagua-autotune", list(arguments), resilient_parsing=False)
    name, *rest = arguments
    found = main.get_command(group, name)
    assert isinstance(found, click.Command), name
    found.make_context(name, rest, parent=group)


def scratch_environment(folder: Path) -> dict[str, str]:
    """Of this process, with a home and a data directory of its own and this Python's programs."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BAGUA_")}
    source = os.pathsep.join(str(ROOT / part) for part in ("client", "autotune"))
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")])),
        "HOME": str(folder / "home"),
        "XDG_DATA_HOME": str(folder / "data"),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
