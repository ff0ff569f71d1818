"""What averaging a bucket takes."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from claw_plan.planner.averaging import (
    averaging,
    residual_bytes,
)
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.low_rank import kernels_ns
from claw_plan.profiles.codecs import factors_of
from claw_plan.profiles.coded_means import part_sizes


def test_a_codec_has_two_phases(toys):
    """20 elements over 3 ranks; 1-bit codes take 4 bytes and the bits, padded to 4: 8 each.

    All are exchanged, then gathered.
    """
    mean = averaging(toys.problem(), Candidate(dp_replicate=3, codec="one_bit"), 20)
    assert part_sizes(20, 3) == [8, 8, 4]
    (encode_ns, exchange), (server_ns, gather) = mean.phases
    assert (exchange.moves[0].op, exchange.bytes) == ("all_to_all", 3 * 8)
    assert (gather.moves[0].op, gather.bytes) == ("all_gather", 3 * 8)
    # The toy moves 10 bytes a ns. Encoding moves 8.125 bytes an element, decoding 4.125; AdamW's
    # momentum takes 24 before and 4 after.
    encoding = 8.125 + 4.125 + 24
    assert encode_ns == 20 * (24 + encoding) // 10
    assert server_ns == 8 * (3 * (4.125 + 12) + 8 + encoding) // 10
    assert mean.last_ns == 20 * (4.125 + 8 + 4) // 10
    assert mean.is_waited_for


def test_between_nodes_a_rank_encodes_a_part_of_its_nodes_sum(toys):
    """Two nodes of two, 4096 elements: half of them are a rank's own, of which it serves half.

    The toy moves 10 bytes a ns.
    """
    problem = toys.problem(cluster=toys.cluster(nodes=2, devices=2))
    candidate = Candidate(dp_replicate=4, codec="fp16", collective="hierarchical")
    mean = averaging(problem, candidate, 4096)
    kernels = [phase.kernels_ns for phase in mean.phases]
    links = [phase.cost.link for phase in mean.phases]
    assert links == ["intra", "inter", "inter", "intra"]
    # Copied and looked at for the largest; added up and scaled, encoded; two means; decoded.
    assert kernels == [
        8 * 4096 // 10 + 4 * 4096 // 10,
        (12 * 2048 + 8 * 2048) // 10 + 6 * 2048 // 10,
        (2 * (6 + 12) + 8 + 6) * 1024 // 10,
        (6 + 8) * 2048 // 10,
    ]
    # The others' half is put in its place, and all of it is looked at.
    assert mean.last_ns == 8 * 2048 // 10 + 4 * 4096 // 10
    assert mean.is_waited_for


def test_low_rank_sends_vectors_with_one_factor_and_then_the_other(toys):
    """At rank 2: of 6 x 10 the factors have 12 and 20 elements; a vector of 7 stays whole."""
    shapes = ((7,), (6, 10))
    candidate = Candidate(dp_replicate=3, codec="low_rank:2")
    mean = averaging(toys.problem(), candidate, 67, shapes)
    (before_ns, first), (between_ns, second) = mean.phases
    assert [cost.moves[0].op for cost in (first, second)] == ["all_reduce"] * 2
    assert (first.bytes, second.bytes) == (4 * (7 + 12), 4 * 20)
    assert (before_ns, between_ns, mean.last_ns) == kernels_ns(
        toys.problem(), factors_of(shapes, 2), 67
    )
    assert mean.is_waited_for
    vector = averaging(toys.problem(), candidate, 67)
    assert [cost.bytes for _, cost in vector.phases] == [4 * 67]
    ring = averaging(toys.problem(), replace(candidate, collective="ring"), 67, shapes)
    assert [cost.moves[0].algorithm for _, cost in ring.phases] == ["ring"] * 2


def test_momentum_is_waited_for_between_hosts_too(toys):
    one_bit = Candidate(dp_replicate=2, codec="one_bit")
    between = toys.problem(cluster=toys.cluster(devices=1, nodes=2, kind="cpu"))
    assert averaging(between, one_bit, 20).is_waited_for
    assert not averaging(between, replace(one_bit, codec="int8"), 20).is_waited_for


def test_lambs_momentum_takes_its_layers_kernels_besides(toys):
    problem = toys.problem()
    lamb = replace(problem, training=replace(problem.training, optimizer="lamb"))
    one_bit = Candidate(dp_replicate=3, codec="one_bit")
    ours, adams = (averaging(each, one_bit, 20) for each in (lamb, problem))
    assert ours.phases == adams.phases and ours.is_waited_for
    assert ours.last_ns - adams.last_ns == 100 * 20 // 10


def test_replicas_of_zero_one_adam_send_one_bit_or_nothing(toys):
    """A step apart moves 52 bytes an element, at 10 a ns; a meeting 72 more than 1-bit Adam's."""
    problem = toys.problem()
    candidate = Candidate(dp_replicate=3, codec="zero_one:4")
    apart = averaging(problem.apart, candidate, 20)
    assert (apart.phases, apart.last_ns, apart.is_waited_for) == ((), 52 * 20 // 10, True)
    met, one_bit = (
        averaging(problem, replace(candidate, codec=codec), 20)
        for codec in ("zero_one:4", "one_bit")
    )
    assert met.phases == one_bit.phases
    assert met.last_ns - one_bit.last_ns == 72 * 20 // 10


@given(st.integers(0, 10_000), st.integers(1, 9))
def test_parts_are_even_multiples_of_eight_and_a_rest(elements, ranks):
    parts = part_sizes(elements, ranks)
    assert len(parts) == ranks and sum(parts) == elements
    assert max(parts) - min(parts) < 16
    assert sum(bool(part % 8) for part in parts) <= 1


def test_error_feedback_keeps_a_residual_at_the_worker_and_one_at_the_server(toys):
    problem, one_bit = toys.problem(), Candidate(dp_replicate=4, codec="one_bit")
    assert residual_bytes(problem, one_bit, 100) == 4 * 100 + 4 * 25
    assert residual_bytes(problem, Candidate(dp_replicate=4, codec="fp16"), 100) == 0
    assert residual_bytes(problem, Candidate(codec="one_bit"), 100) == 0
    # Two nodes of two: a rank encodes half of its node's sum, and serves half of that.
    nodes = toys.problem(cluster=toys.cluster(nodes=2, devices=2))
    assert residual_bytes(nodes, replace(one_bit, collective="ring"), 160) == 4 * 160 + 4 * 40
    kept = residual_bytes(nodes, replace(one_bit, collective="hierarchical"), 160)
    assert kept == 4 * 80 + 4 * 40


def test_momentum_before_a_sparse_codec_takes_a_velocity_and_its_passes(toys):
    """Encoding moves 20 bytes an element and the correction 40; the server's has plain errors."""
    problem, corrected = toys.problem(), Candidate(dp_replicate=4, codec="top_k:0.1,0.9")
    plain = replace(corrected, codec="top_k:0.1")
    kept = [residual_bytes(problem, one, 100) for one in (corrected, plain)]
    assert kept == [4 * 100 + 4 * 100 + 4 * 25, 4 * 100 + 4 * 25]
    sgd = replace(problem, training=replace(problem.training, optimizer="sgd"))
    phases = [averaging(sgd, one, 100).phases for one in (corrected, plain)]
    assert phases[0][0].kernels_ns == 100 * (20 + 40) // 10
    assert phases[0][1] == phases[1][1] and phases[0][0].cost == phases[1][0].cost


def test_the_library_averages_beside_the_computation(toys):
    """5 us and 4 bytes an element at 1e6 bytes/s; nobody to meet, nothing to do."""
    mean = averaging(toys.problem(), Candidate(dp_replicate=2), 10)
    ((kernels_ns, cost),) = mean.phases
    assert (kernels_ns, cost.alone_ns, mean.is_waited_for) == (0, 5_000 + 40_000, False)
    assert averaging(toys.problem(), Candidate(), 10).phases == ()
    assert averaging(toys.problem(), Candidate(dp_replicate=2), 0).phases == ()


def test_gloo_averages_beside_the_backward_between_hosts_alone(toys):
    candidate = Candidate(dp_replicate=2)
    gpus = toys.problem(cluster=toys.cluster(devices=2))
    inside = toys.problem(cluster=toys.cluster(devices=2, kind="cpu"))
    between = toys.problem(cluster=toys.cluster(devices=1, nodes=2, kind="cpu"))
    waits = [averaging(each, candidate, 20).is_waited_for for each in (gpus, inside, between)]
    assert waits == [False, True, False]
