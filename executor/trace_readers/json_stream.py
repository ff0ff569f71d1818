"""A JSON file of any size becomes its members one by one, in memory that does not grow with it.

A profiler's trace is one object with a list of millions of events. `stream_members` gives each
event as soon as it is read, and every other member of the object whole. Whatever is wrong with
the text becomes one `InputError` that names the file and the byte.
"""

from __future__ import annotations

import json
import re
from codecs import getincrementaldecoder
from collections.abc import Collection, Iterator
from typing import Any, BinaryIO

from claw_plan.profiles.errors import InputError

CHUNK_BYTES = 1 << 20
MAX_VALUE_CHARS = 64 << 20
"""Of one event, or one member beside the list of events. The largest known, the process groups
of a job of thousands of ranks, has some megabytes."""

_BLANK = re.compile(r"[ \t\r\n]*")
_BARE_LIST = "traceEvents"
"""The member that a file which is nothing but a list stands for (Trace Event Format, 2016)."""


EMPTY = object()
"""Stands for the items of an empty list."""


def stream_members(
    file: BinaryIO, where: str, lists: Collection[str]
) -> Iterator[tuple[str, Any]]:
    """(key, value) of each member of the object in `file`; of a member named in `lists` each item,
    or one EMPTY.

    `where` names the file in messages. NaN and Infinity come as floats.
    """
    return _Stream(file, where).members(frozenset(lists))


class _Stream:
    """The text that is read but not yet used."""

    def __init__(self, file: BinaryIO, where: str) -> None:
        self._file = file
        self._where = where
        self._decode = getincrementaldecoder("utf-8-sig")("strict").decode
        self._scan = json.JSONDecoder().raw_decode
        self._text = ""
        self._at = 0
        self._dropped_bytes = 0
        self._ended = False

    def members(self, lists: frozenset[str]) -> Iterator[tuple[str, Any]]:
        first = self._peek()
        if first == "[":
            yield from self._items(_BARE_LIST, may_stay_open=True)
            return
        if first != "{":
            came = f"it begins with {self._text[self._at : self._at + 12]!r}" if first else "empty"
            raise InputError(f"{self._where} is no JSON trace: {came}; name a trace file")
        self._at += 1
        if self._peek() == "}":
            return
        while True:
            if self._peek() != '"':
                raise self._broken("a key in quotes is expected")
            key = self._value()
            if self._peek() != ":":
                raise self._broken("a colon is expected")
            self._at += 1
            if key in lists and self._peek() == "[":
                yield from self._items(key, may_stay_open=False)
            else:
                yield key, self._value()
            if not self._goes_on("}"):
                return

    def _items(self, key: str, *, may_stay_open: bool) -> Iterator[tuple[str, Any]]:
        self._at += 1
        if self._peek() == "]":
            self._at += 1
            yield key, EMPTY
            return
        while True:
            yield key, self._value()
            if may_stay_open and not self._peek():
                return  # the format allows a bare list that a killed program left open
            if not self._goes_on("]"):
                return

    def _goes_on(self, closing: str) -> bool:
        """Whether a comma follows, not the end of the list or object."""
        mark = self._peek()
        if mark not in (",", closing) or not mark:
            raise self._broken(f"a comma or {closing!r} is expected")
        self._at += 1
        return mark == ","

    def _peek(self) -> str:
        """The next character that is not blank; empty at the end of the file."""
        while True:
            blank = _BLANK.match(self._text, self._at)
            assert blank is not None
            self._at = blank.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read_more():
                return ""

    def _value(self) -> Any:
        """The value that begins at the next character that is not blank."""
        if not self._peek():
            raise self._broken("a value is expected")
        wanted = CHUNK_BYTES
        while True:
            try:
                value, end = self._scan(self._text, self._at)
            except RecursionError:
                raise InputError(f"{self._place()}: nested too deeply; wrong file?") from None
            except json.JSONDecodeError as error:
                problem, position = error.msg, error.pos
            except ValueError as error:  # an integer of more digits than Python converts
                reason = str(error).split(";")[0]
                raise InputError(f"{self._place()}: {reason}; wrong file?") from None
            else:
                # A number near the end of what is read may go on: '12' before '.5', 'e+3'.
                length = end - self._at
                may_go_on = end + len("e+3") > len(self._text)
                if not may_go_on or not self._read_more():
                    self._at += length
                    return value
                continue
            if len(self._text) - self._at > MAX_VALUE_CHARS:
                raise InputError(
                    f"{self._place()}: one value is longer than {MAX_VALUE_CHARS >> 20} MiB, or "
                    f"not JSON ({problem}); wrong file?"
                )
            if not self._read_more(wanted):
                raise self._broken(problem, position)
            wanted *= 2

    def _read_more(self, wanted: int = 0) -> bool:
        """Appends to the text; False at the end of the file."""
        while not self._ended:
            chunk = self._file.read(wanted or CHUNK_BYTES)
            self._ended = not chunk
            used = self._text[: self._at]
            self._dropped_bytes += len(used) if used.isascii() else len(used.encode())
            try:
                text = self._decode(chunk, final=self._ended)
            except UnicodeDecodeError:
                raise InputError(
                    f"{self._place()}: not text in UTF-8; name a JSON trace, packed with gzip or "
                    "tar at most"
                ) from None
            self._text = self._text[self._at :] + text
            self._at = 0
            if text:
                return True
        return False

    def _place(self) -> str:
        used = self._text[: self._at]
        return f"{self._where}, byte {self._dropped_bytes + len(used.encode())}"

    def _broken(self, problem: str, position: int | None = None) -> InputError:
        """The error for text that is not JSON from `position` on, by default from here."""
        position = self._at if position is None else position
        left = self._text[position:].strip()
        # At its end a file that was cut holds half a string, half a word, or nothing at all.
        if self._ended and (len(left) < len("Infinity") or problem.startswith("Unterminated")):
            end = self._dropped_bytes + len(self._text.encode())
            return InputError(
                f"{self._where} is truncated at byte {end}: it ends in the middle of the list; "
                "record or copy it again"
            )
        came = self._text[position : position + 20]
        return InputError(f"{self._place()}: not JSON ({problem}, got {came!r}); record it again")
