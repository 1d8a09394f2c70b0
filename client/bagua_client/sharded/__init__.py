"""A model that ``fully_shard`` shards, as something whose configuration may change."""
