"""The parts of rates.py, and the load that they make."""
