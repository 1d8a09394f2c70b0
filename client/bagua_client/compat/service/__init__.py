"""Bagua's service and its client, over ours."""

from bagua_client.compat.service.autotune_service import AutotuneClient, AutotuneService

__all__ = ["AutotuneClient", "AutotuneService"]
