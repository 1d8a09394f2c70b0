"""The service as a process reaches it: requests that are repeated, the breaker, its start."""
