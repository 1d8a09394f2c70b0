"""The command ``bagua-autotune``, also as ``python -m bagua_autotune``."""

from __future__ import annotations

import errno
import os
import sys

CANNOT_PRINT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What a standard output on a full or broken disk says; click deals with a closed pipe."""


def main() -> None:
    """Run it. A package of the service that is missing, and an output that cannot be written, are
    told in a sentence."""
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
    except OSError as error:
        if error.filename is not None or error.errno not in CANNOT_PRINT:
            raise
        # Python would try to write the rest at its end, and print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(f"bagua-autotune: the output cannot be written: {error.strerror}")


if __name__ == "__main__":
    main()
