"""The tuner: takes in what the ranks tell of a job, and says what they shall run."""
