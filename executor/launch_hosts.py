"""Starts a job's ranks on several hosts: by ssh on those of a hostfile, by srun on those of a job.

One agent a host (`host_agent`) starts the host's ranks and reports to the launcher's store. The
launcher talks to it through its standard input: a line asks the ranks to end after their step,
and the end of input, which also comes when the launcher or its connection dies, ends them.
Plan, model and run folder are at the same path on every host, as on a shared file system.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]

from claw_plan.executor.detect_cluster import HOST_VARIABLE
from claw_plan.executor.detect_hosts import srun, ssh
from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.host_agent import STOP_LINE, exit_key
from claw_plan.executor.job import Job
from claw_plan.executor.launch import Launch, on_stop, say_all, watch_over
from claw_plan.executor.nccl_environment import (
    ENVIRONMENT_FILE,
    SHARED_PREFIXES,
    mistakes,
    own_address_towards,
    read_environment,
)
from claw_plan.executor.placement import ranks_per_node
from claw_plan.executor.rendezvous import free_store, own_keys
from claw_plan.planner.plan import Plan
from claw_plan.profiles.errors import InputError
from claw_plan.profiles.topology.reading import Host
from claw_plan.profiles.topology.recognise import read_topology
from claw_plan.profiles.topology.slurm import allocation

AGENT = (sys.executable, "-m", "claw_plan.executor.host_agent")

PASSED_ON = (
    *("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS"),
    *("HF_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TORCH_HOME"),
)
"""What the hosts get of the launcher's environment, besides what NCCL and gloo read. Anybody on
a host sees these values in its list of processes, so nothing secret may be among them."""

_SECRETS = ("TOKEN", "SECRET", "PASSWORD", "KEY")


@dataclass(frozen=True, kw_only=True)
class HostRanks:
    """A host and the ranks that it runs."""

    host: Host
    first_rank: int
    count: int


def hosts_for(plan: Plan, hostfile: Path | None) -> list[HostRanks]:
    """Where the plan's ranks go: the hostfile's hosts, or the Slurm job's when there are several.

    Empty means this machine. Raises InputError and ExecutionError for a file that names no host,
    and for hosts on which the plan does not fit.
    """
    if hostfile is None:
        hosts = [] if "SLURM_STEP_NUM_TASKS" in os.environ else allocation(os.environ)
        return _placed(plan, hosts, "the Slurm job") if len(hosts) > 1 else []
    hosts = list(read_topology(hostfile)[0].hosts)
    if not hosts:
        raise InputError(f"{hostfile.name} names no host; a line is  node1 slots=8")
    return _placed(plan, hosts, hostfile.name)


def _placed(plan: Plan, hosts: Sequence[Host], source: str) -> list[HostRanks]:
    counts = ranks_per_node(plan)
    if len(hosts) < len(counts):
        raise ExecutionError(
            f"the plan trains on {len(counts)} hosts, but {source} has {len(hosts)}; give as "
            f"many, or plan again for {len(hosts)}"
        )
    for host, count in zip(hosts, counts, strict=False):
        if host.gpus is not None and host.gpus < count:
            raise ExecutionError(
                f"the plan puts {count} ranks on {host.name}, but {source} gives it "
                f"{host.gpus} slots; the plan's hosts have {', '.join(map(str, counts))} ranks"
            )
    firsts = [sum(counts[:place]) for place in range(len(counts))]
    return [
        HostRanks(host=host, first_rank=first, count=count)
        for host, first, count in zip(hosts, firsts, counts, strict=False)
    ]


def start_on_hosts(
    job: Job, plan: Plan, hosts: Sequence[HostRanks], launch: Launch, watch: Callable[[], None]
) -> None:
    """Runs the job on the hosts and returns when all ranks are done; see `start_ranks`."""
    store = free_store("0.0.0.0")
    keys = own_keys(store)
    starter = srun if launch.hostfile is None else ssh
    job_file = str(job.save())
    agents = {}
    for place, placed in enumerate(hosts):
        command = _agent_command(job_file, placed, plan, hosts, store.port)
        name = placed.host.name
        agents[name] = _Agent(
            placed, starter(placed.host, command), job.folder / f"host{place}.log"
        )
        launch.say(f"{name}: ranks {placed.first_rank} to {placed.first_rank + placed.count - 1}")
    ranks = RanksOnHosts(list(agents.values()), keys)
    environment, told = job.folder / ENVIRONMENT_FILE, False

    def watch_and_tell() -> None:
        nonlocal told
        watch()
        if not told and environment.exists():
            told = True
            say_all(launch, [*map(str, read_environment(job.folder)), *mistakes()])

    watch_over(ranks, job, plan.knobs().num_devices, keys, watch_and_tell, on_stop(launch))


def _agent_command(
    job_file: str, placed: HostRanks, plan: Plan, hosts: Sequence[HostRanks], port: int
) -> list[str]:
    """What a host runs. Rank 0's host answers for the interface; the launcher holds the store."""
    name = placed.host.name.strip("[]")
    address = own_address_towards(name)
    if address is None:
        raise ExecutionError(f"{name} is not known to this machine; check its name in the hosts")
    variables = passed_on(os.environ) | {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        HOST_VARIABLE: placed.host.name,
    }
    others = [other.host.name.strip("[]") for other in hosts if other is not placed]
    numbers = [str(placed.first_rank), str(placed.count), str(plan.knobs().num_devices)]
    environment = [f"{name}={value}" for name, value in variables.items()]
    peer = others[0] if others else address
    return ["env", "-C", str(Path.cwd()), *environment, *AGENT, job_file, *numbers, peer]


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that the hosts get."""
    return {
        name: value
        for name, value in environment.items()
        if (name in PASSED_ON or name.startswith(SHARED_PREFIXES))
        and not any(word in name for word in _SECRETS)
    }


class _Agent:
    """One host's agent, as the process of ssh or srun that leads to it."""

    def __init__(self, placed: HostRanks, command: Sequence[str], log: Path) -> None:
        self.placed, self._command, self.log = placed, command, log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it; what it prints goes to its log."""
        with self.log.open("ab") as log:
            try:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise ExecutionError(
                    f"cannot start {self._command[0]} for {self.placed.host.name}: "
                    f"{error.strerror}; is it installed?"
                ) from None

    def poll(self) -> int | None:
        """Its exit code; None while it runs, or has not begun."""
        return None if self._process is None else self._process.poll()

    def tell(self, line: str) -> None:
        """Writes a line to its input; a host that is gone cannot be told anything."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self._process.stdin.write(line.encode())
                self._process.stdin.flush()

    def hang_up(self) -> None:
        """Ends its input, upon which it ends its ranks."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def kill(self) -> None:
        """Ends the connection; on the other side the input ends."""
        if self._process is not None:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def last_line(self) -> str:
        """What it said last."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
        return last.strip()[:200]


