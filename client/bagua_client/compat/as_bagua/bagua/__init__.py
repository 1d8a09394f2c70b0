"""Bagua's name for ``bagua_client.compat``, in a process that was started ``--as-bagua``.

This folder is on no path otherwise, so that an installed Bagua is what ``import bagua`` finds.
"""

from bagua_client.compat.names import install

install()
__version__ = "0.9.2"
