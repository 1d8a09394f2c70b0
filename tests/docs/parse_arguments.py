"""Whether programs take their arguments: parse_arguments.py JSON_LIST_OF_COMMANDS.

Each program is run in this process until its argparse has read the arguments, and no further: most
of the time goes into importing torch. Prints a JSON list: null, or what is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import shlex
import sys
from typing import Any, NoReturn


class Taken(BaseException):
    """The arguments were read without an error."""


def problem(command: str) -> str | None:
    """What is wrong with the command; None: nothing."""
    words = shlex.split(command, comments=True)
    while words[0] == "sudo" or "=" in words[0]:
        words.pop(0)
    program, *arguments = words
    if program == "torchrun":
        from torch.distributed.run import get_args_parser

        parsed = _original(get_args_parser(), arguments)
        arguments = ["-m"] if parsed.module else []
        arguments += [parsed.training_script, *parsed.training_script_args]
    elif program == "bagua-run":
        arguments = ["-m", "bagua_client.run", *arguments]
    elif program.rpartition("/")[2] != "python":
        return f"its parser is not known here: {program}"
    return _taken(arguments)


def _taken(arguments: list[str]) -> str | None:
    if arguments[0] == "train.py":
        return None  # the reader's
    sys.path[0] = os.getcwd()
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
            runpy.run_path(arguments[0], run_name="__main__")
    except Taken:
        return None
    except SystemExit as end:
        return f"it ended with {end.code}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "it parsed no arguments"


_original = argparse.ArgumentParser.parse_args


def _parse_and_stop(self: argparse.ArgumentParser, *args: Any, **named: Any) -> NoReturn:
    _original(self, *args, **named)
    raise Taken


if __name__ == "__main__":
    commands = json.loads(sys.argv[1])
    argparse.ArgumentParser.parse_args = _parse_and_stop  # type: ignore[method-assign,assignment]
    print(json.dumps([problem(command) for command in commands]))
