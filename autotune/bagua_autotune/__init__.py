"""Bagua Autotune's service: watches training jobs, tries configurations, keeps the fastest."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("bagua-autotune")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"
