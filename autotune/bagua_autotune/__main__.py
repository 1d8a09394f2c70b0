"""The command ``bagua-autotune``, also as ``python -m bagua_autotune``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run it; where a package of the service is missing, say in a sentence what to install."""
    try:
        from bagua_autotune.cli import main as command

        command(prog_name="bagua-autotune")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("bagua_"):
            raise
        sys.exit(
            f"bagua-autotune needs the packages of the service, of which {error.name} is not "
            "installed. In a clone: pip install '.[service]'"
        )


if __name__ == "__main__":
    main()
