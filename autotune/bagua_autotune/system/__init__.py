"""Settings that a process reads only when it starts: short runs of the user's own job find them."""
