"""The text that names a codec, as `Candidate.codec` has it, to what a planner must know of it.

A codec makes gradients smaller on the wire; kernels/codec.py has the arithmetic, and a test holds
that both count the same bytes. A text is a name, then, after a colon, its parameters in order:
`one_bit`, `top_k:0.001`, `fp8:e5m2,128`. Here stands the only grammar of it.

All sizes are of one buffer that is encoded at once; sparse codecs move (index, value) pairs.
`low_rank` alone asks what the buffer consists of: matrices travel as two thin ones (PowerSGD), all
else as it is (`Factors`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

from claw_plan.profiles.codec_penalty import step_penalty
from claw_plan.profiles.errors import InputError, near_matches

Value = str | int | float

ALIGNMENT_BYTES = 4
"""Codes take a multiple of this, so that those of several chunks may lie one after another."""

PAIR_BYTES = 8
"""Of what sparse codecs send: an int32 index and an fp32 value."""

LOW_RANK = "low_rank"
"""The name of PowerSGD's: two all-reduces of numbers, no codes."""

ZERO_ONE = "zero_one"
"""The name of 0/1 Adam's: one bit of what replicas moved since they last met, now and then."""

LARGEST_RANK = 1024

LARGEST_EXPONENT = 126
"""2^k and 2^-k are both normal fp32 numbers up to here."""


