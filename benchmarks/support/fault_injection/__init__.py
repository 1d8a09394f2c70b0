"""What goes wrong between jobs and their service, on purpose, and what must hold all the same."""
