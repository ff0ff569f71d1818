"""Plots of predicted against measured figures."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from claw_plan.cli.scatter_chart import LEFT, SIDE, TOP, scatter_svg

SVG = "{http://www.w3.org/2000/svg}"


def paths(text: str) -> list[str]:
    return [path.get("d", "") for path in ElementTree.fromstring(text).iter(f"{SVG}path")]


def test_points_lie_where_their_figures_say() -> None:
    text = scatter_svg("Times", "ms", {"one": [(1.0, 1.0), (100.0, 10.0)]})
    (dots,) = [path for path in paths(text) if path.count("h0") == 2]
    places = [tuple(map(float, pair)) for pair in re.findall(r"M([\d.]+) ([\d.]+)h0", dots)]
    assert places[0] == pytest.approx((LEFT, TOP + SIDE))
    assert places[1] == pytest.approx((LEFT + SIDE, TOP + SIDE / 2))


def test_names_are_escaped_and_counted() -> None:
    text = scatter_svg("A & B", "ms", {"<one>": [(1.0, 2.0)], "empty": []})
    labels = [node.text for node in ElementTree.fromstring(text).iter(f"{SVG}text")]
    assert "A & B" in labels
    assert "<one> (1)" in labels
    assert not any("empty" in str(label) for label in labels)


def test_thousands_of_points_stay_small() -> None:
    points = [(1.0 + n, 2.0 + n) for n in range(9000)]
    assert len(scatter_svg("Kernels", "us", {"one": points})) < 200_000


def test_many_families_have_colours_of_their_own() -> None:
    families = {str(n): [(1.0, 1.0)] for n in range(60)}
    found = re.findall(r'fill="(#\w{6}|hsl[^"]+)"', scatter_svg("All", "ms", families))
    assert len(set(found)) == 60


def test_nothing_to_plot_is_still_a_picture() -> None:
    picture = ElementTree.fromstring(scatter_svg("Nothing", "ms", {}))
    assert picture.tag.endswith("svg")
    assert "Nothing" in "".join(picture.itertext())
