"""The GPU's kernels: equal to their definition in Triton's interpreter, and compiled for a GPU.

Triton decides when it is imported whether it interprets, so one test runs this file again in a
process of its own, where the others are not skipped.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from claw_plan.kernels import reference
from claw_plan.kernels.reference import Fp8Format

pytest.importorskip("triton", reason="needs triton: pip install triton==3.9.0 --no-deps")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs inside the test of the interpreter")

SIZES = (1, 7, 255, 256, 257, 3001)
SPECIAL = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, -1e-45, 3.4e38])


@pytest.fixture(scope="module")
def twin() -> ModuleType:
    return importlib.import_module("claw_plan.kernels.triton_kernels")


def inputs(numel: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(numel)
    normal = torch.randn(numel, generator=generator)
    wide = normal * 2.0 ** torch.randint(-140, 120, (numel,), generator=generator)
    special = normal.clone()
    special[: min(8, numel)] = SPECIAL[: min(8, numel)]
    # Halfway between two codes, of fp8 often and of int8 where the scale is one.
    halves = torch.randint(-254, 255, (numel,), generator=generator) / 2
    halves[::32] = 127
    return [normal, wide, special, halves, torch.zeros(numel)]


def bytes_of(count: int) -> Tensor:
    return torch.full((count,), 77, dtype=torch.uint8)


def assert_equal(made: list[tuple[Tensor, ...]]) -> None:
    for ours, theirs in zip(*made, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the inner run")
def test_all_others_pass_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", __file__, "-p", "no:cacheprovider"]
    environment: dict[str, Any] = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert " passed" in ran.stdout or "..." in ran.stdout


FLOATS, BYTES, SMALL = "*fp32", "*u8", "*i8"
FP8 = {"mantissa": 3, "bias": 7, "highest": 8, "block": 128}
COMPILED: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "_partial_sums": ({"x": FLOATS, "out": "*fp64"}, {"squares": True, "tile": 4096}),
    "_pack_signs": ({"x": FLOATS, "out": BYTES, "size": "i32"}, {"tile": 128}),
    "_unpack_signs": ({"codes": BYTES, "scale": FLOATS, "out": FLOATS}, {"tile": 1024}),
    "_encode_ints": (
        {"x": FLOATS, "scales": FLOATS, "codes": SMALL, "blocks": "i32", "start": "i64"},
        {"limit": 127, "at_random": True, "block": 256, "rows": 4},
    ),
    "_decode_ints": (
        {"codes": SMALL, "scales": FLOATS, "out": FLOATS},
        {"block": 256, "tile": 1024},
    ),
    "_pack_nibbles": ({"codes": SMALL, "out": BYTES, "size": "i32"}, {"tile": 1024}),
    "_unpack_nibbles": ({"packed": BYTES, "out": SMALL}, {"tile": 1024}),
    "_encode_fp8": (
        {"x": FLOATS, "codes": BYTES, "exponents": BYTES, "blocks": "i32"},
        {**FP8, "rows": 8},
    ),
    "_decode_fp8": (
        {"codes": BYTES, "exponents": BYTES, "out": FLOATS},
        {**FP8, "tile": 1024},
    ),
}
"""The types of a kernel's arguments, beside numel, and its constants."""


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
@pytest.mark.parametrize("name", COMPILED)
def test_it_compiles_for_an_h100(twin: ModuleType, name: str, tmp_path: Path) -> None:
    from triton import compile as compile_kernel  # not at the top: it may be missing
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types, constants = COMPILED[name]
    kernel = getattr(twin, name)
    known = {"numel": "i32", **types, **dict.fromkeys(constants, "constexpr")}
    signature = {argument: known[argument] for argument in kernel.arg_names}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        source = ASTSource(kernel, signature, constexprs=constants)
        made = compile_kernel(source, target=GPUTarget("cuda", 90, 32))
    assert "div.full" not in made.asm["ptx"], "an inexact division gives other codes"


