"""What every algorithm and every tuned kind of model keeps, as tests for pytest."""
