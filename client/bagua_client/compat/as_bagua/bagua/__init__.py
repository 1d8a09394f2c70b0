"""Bagua's name for ``bagua_client.compat``, in a process that was started ``--as-bagua``.

This folder is on no path otherwise, so that an installed Bagua is what ``import bagua`` finds.
"""

from bagua_client.compat.names import install
from bagua_client.compat.version import __version__

install()

__all__ = ["__version__"]
