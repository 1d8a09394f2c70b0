"""Buckets: which tensors travel as one message, and the flat memory they travel in."""
