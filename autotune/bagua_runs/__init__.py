"""Whole runs of a user's command, which hang into the service's command line: ``system`` searches
settings that a job reads only at its start, ``check`` says what a tuning could gain."""
