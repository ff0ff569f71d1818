"""`claw-plan checkpoint`: what checkpoints there are, what is in one, its weights in one file.

Also the options of `run` that say when checkpoints are written and what a run begins from.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from claw_plan.cli.json_output import json_text
from claw_plan.cli.options import COUNT, FILE, check_can_write
from claw_plan.cli.streams import stdout_kept_clean
from claw_plan.profiles.errors import InputError
from claw_plan.profiles.units import format_bytes, s_from_ns

if TYPE_CHECKING:
    from claw_plan.executor.checkpoint_folder import Header

Command = TypeVar("Command", bound=Callable[..., Any])

OPTIONS = (
    click.option(
        "--checkpoint-every",
        "every",
        type=COUNT,
        metavar="N",
        help="Write a checkpoint every N steps, at the end, and when asked to stop.  [default: "
        "none, or with --checkpoint-dir at the end alone]",
    ),
    click.option(
        "--checkpoint-dir",
        "folder",
        type=FILE,
        metavar="DIR",
        help="Folder for checkpoints, which all nodes share.  [default: the run's own]",
    ),
    click.option(
        "--keep",
        type=COUNT,
        default=2,
        show_default=True,
        metavar="K",
        help="How many of the newest checkpoints stay.",
    ),
    click.option(
        "--resume",
        is_flag=False,
        flag_value="latest",
        metavar="[latest|DIR]",
        help="Go on from a checkpoint, whatever plan wrote it: the latest, or that of DIR.",
    ),
    click.option(
        "--init-from",
        type=FILE,
        metavar="FILE",
        help="Begin with the weights of a checkpoint, a .safetensors file or folder, or a file of "
        "torch.save(model.state_dict()).",
    ),
)


def checkpoint_options(command: Command) -> Command:
    """Adds `OPTIONS` to a command."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


@click.group()
def checkpoint() -> None:
    """Look at checkpoints, and take the weights out of one."""


@checkpoint.command("list")
@click.argument("folder", metavar="DIR", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def list_checkpoints(folder: Path, as_json: bool) -> None:
    """List the whole checkpoints in DIR, a folder of checkpoints, of a run, or of runs."""
    with stdout_kept_clean():
        from claw_plan.executor.checkpoint_folder import CHECKPOINTS, checkpoints_in, read_header

        folders = [folder, folder / CHECKPOINTS, *sorted(folder.glob(f"*/{CHECKPOINTS}"))]
        found = [path for place in folders for path in checkpoints_in(place)]
        if not found:
            raise InputError(
                f"no checkpoint in {folder}; 'claw-plan run --checkpoint-every N' writes some"
            )
        headers = [read_header(path) for path in found]
    if as_json:
        values = [_summary(p, header) for p, header in zip(found, headers, strict=True)]
        click.echo(json_text({"checkpoints": values}), nl=False)
        return
    for path, header in zip(found, headers, strict=True):
        click.echo(f"{path}  {_line(header)}")


@checkpoint.command()
@click.argument("path", metavar="CHECKPOINT", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def inspect(path: Path, as_json: bool) -> None:
    """Say what CHECKPOINT holds, after a look whether all of its files are whole."""
    with stdout_kept_clean():
        from claw_plan.executor.checkpoint_folder import check_files, read_header

        header = read_header(path)
        check_files(path, header)
    if as_json:
        click.echo(json_text(_summary(path, header)), nl=False)
        return
    click.echo(_line(header))
    click.echo(
        f"model      {Path(header.model['file']).name}, {len(set(header.names.values()))} tensors"
    )
    click.echo(f"optimizer  {header.optimizer}")
    click.echo(f"plan       {_plan(header)}")
    click.echo(f"versions   {', '.join(f'{k} {v}' for k, v in header.versions.items())}")
    for name, size_bytes in sorted(header.files.items()):
        click.echo(f"           {format_bytes(size_bytes):>10}  {name}")


@checkpoint.command()
@click.argument("path", metavar="CHECKPOINT", type=FILE)
@click.option(
    "--output",
    "-o",
    type=FILE,
    required=True,
    metavar="FILE",
    help="A .safetensors file, or a folder for model.safetensors; anything else is torch.save's "
    "format.",
)
def export(path: Path, output: Path) -> None:
    """Write the weights of CHECKPOINT to one file that model.load_state_dict takes."""
    if not output.is_dir():
        check_can_write(output)
    with stdout_kept_clean():
        from claw_plan.executor.checkpoint_export import export_weights

        written = export_weights(path, output)
    click.echo(f"wrote {written}, {format_bytes(written.stat().st_size)}")


def _summary(path: Path, header: Header) -> dict[str, Any]:
    return {
        "path": str(path),
        "step": header.step,
        "samples": header.samples,
        "saved_at": _when(header),
        "bytes": sum(header.files.values()),
        "model": Path(header.model["file"]).name,
        "optimizer": header.optimizer,
        "candidate": header.candidate,
        "versions": header.versions,
        "files": header.files,
    }


def _line(header: Header) -> str:
    size = format_bytes(sum(header.files.values()))
    return f"step {header.step}, {header.samples} samples, {size}, {_when(header)}"


def _when(header: Header) -> str:
    seconds = s_from_ns(header.saved_at_ns)
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(seconds))


def _plan(header: Header) -> str:
    axes = [f"{axis} {header.candidate[axis]}" for axis in header.candidate["mesh_order"]]
    used = [text for text in axes if not text.endswith(" 1")]
    return ", ".join(used) or "one device"
