"""A file of any encoding to clean text with line numbers, bounded in size.

First step of every reader. What is no text is refused by name: archives are not unpacked and
pickles, which can run code, are never loaded.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.files import read_limited

MAX_BYTES = 32_000_000
"""Of one file; a day's NCCL_DEBUG=INFO log of 1024 ranks fits."""

MAX_LINE = 20_000
"""Characters of a line that line-wise readers look at; a matrix row of 576 GPUs has 4,000."""

_MAX_DIGITS = 18

_MAGIC = {
    b"\x1f\x8b": "gzip-compressed; unpack it first (gunzip)",
    b"PK\x03\x04": "a zip archive; unpack it first",
    b"BZh": "bzip2-compressed; unpack it first",
    b"\xfd7zXZ": "xz-compressed; unpack it first",
    b"(\xb5/\xfd": "zstd-compressed; unpack it first",
    b"SQLite format 3": "an SQLite database; a Nsight export is for claw-plan replay",
    b"\x93NUMPY": "a NumPy array, not a topology",
}
_PICKLE = re.compile(rb"\x80[\x02-\x05]")
_ANSI = re.compile(
    r"(?:\x1b|\u241b|\bESC|\^\[)\[[0-9;?]{0,20}[A-Za-z]"  # colours, also as less and cat -v show
    r"|\x1b\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)"  # window titles
    r"|\x1b[()][A-Z0-9]"
    r"|(?<![\w\]])\[\d{1,3}(?:;\d{1,3}){0,4}m"  # colours whose ESC was lost in pasting
    r"|\[0?m"
)
_ODD_BLANKS = "\u00a0\u2002\u2003\u2007\u2009\u202f\u3000\x0b\x0c"
_FRAMES = "\u2502\u2503\u2551"
"""Upright strokes, with which programs draw tables."""

_BLANKS = dict.fromkeys(map(ord, _ODD_BLANKS + _FRAMES), " ")
_NOTHING = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\x00\x08"), "")
_CLEAN = {**_BLANKS, **_NOTHING}


@dataclass(frozen=True)
class Source:
    """A file's name and text; lines are counted from 1."""

    name: str
    text: str = field(repr=False)

    @cached_property
    def lines(self) -> list[str]:
        """The text's lines without colours, line ends and odd blanks, at most MAX_LINE long."""
        text = self.text.replace("\r\n", "\n").replace("\r", "\n")
        if "\\tGPU" in text:  # a program's string, as its log or a JSON file quotes it
            text = text.replace("\\n", "\n").replace("\\t", "\t")
        return [clean_line(line) for line in text.split("\n")]

    def where(self, line: int) -> str:
        """'topo.txt:7'."""
        return f"{self.name}:{line}"


def clean_line(line: str) -> str:
    """One line without escapes and with plain blanks."""
    return _ANSI.sub("", line[:MAX_LINE]).translate(_CLEAN)


def read_source(path: Path) -> Source:
    """Reads a text in UTF-8 or UTF-16, with or without byte-order mark.

    Raises InputError for a file that is not there, is too large, or is no text.
    """
    advice = "; cut out the part that describes the machine (of a log, the lines with NCCL)"
    content = read_limited(path, MAX_BYTES, advice)
    return Source(path.name, decode(content, path.name))


def decode(content: bytes, name: str) -> str:
    """The text in `content`; raises InputError for binary files, saying what they are."""
    for magic, what in _MAGIC.items():
        if content.startswith(magic):
            raise InputError(f"{name} is {what}")
    if _PICKLE.match(content):
        raise InputError(
            f"{name} is a Python pickle, which can run code when it is read: refused; export its "
            "numbers as JSON with the tool that wrote it"
        )
    encoding = _encoding(content)
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        if b"\x00" in content:
            raise InputError(
                f"{name} is not a text file (byte {error.start} is not {encoding.upper()})"
            ) from None
        text = content.decode("cp1252", errors="replace")  # from a Windows editor
    if text.count("\x00") > len(text) // 100:
        raise InputError(f"{name} is not a text file: it holds zero bytes")
    if not text.strip("\ufeff \t\r\n\x00"):
        raise InputError(f"{name} is empty")
    return text


def _encoding(content: bytes) -> str:
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    head = content[:4096]
    if len(head) >= 4 and head[1::2].count(0) > len(head) // 3:
        return "utf-16-le"
    if len(head) >= 4 and head[0::2].count(0) > len(head) // 3:
        return "utf-16-be"
    return "utf-8-sig"


def whole_number(text: str, limit: int) -> int | None:
    """A number of digits up to `limit`; None for anything else, however long."""
    if len(text) > _MAX_DIGITS or not (text.isascii() and text.isdigit()):
        return None
    number = int(text)
    return number if number <= limit else None


def real_number(text: str) -> float | None:
    """A finite number of at least zero; None for anything else, NaN and infinity included."""
    if len(text) > 40:
        return None
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None
