"""Whole tunings under noise as real machines have it, on jobs that the search was not made on."""
