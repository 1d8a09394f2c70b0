"""Bagua's name for ``bagua_compat``, in a process that was started ``--as-bagua``.

This folder is on no path otherwise, so that an installed Bagua is what ``import bagua`` finds.
"""

from bagua_compat import __version__
from bagua_compat.names import install

install()

__all__ = ["__version__"]
