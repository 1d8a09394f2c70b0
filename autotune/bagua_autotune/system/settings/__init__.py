"""Settings of a job: where the value of each goes, which values are worth trying, and when."""
