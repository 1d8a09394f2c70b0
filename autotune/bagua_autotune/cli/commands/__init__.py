"""The commands of ``bagua-autotune``."""
