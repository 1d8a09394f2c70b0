"""Headless Chromium: the one that is on the machine."""

from __future__ import annotations

import os
from pathlib import Path

from playwright.sync_api import Browser, Playwright

CHROMIUM = Path(os.environ.get("CHROMIUM", "/usr/bin/chromium"))
# Without a sandbox it runs as root in a container; the rest keeps it from calling home.
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def launched(playwright: Playwright) -> Browser:
    """A context manager that ends it."""
    return playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
