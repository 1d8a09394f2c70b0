"""Torch's reducer, whose buckets are re-cut while the job runs and travel as configured."""
