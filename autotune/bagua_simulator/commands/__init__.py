"""What ``bagua-autotune`` has of the simulator: the command ``simulate``, and the format that
``export --profile`` writes. All else of the package knows nothing of the service."""
