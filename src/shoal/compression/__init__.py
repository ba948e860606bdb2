"""How to say less: sets of positions and lists of numbers as few bytes.

A codec of positions (`INDICES`) turns a sorted set of coordinates into bytes; a codec of values (`VALUES`) turns
float32 numbers into arrays that a message can carry. Both decode what comes from the network: whatever they would
not have written themselves raises `MessageError`, before memory is taken for it. A compressor (`COMPRESSORS`) puts
them together: a vector to a payload, and back to an approximation of the vector.

Libraries are imported when a codec first needs them.
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
    "int8": "shoal.compression.floats:Int8",
    "qsgd": "shoal.compression.floats:QSGD",
    "zstd": "shoal.compression.floats:Zstd",
    "blosc2": "shoal.compression.floats:Blosc2",
    "zfp": "shoal.compression.floats:Zfp",
}

COMPRESSORS: dict[str, str] = {
    "topk": "shoal.compression.compressors:TopKCompressor",
    "random": "shoal.compression.compressors:RandomCompressor",
    "quantized": "shoal.compression.compressors:QuantizedCompressor",
}

__all__ = ["COMPRESSORS", "INDICES", "VALUES", "FloatCodec", "IndexCodec", "Positions"]
