"""Rank 0's thread beside the training, which alone talks to the service."""
