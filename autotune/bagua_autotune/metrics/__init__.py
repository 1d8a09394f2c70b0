"""What Prometheus scrapes: jobs from the store, requests and steps as this process sees them."""

from __future__ import annotations

from bagua_autotune.metrics.exposition import Metrics

__all__ = ["Metrics"]
