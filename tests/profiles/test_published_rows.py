"""The nouns of published files."""

from __future__ import annotations

from pathlib import Path

from claw_plan.profiles.published_rows import KERNELS, NotExpressed, Published


def test_a_file_lists_what_it_cannot_express() -> None:
    other = NotExpressed(id="a", family="b", reason="c")
    published = Published(path=Path("x.yaml"), kind=KERNELS, not_expressed=(other,))
    assert published.training == published.kernels == published.collectives == ()
    assert published.not_expressed == (other,)
