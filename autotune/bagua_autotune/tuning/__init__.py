"""Tuning a job: when a trial is measured, what follows it, and what the job is left with."""
