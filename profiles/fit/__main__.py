"""`python -m claw_plan.profiles.fit FILE… [-o FOLDER]`: data files to committed profile files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.files import write_atomic
from claw_plan.profiles.fit.registry import assign, fitters, read_data


def main(arguments: Sequence[str] | None = None) -> int:
    """Fits every file given and writes what is made of them; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m claw_plan.profiles.fit", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER", help="default: the package")
    chosen = parser.parse_args(arguments)
    try:
        files = [read_data(path) for path in chosen.files]
        for fitter, some in assign(files, fitters()):
            folder = chosen.output or fitter.folder
            for name, text in sorted(fitter.fit(some).items()):
                write_atomic(folder / name, text)
                print(f"{fitter.kind}: wrote {folder / name}")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
