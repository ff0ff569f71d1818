"""The words of a shell script with the lines they stand on, as far as a launcher's needs.

Quotes, brackets of arrays and line continuations are taken off, comments left out, variables and
products put in where the script itself assigns them. It is no shell: what comes from the
environment, a loop or another file stays unknown and is said to be.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_ASSIGNED = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)\+?=(.*)\Z", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::?-([^}]*))?\}|([A-Za-z_]\w*))")
_ARITHMETIC = re.compile(r"\$\(\(([^()]*)\)\)")
_COMMENT = re.compile(r"(?:^|\s)#.*\Z")


@dataclass(frozen=True, slots=True)
class Word:
    """A word, its line from 1, and the variable in it that has no value ('' if it is known)."""

    text: str
    line: int
    unknown: str = ""


def words_of(text: str) -> list[Word]:
    """The words of a script in order, values of variables put in."""
    known: dict[str, str] = {}
    found: list[Word] = []
    for number, line in enumerate(text.splitlines(), start=1):
        for raw in _raw_words(line):
            word = raw
            assigned = _ASSIGNED.match(raw)
            if assigned and not raw.startswith("-"):
                name, word = assigned[1], assigned[2].removeprefix("(")
                value, missing = _filled(word, known)
                if value and not missing and not value.startswith("-"):
                    known[name] = value
            value, missing = _filled(word, known)
            if value or missing:
                found.append(Word(value or word, number, missing))
    return found


def _raw_words(line: str) -> Iterator[str]:
    line = _COMMENT.sub("", line.rstrip())
    line = _ARITHMETIC.sub(lambda match: f"$(({''.join(match[1].split())}))", line)
    for part in line.replace('"', "").replace("'", "").split():
        word = part if "$((" in part else part.lstrip("(").rstrip(")")
        if word not in ("", "\\", "export"):
            yield word.removesuffix("\\")


def _filled(word: str, known: dict[str, str]) -> tuple[str, str]:
    """The word with its variables' values, and the first variable that has none."""
    missing = ""

    def value(match: re.Match[str]) -> str:
        nonlocal missing
        name = match[1] or match[3]
        found = known.get(name, match[2])
        if found is None:
            missing = missing or name
            return ""
        return found

    def result(match: re.Match[str]) -> str:
        inner = re.sub(r"[A-Za-z_]\w*", lambda m: known.get(m[0], m[0]), match[1].replace("$", ""))
        return str(_product(inner)) if re.fullmatch(r"[\d*/+]+", inner) else match[0]

    word = _ARITHMETIC.sub(result, word)
    if "$((" in word:
        return word, re.sub(r"[^A-Za-z_].*", "", word.split("$((")[1].lstrip("$")) or "arithmetic"
    return _VARIABLE.sub(value, word), missing


def _product(text: str) -> int:
    """Sums of products and whole quotients, left to right as a shell computes them."""
    total = 0
    for term in text.split("+"):
        first, *rest = re.split(r"([*/])", term)
        value = int(first or 0)
        for operator, operand in zip(rest[::2], rest[1::2], strict=True):
            number = int(operand or 1)
            value = value * number if operator == "*" else value // max(1, number)
        total += value
    return total
