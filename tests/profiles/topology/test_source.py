from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.topology import source
from claw_plan.profiles.topology.source import (
    MAX_LINE,
    Source,
    clean_line,
    decode,
    read_source,
    real_number,
    whole_number,
)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_encodings_are_told_apart(encoding: str) -> None:
    assert decode("GPU0\tGPU1 é\n".encode(encoding), "t").lstrip("\ufeff") == "GPU0\tGPU1 é\n"


def test_windows_text_is_read() -> None:
    assert decode(b"GPU0 \x80 x", "t") == "GPU0 \u20ac x"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b"0" * 1_000_000), "t is gzip-compressed; unpack it first"),
        (pickle.dumps({"a": 1}), "t is a Python pickle, which can run code.*refused"),
        (b"SQLite format 3\x00", "an SQLite database"),
        (b"\x7fELF\x02\x01\x01\x00\x00\x00\xff\xfe\x00\x00", "not a text file"),
        (b"", "t is empty"),
        (b" \n\t\n", "t is empty"),
    ],
)
def test_what_is_no_text_is_refused_by_name(content: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        decode(content, "t")


def test_files_that_are_not_there_or_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="there is no file"):
        read_source(tmp_path / "none")
    with pytest.raises(InputError, match="is a folder"):
        read_source(tmp_path)
    monkeypatch.setattr(source, "MAX_BYTES", 10)
    (tmp_path / "large").write_text("x" * 11)
    with pytest.raises(InputError, match="large is larger than"):
        read_source(tmp_path / "large")


def test_lines_lose_colours_and_odd_blanks() -> None:
    text = "a\x1b[1;31mb\x1b[0m\r\nc\u00a0d\rESC[4me\x1b[K\n[4mf[0m ^[[32mg"
    assert Source("t", text).lines == ["ab", "c d", "e", "f g"]
    assert clean_line("[0] NCCL [1]x") == "[0] NCCL [1]x"
    assert len(clean_line("x" * (MAX_LINE + 5))) == MAX_LINE


def test_numbers_of_any_length_are_read_or_refused() -> None:
    assert whole_number("8", 10) == 8
    assert whole_number("11", 10) is None
    assert whole_number("9" * 1_000_000, 10) is None
    assert whole_number("-1", 10) is None
    assert whole_number("٣", 10) is None
    assert real_number("2.5e3") == 2500
    assert real_number("nan") is None
    assert real_number("inf") is None
    assert real_number("-1") is None
    assert real_number("9" * 1_000_000) is None


@given(st.binary(max_size=300))
def test_any_bytes_are_decoded_or_refused(content: bytes) -> None:
    try:
        assert isinstance(decode(content, "t"), str)
    except InputError as error:
        assert str(error).startswith("t ")
