"""Frameworks that the tests need and that an installation may lack."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip without them. Not imported here: the ranks do that, with ours in torch's place."""
    missing = [package for package in packages if find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")
