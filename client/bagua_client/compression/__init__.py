"""Gradients in fewer bits: Bagua's eight, a chunk at a time."""

from bagua_client.compression.minmax_uint8 import compress, compressed_bytes, decompress

__all__ = ["compress", "compressed_bytes", "decompress"]
