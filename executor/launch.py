"""Starts the ranks of a job, on this machine or on several hosts, and watches over them.

The launcher holds the store in which the ranks meet. When a rank dies all are ended and one
message says which rank it was, at which step, and its own error. Ctrl-C and SIGTERM are passed
on: the ranks end together after their step; a second one ends them at once.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch.distributed import Store  # type: ignore[attr-defined]

from claw_plan.executor.checkpoint_folder import clear_left_over
from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.heartbeat import STOPPED, Watcher, give_reason, reason_in
from claw_plan.executor.job import Job, Note
from claw_plan.executor.local_ranks import WORKER, LocalRanks, log_path
from claw_plan.executor.nccl_environment import (
    choose,
    local_environment,
    loopback,
    mistakes,
    write_environment,
)
from claw_plan.executor.rendezvous import TIMEOUT_S, free_store, own_keys
from claw_plan.planner.plan import Plan
from claw_plan.profiles.cluster_file import cluster_from_mapping
from claw_plan.profiles.errors import Interrupted

POLL_S = 0.05
GRACE_S = 1.0
"""Ranks that see a neighbour die get this long to leave their own notes."""

REASON_S = 0.3
"""Once the reason is known, ranks that live have ended after this long; others cannot."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How ranks are started and watched.

    `hostfile` names the hosts, None for this machine or the Slurm job's. `timeout_s` is how long
    ranks wait for each other. With `preflight` they look at themselves and the network before
    step 1, with `nvtx` they name what runs for profilers. `selector` are the options of what
    chooses collective algorithms while it runs, None where the plan does; with `checks_buckets`
    buckets of gradients have checksums. `say` gets sentences for the user.
    """

    hostfile: Path | None = None
    timeout_s: float = TIMEOUT_S
    preflight: bool = True
    nvtx: bool = False
    selector: Mapping[str, str] | None = None
    checks_buckets: bool = False
    say: Callable[[str], None] = lambda line: None


HERE = Launch()


def say_all(launch: Launch, lines: Iterable[str]) -> None:
    """Says one sentence after the other."""
    for line in lines:
        launch.say(line)


def on_stop(launch: Launch) -> Callable[[], None]:
    """Says that the ranks were asked to end."""
    return lambda: launch.say("ending after this step; once more ends at once")


def start_here(job: Job, plan: Plan, launch: Launch, watch: Callable[[], None]) -> None:
    """Runs the plan's ranks on this machine; see `start_ranks`."""
    cluster = cluster_from_mapping(plan.cluster, "cluster")
    settings = choose(cluster, hosts=1, interface=loopback(), folder=job.folder)
    write_environment(job.folder, settings)
    say_all(launch, [*map(str, settings), *mistakes()])
    start_ranks(
        job,
        plan.knobs().num_devices,
        watch=watch,
        on_stop=on_stop(launch),
        environment={setting.name: setting.value for setting in settings},
    )


class Ranks(Protocol):
    """Processes that were or will be started, wherever they are."""

    def start(self) -> None:
        """Starts them all."""

    def codes(self) -> Mapping[int, int | None]:
        """Exit code of each rank, None while it runs."""

    def signal(self, number: int) -> None:
        """Sends a signal to all that run."""

    def end(self, grace_s: float = 0.0) -> None:
        """Ends those that still run after so long."""


