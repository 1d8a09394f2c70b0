"""Bagua itself, release 0.9.2 from PyPI: its optimiser and its service run as they are."""
