"""Whole trainings, each in processes of its own, that make their steps in turns.

``gate`` stands in each rank and lets the script make so many steps; ``job`` starts a training and
says how many. So scripts that know nothing of a benchmark are compared on a machine whose speed
wanders.
"""
