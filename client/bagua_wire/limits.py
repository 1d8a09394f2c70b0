"""What a tuning may take: by default, and at most.

It stands alone because both sides, the launcher's help and Bagua's own service say the same.
"""

SAMPLES = 60
"""Trials of a search."""
MOST_SAMPLES = 500
"""The service allows no more: the time of a decision grows with the cube of the trials."""
ROUNDS, MOST_ROUNDS = 10, 1000
"""Tunings of a job: the first, and those after lasting changes of its step times."""
TRIAL_SECONDS = 5.0
WARMUP_SECONDS = 30.0
REMAINING_STEPS, MOST_STEPS = 10_000, 10**9
"""Steps that the training is expected to go on: what a faster step is worth."""
