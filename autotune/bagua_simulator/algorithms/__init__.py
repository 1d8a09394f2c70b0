"""What a step would take under other algorithms: what each sends, and all of them side by side."""
