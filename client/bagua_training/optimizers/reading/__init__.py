"""Whether the code of an optimizer treats each element by itself, found by reading it."""

from bagua_training.optimizers.reading.reader import Reading, read

__all__ = ["Reading", "read"]
