"""Guards the loss: what makes it worse is given up, while it is tried and after it was kept."""
