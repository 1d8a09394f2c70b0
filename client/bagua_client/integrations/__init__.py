"""Where the tool meets a training program: today DistributedDataParallel's interface."""