class CodecError(InputError, ValueError):
    """A codec's text that names none, or codes that its codec did not make."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecDescriptor:
    """What one codec sends, keeps and costs."""

    name: str
    parameters: Mapping[str, Value]
    """By the names that the codec's class takes."""
    needs_error_feedback: bool
    """Whether training goes wrong unless what was not sent is added to the next gradient."""
    encode_bytes: float
    """Memory moved per element while encoding, when the codec streams as on a GPU: the cost is
    this over the device's memory bandwidth. Counted from the kernels, reads and writes."""
    decode_bytes: float
    step_penalty: float
    """Steps until the same loss, as a multiple of those without a codec (`codec_penalty`)."""
    payload_bytes: Callable[[int], int]

    @property
    def momentum(self) -> float:
        """What a sparse codec keeps of SGD's momentum before it selects; 0 for none."""
        return float(self.parameters.get("momentum", 0.0))

    def wire_bytes(self, numel: int) -> int:
        """Bytes of the codes of so many elements; of `threshold` the most they can be."""
        if not numel:
            return 0
        return -(-self.payload_bytes(numel) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def state_bytes(self, numel: int) -> int:
        """What is kept between steps for a bucket: the residual of error feedback, in fp32.

        Of `low_rank` nothing for what travels whole; of matrices `Factors` says more.
        """
        return 4 * numel if self.needs_error_feedback and self.name != LOW_RANK else 0


MatrixShape = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """What `low_rank` makes of the tensors of a bucket: the two thin factors of each matrix.

    Source: Vogels et al., "PowerSGD", arXiv 1905.13727, algorithm 1.
    """

    matrices: tuple[MatrixShape, ...]
    """Those that travel as factors of `rank` columns, or of as many as their smaller side has."""
    rank: int
    whole: int
    """Elements of all else, which travel as they are."""

    @property
    def left(self) -> int:
        """Elements of P [n, r] of all matrices."""
        return sum(rows * min(self.rank, rows, columns) for rows, columns in self.matrices)

    @property
    def right(self) -> int:
        """Elements of Q [m, r]."""
        return sum(columns * min(self.rank, rows, columns) for rows, columns in self.matrices)

    @property
    def factored(self) -> int:
        """Elements of the matrices themselves."""
        return sum(rows * columns for rows, columns in self.matrices)

    def state_bytes(self) -> int:
        """What a rank keeps in fp32 between steps: what was not sent, and the Q to go on from."""
        return 4 * (self.factored + self.right)


def factors_of(shapes: Iterable[tuple[int, ...]], rank: int) -> Factors:
    """Of tensors of these shapes; a matrix that two factors would not make smaller stays whole."""
    matrices, whole = [], 0
    for shape in map(matrix_shape, shapes):
        if pays(shape, rank):
            matrices.append(shape)
        else:
            whole += shape[0] * shape[1]
    return Factors(matrices=tuple(matrices), rank=rank, whole=whole)


def matrix_shape(shape: tuple[int, ...]) -> MatrixShape:
    """The first dim by all others: output by input of linears and convolutions."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def pays(shape: MatrixShape, rank: int) -> bool:
    """Whether two thin matrices are smaller than the whole."""
    return factored_elements(shape, rank) < shape[0] * shape[1]


def factored_elements(shape: MatrixShape, rank: int) -> int:
    """Of both factors of a matrix."""
    return sum(shape) * min(rank, *shape)


def kept_elements(density: float, numel: int) -> int:
    """ceil(density · numel), exactly for the decimal number that was written."""
    return math.ceil(Fraction(repr(density)) * numel)


@dataclass(frozen=True, slots=True)
class _Parameter:
    name: str
    default: Value | None
    """None: must be given."""
    read: Callable[[str], Value]
    rule: str
    allows: Callable[[Value], bool]


@dataclass(frozen=True, slots=True)
class _Form:
    """One codec of the registry."""

    parameters: tuple[_Parameter, ...]
    payload_bytes: Callable[..., int]
    """Of (numel, *parameters)."""
    encode_bytes: float
    decode_bytes: float
    needs_error_feedback: bool = True


def _choice(name: str, *choices: str) -> _Parameter:
    return _Parameter(name, choices[0], str, " or ".join(choices), lambda value: value in choices)


def _number(
    name: str, default: Value | None, read: Callable[[str], Value], low: float, high: float
) -> _Parameter:
    def allows(value: Value) -> bool:
        return isinstance(value, int | float) and low <= value <= high

    kind = "a whole number" if read is int else "a number"
    return _Parameter(name, default, read, f"{kind} from {low:g} to {high:g}", allows)


def _power(name: str, default: int, low: int, high: int) -> _Parameter:
    def allows(value: Value) -> bool:
        return isinstance(value, int) and low <= value <= high and not value & (value - 1)

    return _Parameter(name, default, int, f"a power of two from {low} to {high}", allows)


def _block(default: int) -> _Parameter:
    return _power("block", default, 8, 4096)


_MOMENTUM = _number("momentum", 0.0, float, 0.0, 0.999)
"""Of SGD, kept on each rank before the codec: Deep Gradient Compression's. 0 for none."""


def _blocks(numel: int, block: int) -> int:
    return -(-numel // block)


_FORMS: Mapping[str, _Form] = MappingProxyType(
    {
        "none": _Form(
            (_choice("format", "fp32", "fp64"),),
            lambda numel, format: numel * (4 if format == "fp32" else 8),
            encode_bytes=8,
            decode_bytes=8,
            needs_error_feedback=False,
        ),
        "fp16": _Form(
            (_number("exponent", 0, int, -LARGEST_EXPONENT, LARGEST_EXPONENT),),
            lambda numel, exponent: 2 * numel,
            encode_bytes=6,
            decode_bytes=6,
            needs_error_feedback=False,
        ),
        # Read twice: the scale is known only at the end.
        "one_bit": _Form(
            (_choice("scale", "l1", "l2"),),
            lambda numel, scale: 4 + -(-numel // 8),
            encode_bytes=8.125,
            decode_bytes=4.125,
        ),
        # Codes are those of one_bit; the parameter says how seldom there are any.
        ZERO_ONE: _Form(
            (_power("longest_away", 4, 1, 1024),),
            lambda numel, longest_away: 4 + -(-numel // 8),
            encode_bytes=8.125,
            decode_bytes=4.125,
        ),
        # Selecting reads all about four times (radix select by bytes of the magnitude), then
        # once more to collect.
        "top_k": _Form(
            (_number("density", 0.001, float, 1e-9, 1.0), _MOMENTUM),
            lambda numel, density, momentum: PAIR_BYTES * kept_elements(density, numel),
            encode_bytes=20,
            decode_bytes=4,
        ),
        # Of one vector, which travels whole; of matrices `Factors` says more. Kernels are those
        # of planner/low_rank.py.
        LOW_RANK: _Form(
            (_number("rank", 16, int, 1, LARGEST_RANK),),
            lambda numel, rank: 4 * numel,
            encode_bytes=0,
            decode_bytes=0,
        ),
        "threshold": _Form(
            (_number("threshold", None, float, 0.0, 3e38), _MOMENTUM),
            lambda numel, threshold, momentum: PAIR_BYTES * numel,
            encode_bytes=8,
            decode_bytes=4,
        ),
        "fp8": _Form(
            (_choice("format", "e4m3", "e5m2"), _block(128)),
            lambda numel, format, block: numel + _blocks(numel, block),
            encode_bytes=5,
            decode_bytes=5,
        ),
        "int8": _Form(
            (_block(256), _choice("rounding", "nearest", "stochastic")),
            lambda numel, block, rounding: numel + 4 * _blocks(numel, block),
            encode_bytes=5,
            decode_bytes=5,
        ),
        "int4": _Form(
            (_block(64), _choice("rounding", "nearest", "stochastic")),
            lambda numel, block, rounding: -(-numel // 2) + 4 * _blocks(numel, block),
            encode_bytes=4.5,
            decode_bytes=4.5,
        ),
    }
)

CODEC_NAMES = tuple(_FORMS)


def describe_codec(text: str) -> CodecDescriptor:
    """The codec that a text names.

    Raises:
        CodecError: if no codec is called so, or a parameter is missing, unknown or out of range.
    """
    name, _, given = text.partition(":")
    form = _FORMS.get(name)
    if form is None:
        raise CodecError(f"there is no codec {name!r}; {near_matches(name, CODEC_NAMES)}")
    values = given.split(",") if given else []
    if len(values) > len(form.parameters):
        known = ",".join(parameter.name for parameter in form.parameters)
        raise CodecError(f"codec {text!r}: {len(values)} parameters; write {name}:{known}")
    parameters = {
        parameter.name: _read(text, parameter, values[index] if index < len(values) else None)
        for index, parameter in enumerate(form.parameters)
    }
    return CodecDescriptor(
        name=name,
        parameters=MappingProxyType(parameters),
        needs_error_feedback=form.needs_error_feedback,
        encode_bytes=form.encode_bytes,
        decode_bytes=form.decode_bytes,
        step_penalty=step_penalty(name, parameters),
        payload_bytes=lambda numel: form.payload_bytes(numel, *parameters.values()),
    )


def _read(text: str, parameter: _Parameter, given: str | None) -> Value:
    if given is None:
        if parameter.default is None:
            raise CodecError(f"codec {text!r}: give its {parameter.name}, {parameter.rule}")
        return parameter.default
    try:
        value = parameter.read(given.strip())
    except ValueError:
        value = given
    if not parameter.allows(value):
        raise CodecError(
            f"codec {text!r}: {parameter.name} must be {parameter.rule}, got {given!r}"
        )
    return value
