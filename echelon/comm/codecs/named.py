"""The codec that a strategy names."""

from __future__ import annotations

from echelon.coding import Compression
from echelon.comm.codecs.casts import BFloat16, Float16
from echelon.comm.codecs.codec import Codec
from echelon.comm.codecs.int8 import Int8
from echelon.comm.codecs.onebit import OneBit
from echelon.comm.codecs.topk import TopK


def codec_for(compression: Compression) -> Codec:
    """The codec of rows; powersgd is one of matrices: see lowrank."""
    if compression.name == "topk":
        return TopK(compression.number)
    simple: dict[str, type[Codec]] = {"fp16": Float16, "bf16": BFloat16, "int8": Int8, "1bit": OneBit}
    return simple[compression.name]()
