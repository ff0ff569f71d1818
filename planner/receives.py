"""When each rank of a pipeline is ready for a message: after which of its own actions it asks.

PyTorch's runtime puts sends and receives into the rows of a schedule itself
(`_add_send_recv` of torch.distributed.pipelining.schedules, torch 2.13). It plays the rows in
rounds, every rank one action a round, ranks in order; a message is sent behind the action that
makes it, and received at that moment of the receiver's row. So a later rank asks for a forward's
result just before it needs it, however long the message was ready.

On gloo that matters: nothing travels before the receiver has asked (gloo's tcp/pair.cc: a send
waits for the other side's ready to receive). NCCL's kernels wait likewise, but on a stream of
their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from claw_plan.planner.actions import Action, message_for, message_of

Message = tuple[int, str, int]
"""(stage, 'F' or 'B', microbatch), as `message_of` names it."""


def receive_places(rows: Sequence[Sequence[Action]], home: Sequence[int]) -> Mapping[Message, int]:
    """How many actions a message's receiver has run when it asks for it.

    `home` is the rank of each stage. Messages within a rank are left out.
    """
    stages = len(home)
    done = [0] * len(rows)
    places: dict[Message, int] = {}
    made: set[Message] = set()
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(rows):
            if done[rank] == len(row):
                continue
            action = row[done[rank]]
            needed = message_for(action, stages)
            if needed is not None and needed not in made:
                continue
            done[rank] += 1
            progress = True
            message = message_of(action)
            if message is None:
                continue
            made.add(message)
            receiver = _receiver(message, home)
            if receiver not in (None, rank):
                places[message] = done[receiver]
    return places


def _receiver(message: Message, home: Sequence[int]) -> int | None:
    """The rank that waits for a message; None at the ends of the chain."""
    stage = message[0] + (1 if message[1] == "F" else -1)
    return home[stage] if 0 <= stage < len(home) else None
