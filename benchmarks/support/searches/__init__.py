"""What search.py compares: engines, on the landscapes of simulated jobs."""
