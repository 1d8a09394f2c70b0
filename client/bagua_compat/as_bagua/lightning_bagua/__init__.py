"""The name of Lightning's own package for Bagua, in a process that was started ``--as-bagua``; here
it is ``bagua_client.lightning``."""

from bagua_client.lightning import BaguaStrategy

__all__ = ["BaguaStrategy"]
