"""The text that names a codec to the codec: where others begin with kernels/.

    codec = codec_of("one_bit")
    codes = codec.encode(bucket)  # uint8, codec.wire_bytes(bucket.numel()) long
    bucket = codec.decode(codes, bucket.numel())

profiles/codecs.py has the grammar and what a planner must know of each codec.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from claw_plan.kernels.blocks import Fp8Blocks, Int4Blocks, Int8Blocks
from claw_plan.kernels.codec_base import Codec
from claw_plan.kernels.one_bit import OneBit
from claw_plan.kernels.plain import Half, Uncompressed
from claw_plan.kernels.sparse import Threshold, TopK
from claw_plan.profiles.codecs import LOW_RANK, ZERO_ONE, CodecError, describe_codec

__all__ = ["CODECS", "Codec", "CodecError", "codec_of"]

CODECS: Mapping[str, Callable[..., Codec]] = MappingProxyType(
    {
        codec.name: codec
        for codec in (
            *(Uncompressed, Half, OneBit, TopK, Threshold),
            *(Fp8Blocks, Int8Blocks, Int4Blocks),
        )
    }
)


def codec_of(text: str) -> Codec:
    """The codec that a text names, such as `top_k:0.001`.

    Raises:
        CodecError: if the text names none.
    """
    descriptor = describe_codec(text)
    if descriptor.name == LOW_RANK:
        raise CodecError(f"codec {text!r} makes no codes: PowerSGD all-reduces thin matrices")
    if descriptor.name == ZERO_ONE:
        raise CodecError(f"codec {text!r} says when ranks meet; what they send then is one_bit")
    # Momentum is kept before a codec, by who calls it (`momentum_correction`).
    own = {name: value for name, value in descriptor.parameters.items() if name != "momentum"}
    return CODECS[descriptor.name](**own)
