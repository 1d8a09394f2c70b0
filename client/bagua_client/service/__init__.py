"""The service as a process reaches it: requests that are repeated, and its start."""
