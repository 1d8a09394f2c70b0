"""``bagua-autotune serve``: run the service."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import click
from pydantic import ValidationError

from bagua_autotune.search import names
from bagua_autotune.settings import ENVIRONMENT, Settings
from bagua_autotune.store.errors import StoreError


class _Misused(click.ClickException):
    exit_code = 2  # click's own for wrong options


@click.command()
@click.option("--host", help="Address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=int, help="Port; 0 takes any that is free.  [default: 8123]")
@click.option(
    "--database", metavar="URL", help="SQLAlchemy URL.  [default: SQLite in your data directory]"
)
@click.option(
    "--processes", type=int, metavar="N", help="Processes that serve the port.  [default: 1]"
)
@click.option("--searcher", type=click.Choice(names()), help="Search method.  [default: bayesian]")
@click.option(
    "--world-size",
    type=int,
    metavar="N",
    help="Rank count of a Bagua 0.9 job; its protocol does not send it.",
)
@click.option(
    "--thin-days",
    type=float,
    metavar="DAYS",
    help="Days after a job's last report until most of its steps are deleted; 0: never.  "
    "[default: 7]",
)
@click.option(
    "--keep-days",
    type=float,
    metavar="DAYS",
    help="Days after a job's last report until the job is deleted; 0: never.  [default: 90]",
)
@click.option(
    "--upkeep-minutes",
    type=float,
    metavar="MINUTES",
    help="Minutes between two deletions of old steps and jobs.  [default: 60]",
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    metavar="NAME",
    multiple=True,
    help="A host name of this service, such as that of a reverse proxy; may be repeated.",
)
@click.option(
    "--teams",
    metavar="FILE",
    help="JSON file of teams, whose tokens reach their own jobs only.",
)
@click.option(
    "--trust-network",
    is_flag=True,
    help="Serve a network without a token: everyone who reaches the port may use the service.",
)
@click.option(
    "--log-level", type=click.Choice(("info", "warning", "error")), default="info",
    show_default=True, help="Lowest level of the log lines on standard error.",
)  # fmt: skip
@click.option(
    "--parent-pid", type=int, metavar="PID", help="End when this parent process has ended."
)
def serve(log_level: str, **options: Any) -> None:
    """Run the service until SIGTERM or Ctrl-C.

    Environment variables set what no option sets: BAGUA_SERVICE_PORT, BAGUA_AUTOTUNE_DATABASE,
    BAGUA_AUTOTUNE_TOKEN, BAGUA_AUTOTUNE_PREVIOUS_TOKEN (accepted, too, while trainings change to
    the new one), BAGUA_AUTOTUNE_TEAMS, BAGUA_AUTOTUNE_ALLOWED_HOSTS (separated by commas),
    WORLD_SIZE, and Bagua's limits for jobs of its own protocol.
    """
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        settings = Settings.load(os.environ, **options)
    except ValidationError as error:
        raise click.ClickException(_explain(error)) from error
    # It would log a warning whenever a request waits for a thread.
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    logging.getLogger("alembic").setLevel(logging.WARNING)  # what it does, the store says
    # Imported here: it imports the whole service.
    from bagua_autotune.server import ServeError, Unguarded, serve

    try:
        serve(settings)
    except Unguarded as error:
        raise _Misused(str(error)) from error
    except (ServeError, StoreError) as error:
        raise click.ClickException(str(error)) from error
    except SystemExit:
        pass  # a signal ended it
    # A thread may still be deciding, in C++ or Rust code that would abort the process while Python
    # shuts down. Everything worth keeping is in the store.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)


def _explain(error: ValidationError) -> str:
    texts = []
    for item in error.errors(include_url=False):
        name = str(item["loc"][0])
        option = "--" + name.replace("_", "-")
        variable = f" (or {ENVIRONMENT[name]})" if name in ENVIRONMENT else ""
        texts.append(f"{option}{variable}: {item['msg']}")
    return "; ".join(texts)
