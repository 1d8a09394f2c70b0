"""Where ``lightning-bagua`` defines its strategy."""

from bagua_client.lightning import BaguaStrategy

__all__ = ["BaguaStrategy"]
