"""Models that a process trains by itself."""
