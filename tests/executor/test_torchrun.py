from __future__ import annotations

from claw_plan.executor.torchrun import torchrun_lines

COMMAND = ["claw-plan", "run", "my plan.yaml"]


def test_one_host_needs_no_address() -> None:
    assert torchrun_lines([4], COMMAND) == [
        (
            "this machine",
            "torchrun --standalone --nproc-per-node=4 --no-python claw-plan run 'my plan.yaml'",
        )
    ]


def test_every_host_has_its_own_line() -> None:
    lines = torchrun_lines([4, 2], COMMAND, ["n1"])
    assert [host for host, _ in lines] == ["n1", "HOST1"]
    assert lines[1][1] == (
        "torchrun --nnodes=2 --node-rank=1 --nproc-per-node=2 --master-addr=n1 "
        "--master-port=29500 --no-python claw-plan run 'my plan.yaml'"
    )
