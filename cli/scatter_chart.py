"""Predicted against measured figures as an SVG: two logarithmic axes, a colour for each family.

Points of a family are one path of dots, so that thousands of them stay a small file. On the
diagonal a prediction is right; the band is 10 % to either side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]
"""(measured, predicted) of each row."""

SIDE, LEFT, TOP, BOTTOM = 520, 64, 34, 50
LEGEND_WIDTH, LEGEND_ROW = 250, 15
BAND = 0.10

COLOURS = (
    *("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5"),
    *("#9c6b4e", "#9498a0", "#1f3a93", "#b8860b", "#8b0000", "#2f6f64", "#145a32", "#880e4f"),
)


def scatter_svg(title: str, unit: str, families: Mapping[str, Points]) -> str:
    """The chart as the text of a file."""
    values = [value for points in families.values() for point in points for value in point]
    low, high = _decades(values)
    scale = _Scale(low, high)
    legend = [name for name, points in families.items() if points]
    height = max(TOP + SIDE + BOTTOM, TOP + LEGEND_ROW * (len(legend) + 1))
    width = LEFT + SIDE + 20 + LEGEND_WIDTH
    body = [*_frame(scale, unit), *_diagonal(scale)]
    for index, name in enumerate(legend):
        colour = _colour(index)
        body += _family(scale, families[name], colour)
        body += _legend(index, f"{name} ({len(families[name])})", colour)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
            *body,
            "</svg>",
            "",
        ]
    )


def _colour(index: int) -> str:
    """Distinct colours: the palette's, then hues a golden angle apart."""
    if index < len(COLOURS):
        return COLOURS[index]
    return f"hsl({index * 137.5 % 360:.0f} 60% {35 + 20 * (index % 2)}%)"


class _Scale:
    """Values to places on the paper."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high

    def _share(self, value: float) -> float:
        return (math.log10(value) - self.low) / (self.high - self.low)

    def x(self, value: float) -> float:
        return LEFT + SIDE * self._share(value)

    def y(self, value: float) -> float:
        return TOP + SIDE * (1.0 - self._share(value))


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """The powers of ten around all values."""
    if not values:
        return 0, 1
    low = math.floor(math.log10(min(values)))
    high = math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def _frame(scale: _Scale, unit: str) -> list[str]:
    lines = []
    bottom = TOP + SIDE
    for exponent in range(scale.low, scale.high + 1):
        value = 10.0**exponent
        x, y = scale.x(value), scale.y(value)
        label = f"{value:,.0f}" if exponent >= 0 else f"{value:g}"
        lines += [
            f'<path d="M{x:.1f} {TOP}V{bottom}M{LEFT} {y:.1f}H{LEFT + SIDE}" stroke="#ddd"/>',
            f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{label}</text>',
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>',
        ]
    middle = LEFT + SIDE / 2
    lines.append(
        f'<text x="{middle}" y="{bottom + 36}" text-anchor="middle">measured, {unit}</text>'
    )
    lines.append(
        f'<text transform="translate(14 {TOP + SIDE / 2}) rotate(-90)" '
        f'text-anchor="middle">predicted, {unit}</text>'
    )
    return lines


def _diagonal(scale: _Scale) -> list[str]:
    least, most = 10.0**scale.low, 10.0**scale.high
    shift = SIDE * math.log10(1 + BAND) / (scale.high - scale.low)
    corners = [
        (scale.x(least), scale.y(least) - shift),
        (scale.x(most) - shift, scale.y(most)),
        (scale.x(most), scale.y(most)),
        (scale.x(most), scale.y(most) + shift),
        (scale.x(least) + shift, scale.y(least)),
        (scale.x(least), scale.y(least)),
    ]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
    return [
        f'<polygon points="{points}" fill="#eee"/>',
        f'<path d="M{scale.x(least)} {scale.y(least)}L{scale.x(most)} {scale.y(most)}" '
        'stroke="#888"/>',
    ]


def _family(scale: _Scale, points: Points, colour: str) -> list[str]:
    """Dots of one colour: strokes of no length with round ends."""
    dots = "".join(
        f"M{scale.x(measured):.1f} {scale.y(predicted):.1f}h0" for measured, predicted in points
    )
    size = 5 if len(points) < 500 else 3
    return [
        f'<path d="{dots}" stroke="{colour}" stroke-opacity=".6" stroke-width="{size}" '
        'stroke-linecap="round"/>'
    ]


def _legend(index: int, text: str, colour: str) -> list[str]:
    x, y = LEFT + SIDE + 24, TOP + 6 + LEGEND_ROW * index
    return [
        f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"/>',
        f'<text x="{x + 9}" y="{y + 4}">{escape(text)}</text>',
    ]
