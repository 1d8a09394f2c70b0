"""Compression of gradients to 8 bits each, chunk by chunk, as Bagua does it."""

from bagua_client.compression.minmax_uint8 import (
    BOUNDS_BYTES,
    DTYPES,
    RANGE_ELEMENTS,
    check_range,
    compress,
    compressed_bytes,
    decompress,
)

__all__ = [
    "BOUNDS_BYTES",
    "DTYPES",
    "RANGE_ELEMENTS",
    "check_range",
    "compress",
    "compressed_bytes",
    "decompress",
]