class RanksOnHosts:
    """The ranks of all agents; what `launch.Ranks` asks for."""

    def __init__(self, agents: Sequence[_Agent], store: Store) -> None:
        self._agents, self._store = agents, store

    def start(self) -> None:
        """Starts one agent on each host."""
        for agent in self._agents:
            agent.start()

    def codes(self) -> dict[int, int | None]:
        """Exit codes that the agents reported.

        Raises ExecutionError for an agent that ended and reported none: its host could not be
        reached, or is gone.
        """
        found: dict[int, int | None] = {}
        for agent in self._agents:
            code = agent.poll()
            for rank in range(
                agent.placed.first_rank, agent.placed.first_rank + agent.placed.count
            ):
                key = exit_key(rank)
                if self._store.check([key]):
                    found[rank] = int(self._store.get(key))
                elif code is None:
                    found[rank] = None
                else:
                    raise ExecutionError(
                        f"the ranks on {agent.placed.host.name} are gone (exit code {code}): "
                        f"{agent.last_line()}"
                    )
        return found

    def signal(self, number: int) -> None:
        """Asks all ranks to end after their step."""
        for agent in self._agents:
            agent.tell(STOP_LINE)

    def end(self, grace_s: float = 0.0) -> None:
        """Hangs up on all hosts, and ends connections that then stay."""
        for agent in self._agents:
            agent.hang_up()
        deadline = time.monotonic() + max(grace_s, END_S)
        while time.monotonic() < deadline and any(agent.poll() is None for agent in self._agents):
            time.sleep(0.02)
        for agent in self._agents:
            agent.kill()


END_S = 1.0
"""An agent that is hung up on has ended its ranks after this long."""
