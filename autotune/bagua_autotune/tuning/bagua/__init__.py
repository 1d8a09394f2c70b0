"""Bagua 0.9's protocol on the shared tuning core: names, buckets, and when ranks may switch."""
