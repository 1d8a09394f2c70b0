"""The image's command, run without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bagua_autotune.settings import ENVIRONMENT
from tests.autotune.server import ServeProcess

DOCKERFILE = Path(__file__).parents[2] / "Dockerfile"
TOKEN = "a-token"


def run_container(container: dict[str, Any], folder: Path) -> ServeProcess:
    """The service as a manifest's container runs it, but on a free port, and a database here."""
    lines = DOCKERFILE.read_text().splitlines()
    (entrypoint,) = [line for line in lines if line.startswith("ENTRYPOINT ")]
    program, command, *arguments = json.loads(entrypoint.partition(" ")[2])
    assert (program, command) == ("bagua-autotune", "serve")
    assert "command" not in container
    arguments[arguments.index("--port") + 1] = "0"
    variables = {found["name"]: found.get("value") for found in container["env"]}
    assert set(variables) <= set(ENVIRONMENT.values())
    given = {name: value for name, value in variables.items() if value is not None}
    secret = {ENVIRONMENT["token"]: TOKEN} if ENVIRONMENT["token"] in variables else {}
    return ServeProcess(
        folder / "autotune.db", *arguments, *container.get("args", []), **given, **secret
    )


def address_of(service: ServeProcess) -> str:
    """It listens everywhere, as a container's does."""
    assert "//0.0.0.0:" in service.url
    return service.url.replace("0.0.0.0", "127.0.0.1")
