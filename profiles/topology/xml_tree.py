"""A small, safe XML tree with line numbers: for NCCL's topology files and their like.

Document types and entities are refused (so no expansion, and nothing is fetched), depth and
number of elements are bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.parsers import expat

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.topology.source import Source

MAX_ELEMENTS = 50_000
MAX_DEPTH = 64
_MAX_VALUE = 4096


@dataclass
class Element:
    """A tag with its attributes, its line, its parent and its children."""

    tag: str
    attributes: dict[str, str]
    line: int
    parent: Element | None = field(default=None, repr=False)
    children: list[Element] = field(default_factory=list, repr=False)

    def get(self, name: str) -> str:
        """An attribute; '' where it is not given."""
        return self.attributes.get(name, "")

    def all(self, tag: str) -> Iterator[Element]:
        """All elements of that tag below this one, in the file's order."""
        for child in self.children:
            if child.tag == tag:
                yield child
            yield from child.all(tag)

    def ancestors(self) -> list[Element]:
        """The parents, from the nearest to the root."""
        found = []
        parent = self.parent
        while parent is not None:
            found.append(parent)
            parent = parent.parent
        return found


def parse(source: Source) -> Element:
    """The root element. Raises InputError with the line of what is wrong or not allowed."""
    builder = _Builder(source)
    text = source.text[source.text.find("<") :] if "<" in source.text else source.text
    skipped = source.text[: len(source.text) - len(text)].count("\n")
    parser = expat.ParserCreate(encoding="utf-8")  # what the declaration says was decoded already
    builder.parser, builder.skipped = parser, skipped
    parser.StartDoctypeDeclHandler = builder.refuse_doctype
    parser.EntityDeclHandler = builder.refuse_doctype
    parser.StartElementHandler = builder.start
    parser.EndElementHandler = builder.end
    try:
        parser.Parse(text.encode("utf-8", errors="replace"), True)
    except expat.ExpatError as error:
        line = error.lineno + skipped
        raise InputError(
            f"{source.where(line)}: not valid XML ({expat.ErrorString(error.code)}); is the file "
            "whole?"
        ) from None
    if builder.root is None:
        raise InputError(f"{source.name}: no XML element; is the file whole?")
    return builder.root


class _Builder:
    def __init__(self, source: Source) -> None:
        self.source = source
        self.root: Element | None = None
        self.parser: expat.XMLParserType
        self.skipped = 0
        self._open: list[Element] = []
        self._count = 0

    def _where(self) -> str:
        return self.source.where(self.parser.CurrentLineNumber + self.skipped)

    def refuse_doctype(self, *_: object) -> None:
        raise InputError(
            f"{self._where()}: a document type or entity is not allowed here; delete it"
        )

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self._count += 1
        if self._count > MAX_ELEMENTS or len(self._open) >= MAX_DEPTH:
            raise InputError(
                f"{self._where()}: more than {MAX_ELEMENTS} elements, or nested deeper than "
                f"{MAX_DEPTH}: no topology of a machine"
            )
        if any(len(value) > _MAX_VALUE for value in attributes.values()):
            raise InputError(f"{self._where()}: an attribute of more than {_MAX_VALUE} characters")
        parent = self._open[-1] if self._open else None
        line = self.parser.CurrentLineNumber + self.skipped
        element = Element(tag[:100], attributes, line, parent)
        if parent is not None:
            parent.children.append(element)
        elif self.root is None:
            self.root = element
        self._open.append(element)

    def end(self, _: str) -> None:
        self._open.pop()
