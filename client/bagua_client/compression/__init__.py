"""Gradients in fewer bits: Bagua's eight, a chunk at a time."""

from bagua_client.compression.minmax_uint8 import DTYPES, compress, compressed_bytes, decompress

__all__ = ["DTYPES", "compress", "compressed_bytes", "decompress"]
