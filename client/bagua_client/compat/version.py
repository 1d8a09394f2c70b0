"""The version of Bagua whose interface this is."""

__version__ = "0.9.2"
