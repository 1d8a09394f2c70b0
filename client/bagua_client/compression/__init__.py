"""Gradients in fewer bits: Bagua's eight, a chunk at a time."""

from bagua_client.compression.minmax_uint8 import (
    DTYPES,
    RANGE_ELEMENTS,
    check_range,
    compress,
    compressed_bytes,
    decompress,
)

__all__ = ["DTYPES", "RANGE_ELEMENTS", "check_range", "compress", "compressed_bytes", "decompress"]
