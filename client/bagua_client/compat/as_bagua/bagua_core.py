"""Bagua's compiled core, of which scripts use these."""

from bagua_client.compat.core import install_deps, show_version

__all__ = ["install_deps", "show_version"]
