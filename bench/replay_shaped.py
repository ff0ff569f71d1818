"""A recorded run, simulated again on another link, against a run made on that link.

Run (as root, on Linux with ip and /dev/net/tun): python bench/replay_shaped.py --folder FOLDER
(about six minutes on two cores)

Two hosts of `bench/shaped/` train the small GPT with `claw-plan run`. The run at one rate is
replayed: as it was, and with its links scaled to the other rate. Printed beside it are the
recorded step, which is what the replay plays, and the spread of all steps: on a machine that
others use it is wide.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "shaped"))
from hosts import Hosts
from switch import Port

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "examples" / "gpt_small.py"
PROGRAM = Path(sys.executable).with_name("claw-plan")
HOSTS = 2
CLUSTER = """\
name: two-hosts
nodes:
  - count: 2
    devices: {type: cpu, cores: 1, count: 1}
    nics: {type: ethernet-10}
    host: {memory: 8 GiB, cores: 1}
"""
KNOBS = ("dp_replicate=2,microbatch_size=1", "dp_shard=2,microbatch_size=1")
DELAY_NS = 100_000
"""From a host to the switch: a network inside a building."""


def _call(*command: str) -> None:
    subprocess.run(command, check=True)


def make_plan(folder: Path, knobs: str, number: int) -> Path:
    """A plan of two hosts with one device each."""
    cluster, plan = folder / "cluster.yaml", folder / f"plan{number}.yaml"
    cluster.write_text(CLUSTER)
    _call(
        str(PROGRAM), str(MODEL), "--cluster", str(cluster), "--global-batch", "2",
        "--seq-len", "32", "--precision", "fp32", "--fix", knobs, "-o", str(plan), "--json",
    )  # fmt: skip
    return plan


def measure(folder: Path, plan: Path, mbit: float, steps: int) -> Path:
    """Runs the plan over a link of that rate; the run's folder."""
    runs = folder / f"{plan.stem}-{mbit:g}"
    ports = [Port(bits_per_s=int(mbit * 1e6), delay_ns=DELAY_NS)] * HOSTS
    command = [str(PROGRAM), "run", str(plan), "--steps", str(steps), "--runs", str(runs)]
    with Hosts(ports) as hosts:
        hosts.run(command, ranks_per_host=1)
    return max(runs.iterdir())


def replayed(run: Path, *options: str) -> dict[str, dict[str, float]]:
    """What `claw-plan replay` says of the run."""
    command = [str(PROGRAM), "replay", str(run), "--json", *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    value: dict[str, dict[str, float]] = json.loads(done.stdout)
    return value


def recorded_ms(run: Path) -> float:
    """The step that the run recorded, which the replay plays."""
    return replayed(run, "--scale", "link=1x")["resimulated"]["recorded_ms"]


def _step_times(run: Path) -> dict[str, float]:
    times: dict[str, float] = json.loads((run / "result.json").read_text())["step_time_ms"]
    return times


def _median_ms(run: Path) -> float:
    return _step_times(run)["median"]


def _steps(run: Path) -> str:
    times = _step_times(run)
    return f"{times['min']:.0f} to {times['max']:.0f}, median {times['median']:.0f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--mbit", type=float, nargs=2, default=[100.0, 50.0])
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--knobs", nargs="*", default=list(KNOBS))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the hosts are taken down on the way
    options.folder.mkdir(parents=True, exist_ok=True)
    rates: list[float] = options.mbit
    for number, knobs in enumerate(options.knobs):
        plan = make_plan(options.folder, knobs, number)
        runs = {mbit: measure(options.folder, plan, mbit, options.steps) for mbit in rates}
        for here, there in (rates, rates[::-1]):
            said = replayed(runs[here], "--scale", f"link={there / here}x")["resimulated"]
            print(
                f"{knobs}, {here:g} Mb/s: simulated again as it was {said['unchanged_ms']:.0f} ms,"
                f" recorded {said['recorded_ms']:.0f}, all steps {_steps(runs[here])}; "
                f"at {there:g} Mb/s: predicted {said['step_time_ms']:.0f} ms, "
                f"recorded {recorded_ms(runs[there]):.0f} "
                f"({said['step_time_ms'] / recorded_ms(runs[there]) - 1:+.1%}), "
                f"all steps {_steps(runs[there])} "
                f"({said['step_time_ms'] / _median_ms(runs[there]) - 1:+.1%} of the median)",
                flush=True,
            )


if __name__ == "__main__":
    main()
