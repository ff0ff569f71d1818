"""`claw-plan plan` (the default command) and `claw-plan simulate`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from claw_plan.cli.html_report import write_html
from claw_plan.cli.json_output import infeasible_object, json_text, plan_object, score_object
from claw_plan.cli.options import (
    COUNT,
    FILE,
    check_can_write,
    planning_options,
)
from claw_plan.cli.perfetto import write_trace
from claw_plan.cli.progress import ProgressBar
from claw_plan.cli.report import print_plan_report, print_simulation
from claw_plan.cli.streams import DONE, NO_PLAN, say, stdout_kept_clean
from claw_plan.planner.candidate import parse_fix
from claw_plan.planner.errors import InfeasiblePlan
from claw_plan.profiles.units import format_bytes

if TYPE_CHECKING:
    from claw_plan.planner.planning import PlanningResult
    from claw_plan.planner.score import Scored

# The planner is imported when a command needs it: it brings torch, and --help must not wait.


@click.command()
@click.argument("model", type=FILE)
@planning_options
@click.option(
    "--top", type=COUNT, default=3, show_default=True, metavar="N", help="Runners-up to show."
)
@click.option(
    "--output", "-o", type=FILE, metavar="PLAN", help="Write the best plan, for 'claw-plan run'."
)
@click.option(
    "--trace", type=FILE, metavar="OUT", help="Write its simulated step for ui.perfetto.dev."
)
@click.option(
    "--html",
    type=FILE,
    metavar="OUT",
    help="Write the report as a page, with the front of time, memory and cost.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON (docs/json.md).")
def plan(
    model: Path,
    output: Path | None,
    trace: Path | None,
    html: Path | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Find the best way to train MODEL on a cluster.

    MODEL is a Python file, or a Hugging Face config.json. The file has build_model() and
    example_batch(batch_size), or --build and --inputs say how to make them.
    """
    read = (model, Path(settings["cluster"]), settings["profile"], settings["baseline"])
    check_can_write(output, inputs=read)
    check_can_write(trace, inputs=(*read, output))
    check_can_write(html, inputs=(*read, output, trace))
    settings["front"] = html is not None
    try:
        with stdout_kept_clean(), ProgressBar() as progress:
            folder = output.absolute().parent if output else Path()
            result = _make_plan(model, folder, settings, progress)
    except InfeasiblePlan as error:
        if as_json:
            click.echo(json_text(infeasible_object(str(error), error.levers)), nl=False)
        raise
    _write(result, output, trace)
    if html is not None:
        write_html(result, _next_command(output), html)
        say(f"wrote the report to {html}")
    if as_json:
        click.echo(json_text(plan_object(result)), nl=False)
    else:
        print_plan_report(result, _next_command(output))


def _make_plan(
    model: Path, folder: Path, settings: dict[str, Any], progress: ProgressBar
) -> PlanningResult:
    """Plans; `folder` is where the plan will lie, since it names the model relative to itself."""
    pinned = parse_fix(settings.pop("fix"))
    progress("loading", 0.0)
    from claw_plan.planner.mixed.result import plan_request
    from claw_plan.planner.planning import PlanningRequest

    return plan_request(
        PlanningRequest(
            model=model,
            fix=pinned,
            time_limit_s=settings.pop("time_limit"),
            output_folder=folder,
            progress=progress,
            **settings,
        )
    )


def _write(result: PlanningResult, output: Path | None, trace: Path | None) -> None:
    from claw_plan.planner.plan import save_plan

    if output is not None:
        save_plan(result.plan, output)
        say(f"wrote the plan to {output}")
    _write_trace(result.best, trace, result.graph.name)


def _write_trace(scored: Scored, trace: Path | None, name: str) -> None:
    if trace is None:
        return
    assert scored.timeline is not None, "only runners-up have none"
    write_trace(scored.timeline, trace, f"{name}: {scored.short}")
    say(f"wrote the simulated step to {trace}; open it at ui.perfetto.dev")


def _next_command(output: Path | None) -> str:
    if output is None:
        return "the same command with -o plan.yaml, then: claw-plan run plan.yaml"
    return f"claw-plan run {shlex.quote(str(output))}"


@click.command()
@click.argument("plan_file", metavar="PLAN", type=FILE)
@click.option("--profile", type=FILE, metavar="F", help="Measured times from 'claw-plan learn'.")
@click.option("--trace", type=FILE, metavar="OUT", help="Write the step for ui.perfetto.dev.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON (docs/json.md).")
def simulate(plan_file: Path, profile: Path | None, trace: Path | None, as_json: bool) -> int:
    """Predict time and memory of PLAN, which may have been edited by hand."""
    check_can_write(trace, inputs=(plan_file, profile))
    with stdout_kept_clean(), ProgressBar() as progress:
        progress("loading", 0.0)
        from claw_plan.planner.mixed.result import simulate_file

        scored = simulate_file(plan_file, profile)
    _write_trace(scored, trace, plan_file.name)
    reason = _why_it_does_not_fit(scored)
    if as_json:
        value = score_object(scored) | ({"reason": reason} if reason else {})
        click.echo(json_text(value), nl=False)
    else:
        print_simulation(scored, plan_file.name)
    if reason:
        say(reason)
    return NO_PLAN if reason else DONE


def _why_it_does_not_fit(scored: Scored) -> str:
    worst = max(scored.memory, key=lambda stage: stage.peak_bytes - stage.capacity_bytes)
    missing = worst.peak_bytes - worst.capacity_bytes
    if missing <= 0:
        return ""
    return (
        f"the plan does not fit: stage {worst.stage} needs {format_bytes(worst.peak_bytes)} on "
        f"each device, {format_bytes(missing)} more than may be used"
    )
