"""Trainings that are compared under each algorithm, to a loss and over time."""
