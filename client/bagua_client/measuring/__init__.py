"""What a rank measures of its own steps, on the training thread, which never waits for it."""
