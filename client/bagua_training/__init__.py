"""What else Bagua had for a training: what feeds it, optimizers' steps in fewer kernels, and batch
normalisation over all ranks. It does not touch the tuner, and works with torch's own class."""
