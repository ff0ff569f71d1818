from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.topology.source import Source
from claw_plan.profiles.topology.xml_tree import MAX_DEPTH, MAX_ELEMENTS, parse

BOMB = (
    '<!DOCTYPE a [<!ENTITY x "xxxxxxxxxx"><!ENTITY y "&x;&x;&x;&x;&x;&x;&x;&x;&x;&x;">]>\n'
    "<system>&y;</system>"
)


def test_elements_know_line_parent_and_children() -> None:
    root = parse(
        Source("t", 'junk before\n<system a="1">\n <cpu><pci busid="x"/></cpu>\n</system>')
    )
    (pci,) = root.all("pci")
    assert (pci.line, pci.get("busid"), pci.get("none")) == (3, "x", "")
    assert [element.tag for element in pci.ancestors()] == ["cpu", "system"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "t:1: a document type or entity is not allowed"),
        ('<!DOCTYPE a SYSTEM "file:///etc/passwd"><a/>', "t:1: a document type"),
        ("<system>\n<cpu>", "t:2: not valid XML"),
        ("<a>" * (MAX_DEPTH + 1), f"nested deeper than {MAX_DEPTH}"),
        ("<a>" + "<b/>" * (MAX_ELEMENTS + 1) + "</a>", f"more than {MAX_ELEMENTS} elements"),
        ('<a b="' + "9" * 1_000_000 + '"/>', "an attribute of more than"),
        ("no element", "t:1: not valid XML"),
    ],
    ids=["bomb", "external", "cut", "deep", "many", "digits", "none"],
)
def test_what_is_refused_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse(Source("t", text))


@given(st.text(alphabet='<>/&;="ab !?-[]', max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        parse(Source("t", text))
    except InputError as error:
        assert str(error).startswith("t:")
