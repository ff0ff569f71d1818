"""Steps on 32-bit words that numba has no way to say, as LLVM's instructions for it.

Where two numbers of 32 bits meet, numba goes on in 64, which halves what a vector instruction
does and has no fast product; and it has no operation that compares many at once into a mask.
LLVM turns these into what the processor has, on any processor.

numba keeps what it compiled by the file of the function alone: after a change here delete
`kernels/__pycache__`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

MASK_WIDTH = 64
"""Words that `at_least_mask` compares at once, one for each bit of its answer."""

_WORD = ir.IntType(32)
_MAGNITUDE = 0x7FFFFFFF


def _instruction(describe: Any) -> Any:
    """What numba compiles calls of, from what says its types and writes it down."""
    return intrinsic(describe)


def _const(value: int) -> Any:
    return ir.Constant(_WORD, value)


@_instruction
def larger_magnitude(_: Any, largest: Any, bits: Any) -> Any:
    """The larger of a magnitude and that of a float's bits, as int32."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        magnitude = builder.and_(args[1], _const(_MAGNITUDE))
        return builder.select(builder.icmp_signed(">", magnitude, args[0]), magnitude, args[0])

    return types.int32(types.int32, types.int32), generate


@_instruction
def hashed_pair(_: Any, start: Any, place: Any, first: Any, second: Any) -> Any:
    """32 random bits for two words at a place, as reference.random_fractions makes them."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        start, place, first, second = args
        turned = builder.or_(builder.shl(second, _const(15)), builder.lshr(second, _const(17)))
        word = builder.add(builder.add(start, first), turned)
        place = builder.mul(builder.trunc(place, _WORD), _const(0x9E3779B1))
        word = builder.add(word, place)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            word = builder.xor(word, builder.lshr(word, _const(shift)))
            word = builder.mul(word, _const(factor))
        return builder.xor(word, builder.lshr(word, _const(16)))

    return types.uint32(types.uint32, types.int64, types.int32, types.int32), generate


def _fraction(builder: Any, half: Any) -> Any:
    # A sum of floats would be open to being taken apart and added in another order.
    middle = builder.or_(builder.shl(half, _const(1)), _const(1))
    unit = ir.Constant(ir.FloatType(), 2.0**-17)
    return builder.fmul(builder.sitofp(middle, ir.FloatType()), unit)


@_instruction
def upper_fraction(_: Any, word: Any) -> Any:
    """The upper 16 bits of a word as a fraction: the middle of its 65,536th of [0, 1]."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return _fraction(builder, builder.lshr(args[0], _const(16)))

    return types.float32(types.uint32), generate


@_instruction
def lower_fraction(_: Any, word: Any) -> Any:
    """The same of the lower 16 bits."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return _fraction(builder, builder.and_(args[0], _const(0xFFFF)))

    return types.float32(types.uint32), generate


@_instruction
def at_least_mask(_: Any, words: Any, start: Any, limit: Any) -> Any:
    """Bit j of the answer: whether the magnitude of words[start + j] is at or above the limit.

    The array is contiguous and holds `MASK_WIDTH` words from there; nothing checks it.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        many = ir.VectorType(_WORD, MASK_WIDTH)
        place = builder.gep(array.data, [args[1]])
        found = builder.load(builder.bitcast(place, many.as_pointer()), align=4)
        found = builder.and_(found, ir.Constant(many, [_MAGNITUDE] * MASK_WIDTH))
        limits = ir.Constant(many, [0] * MASK_WIDTH)
        for lane in range(MASK_WIDTH):
            limits = builder.insert_element(limits, args[2], _const(lane))
        return builder.bitcast(builder.icmp_signed(">=", found, limits), ir.IntType(MASK_WIDTH))

    return types.uint64(words, types.int64, types.int32), generate


@_instruction
def trailing_zeros(_: Any, mask: Any) -> Any:
    """The place of the lowest bit of a mask that is not zero."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate
