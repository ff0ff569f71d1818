"""Words of launch scripts, with what their own variables stand for."""

from __future__ import annotations

import subprocess

import pytest

from claw_plan.planner.baselines.shell_text import words_of


def texts(script: str) -> list[str]:
    return [word.text for word in words_of(script)]


@pytest.mark.parametrize(
    "script",
    [
        "A=2\nB=$A\necho $B ${A}x ${C:-7}",
        "A=8\nB=4\necho $(($A*$B)) $((A * B / 2)) $((A+B*2))",
        "echo --a 1 \\\n  --b 2 # not --c 3",
        "ARGS=(\n  --a 1\n  --b '2'\n)\necho",
        'export A="5"\necho "$A"',
    ],
)
def test_a_shell_says_the_same(script):
    shown = script.replace("\necho", '\necho "${ARGS[@]}"') if "ARGS" in script else script
    expected = subprocess.run(
        ["bash", "-c", shown], check=True, capture_output=True, text=True, timeout=20
    ).stdout.split()
    found = texts(script)
    after = found.index("echo") + 1
    values = found[after:] if "ARGS" not in script else [w for w in found if w != "echo"]
    assert values == expected


def test_lines_and_variables_without_a_value():
    words = words_of("X=1\n--tensor-model-parallel-size $TP\n")
    assert [(w.text, w.line, w.unknown) for w in words][1:] == [
        ("--tensor-model-parallel-size", 2, ""),
        ("$TP", 2, "TP"),
    ]
