"""The reducer: collects tensors into buckets as they become ready and communicates them."""
