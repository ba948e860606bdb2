"""Codecs that encode positions and values in few bytes, and compressors that combine them.

An index codec (`INDICES`) encodes a sorted set of coordinates as bytes. A value codec (`VALUES`) encodes float32
numbers as arrays that a message can carry. Both decode data from the network: they raise `MessageError` for anything
that they would not have written themselves, before they allocate memory for it. A compressor (`COMPRESSORS`) turns a
vector into a payload, and a payload into an approximation of the vector.

The package may import the foundations and `shoal.message`. Libraries are imported when a codec first needs them.
"""

from __future__ import annotations

from shoal.compression.floats import FloatCodec
from shoal.compression.indices import IndexCodec, Positions

INDICES: dict[str, str] = {
    "golomb-rice": "shoal.compression.indices:GolombRice",
    "elias-gamma": "shoal.compression.indices:EliasGamma",
    "elias-delta": "shoal.compression.indices:EliasDelta",
    "bitmap": "shoal.compression.indices:Bitmap",
    "raw": "shoal.compression.indices:Raw",
}

VALUES: dict[str, str] = {
    "float32": "shoal.compression.floats:Float32",
    "float16": "shoal.compression.floats:Float16",
    "bfloat16": "shoal.compression.floats:BFloat16",
    "int8": "shoal.compression.quantizers:Int8",
    "qsgd": "shoal.compression.quantizers:QSGD",
    "zstd": "shoal.compression.libraries:Zstd",
    "blosc2": "shoal.compression.libraries:Blosc2",
    "zfp": "shoal.compression.libraries:Zfp",
}

COMPRESSORS: dict[str, str] = {
    "topk": "shoal.compression.compressors:TopKCompressor",
    "random": "shoal.compression.compressors:RandomCompressor",
    "quantized": "shoal.compression.compressors:QuantizedCompressor",
}

__all__ = ["COMPRESSORS", "INDICES", "VALUES", "FloatCodec", "IndexCodec", "Positions"]
