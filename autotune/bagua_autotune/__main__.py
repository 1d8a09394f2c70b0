"""``python -m bagua_autotune``."""

from __future__ import annotations

from bagua_autotune.cli import main

main(prog_name="bagua-autotune")