@inside
@pytest.mark.parametrize("numel", SIZES)
def test_signs_are_equal(twin: ModuleType, numel: int) -> None:
    for x in inputs(numel):
        made = []
        for one in (twin, reference):
            codes, back = bytes_of(-(-numel // 8)), torch.empty(numel)
            one.pack_signs(x, codes)
            one.unpack_signs(codes, torch.tensor(0.3), back)
            made.append((codes, back))
        assert_equal(made)


@inside
@pytest.mark.parametrize("numel", [*SIZES, 10_001])
def test_sums_agree_to_one_ulp(twin: ModuleType, numel: int) -> None:
    for x in inputs(numel):
        for name in ("mean_abs", "root_mean_square"):
            ours, theirs = getattr(twin, name)(x), getattr(reference, name)(x)
            torch.testing.assert_close(ours, theirs, rtol=2.0**-23, atol=0, equal_nan=True)


@inside
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("limit", [7, 127])
@pytest.mark.parametrize("seed", [None, 0, 3])
def test_small_numbers_are_equal(
    twin: ModuleType, numel: int, limit: int, seed: int | None
) -> None:
    for x in inputs(numel):
        made = []
        for one in (twin, reference):
            scales, back = torch.empty(-(-numel // 32)), torch.empty(numel)
            codes = bytes_of(numel).view(torch.int8)
            one.encode_ints(x, 32, limit, seed, scales, codes)
            one.decode_ints(codes, scales, 32, back)
            made.append((scales, codes, back))
        assert_equal(made)


@inside
@pytest.mark.parametrize("block", [8, 128, 4096])
def test_blocks_of_all_sizes_are_equal(twin: ModuleType, block: int) -> None:
    x, made = torch.randn(10_000), []
    for one in (twin, reference):
        scales, codes = torch.empty(-(-10_000 // block)), torch.empty(10_000, dtype=torch.int8)
        one.encode_ints(x, block, 127, None, scales, codes)
        made.append((scales, codes))
    assert_equal(made)


@inside
@pytest.mark.parametrize("numel", SIZES)
def test_nibbles_are_equal(twin: ModuleType, numel: int) -> None:
    codes, made = torch.randint(-8, 8, (numel,), dtype=torch.int8), []
    for one in (twin, reference):
        packed, back = bytes_of(-(-numel // 2)), torch.empty_like(codes)
        one.pack_nibbles(codes, packed)
        one.unpack_nibbles(packed, back)
        made.append((packed, back))
    assert_equal(made)


@inside
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("form", [reference.E4M3, reference.E5M2], ids=["e4m3", "e5m2"])
def test_fp8_numbers_are_equal(twin: ModuleType, numel: int, form: Fp8Format) -> None:
    for x in inputs(numel):
        made = []
        for one in (twin, reference):
            codes, exponents, back = bytes_of(numel), bytes_of(-(-numel // 32)), torch.empty(numel)
            one.encode_fp8(x, 32, form, codes, exponents)
            one.decode_fp8(codes, exponents, 32, form, back)
            made.append((codes, exponents, back))
        assert_equal(made)


@inside
@pytest.mark.parametrize("form", [reference.E4M3, reference.E5M2], ids=["e4m3", "e5m2"])
def test_every_fp8_code_is_decoded_equally(twin: ModuleType, form: Fp8Format) -> None:
    largest = {3: 0x7E, 2: 0x7B}[form.mantissa_bits]
    codes = torch.tensor([c for c in range(256) if c & 127 <= largest], dtype=torch.uint8)
    for exponent in (0, 1 + form.largest_exponent, 127, 200, 255):
        made = []
        for one in (twin, reference):
            back = torch.empty(codes.numel())
            exponents = torch.full((1,), exponent, dtype=torch.uint8)
            one.decode_fp8(codes, exponents, 256, form, back)
            made.append((back,))
        assert_equal(made)
