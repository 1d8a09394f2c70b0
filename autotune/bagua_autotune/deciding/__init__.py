"""What follows in a job: the next trial, or the result."""