def start_ranks(
    job: Job,
    world_size: int,
    *,
    worker: Sequence[str] = WORKER,
    watch: Callable[[], None] = lambda: None,
    on_stop: Callable[[], None] = lambda: None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Runs the job on `world_size` processes of this machine and returns when all are done.

    `watch` is called now and then meanwhile, `on_stop` when the ranks are asked to end early.
    `environment` are the variables of `nccl_environment.choose`, None those for this machine.
    Raises ExecutionError when a rank fails, and KeyboardInterrupt again when all have ended.
    """
    store = free_store()
    environment = dict(local_environment() if environment is None else environment) | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    command = [*worker, str(job.save())]
    ranks = LocalRanks(command, job.folder, world_size, environment=environment)
    watch_over(ranks, job, world_size, own_keys(store), watch, on_stop)


def watch_over(
    ranks: Ranks,
    job: Job,
    world_size: int,
    store: Store,
    watch: Callable[[], None],
    on_stop: Callable[[], None],
) -> None:
    """Starts the ranks and returns when all are done; see `start_ranks`."""
    watcher = Watcher(store, range(world_size))
    stopping: KeyboardInterrupt | None = None
    try:
        ranks.start()
        while True:
            try:
                watch()
                codes = ranks.codes()
                if not _go_on(codes) or any(codes.values()):
                    break
                time.sleep(POLL_S)
            except KeyboardInterrupt as interrupt:
                if stopping is not None:
                    raise
                stopping = interrupt
                ranks.signal(signal.SIGTERM)
                on_stop()
        if stopping is not None:
            ranks.end(GRACE_S)
            raise stopping
        if any(codes.values()):
            watcher.look()
            raise ExecutionError(_end_all(ranks, job, store, watcher))
        if store.check([STOPPED]):  # a rank was asked, not this process
            raise Interrupted(int(store.get(STOPPED)))
    finally:
        ranks.end()


def _go_on(codes: Mapping[int, int | None]) -> bool:
    return None in codes.values()


def _end_all(ranks: Ranks, job: Job, store: Store, watcher: Watcher) -> str:
    """Ends the ranks, removes what they had half written, and answers with the reason."""
    folder = job.folder
    killed = _killed(ranks.codes(), folder, watcher)
    if killed is not None:
        give_reason(store, killed)
    deadline, known_s = time.monotonic() + GRACE_S, None
    while time.monotonic() < deadline and _go_on(ranks.codes()):
        known_s = known_s or (time.monotonic() if reason_in(store) else None)
        if known_s and time.monotonic() > known_s + REASON_S:
            break
        time.sleep(POLL_S / 2)
    codes = dict(ranks.codes())
    ranks.end()
    for half in folder.rglob(".*.tmp"):  # what `write_atomic` had begun in a rank that was ended
        half.unlink(missing_ok=True)
    if job.checkpoint_folder:
        clear_left_over(Path(job.checkpoint_folder))
    killed = killed or _killed(codes, folder, watcher)
    return killed.error if killed else _why(codes, folder, store)


def _killed(codes: Mapping[int, int | None], folder: Path, watcher: Watcher) -> Note | None:
    """Of ranks that somebody killed, or that crashed, the one that got least far.

    SIGABRT is how torch's own watchdog ends a rank that waited too long for another.
    """
    found = [r for r, code in codes.items() if code and code < 0 and -code != signal.SIGABRT]
    if not found:
        return None
    beats = watcher.beats
    rank = min(found, key=lambda r: beats[r].step if r in beats else 0)
    when = beats[rank].when if rank in beats else "before it met the others"
    number = -(codes[rank] or 0)
    hint = " (by the system, if its host ran out of memory)" if number == signal.SIGKILL else ""
    text = (
        f"rank {rank} was killed by {_signal(number)}{hint} {when}; its output is in "
        f"{log_path(folder, rank)}"
    )
    return Note.of(ExecutionError(text), rank, beats[rank].step if rank in beats else 0)


def _why(codes: Mapping[int, int | None], folder: Path, store: Store) -> str:
    """The reason that the ranks agreed on, else which failed first, and its own error."""
    notes = [note for rank in codes if (note := Note.read(folder, rank))]
    reason = reason_in(store)
    if reason is None and notes:
        reason = min(notes, key=lambda note: (not note.is_ours, note.time_ns))
    if reason is None:
        rank = next(rank for rank, code in codes.items() if code)
        code = codes[rank] or 0
        how = f"was killed by {_signal(-code)}" if code < 0 else f"exited with {code}"
        return f"rank {rank} {how}; its output is in {log_path(folder, rank)}"
    if reason.is_ours:
        return reason.error
    return f"{reason.told()}; its traceback is in {log_path(folder, reason.rank)}"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
