"""One problem on several kinds becomes one on each."""

from __future__ import annotations


def test_equal_nodes_are_one_kind_wherever_they_stand(toys, mixed_toys):
    scorer = mixed_toys.mixed_scorer(
        toys, [mixed_toys.ToyKind(), mixed_toys.ToyKind(flops_per_s=2e6, nodes=2)]
    )
    problem = scorer.problem
    assert problem.names == ("k0", "k1")
    assert [kind.nodes for kind in problem.kinds] == [(0,), (1, 2)]
    assert [kind.num_devices for kind in problem.kinds] == [2, 4]
    assert problem.kinds[1].device_names() == ["1:0", "1:1", "2:0", "2:1"]


def test_each_kind_computes_at_its_own_rate_and_all_together_at_the_slowest(toys, mixed_toys):
    problem = mixed_toys.mixed_scorer(
        toys, [mixed_toys.ToyKind(), mixed_toys.ToyKind(flops_per_s=2e6)]
    ).problem
    slow, fast, whole = (
        each.pass_time(1, "plain", 1, 1, backward=False).compute_ns
        for each in (problem.kinds[0].problem, problem.kinds[1].problem, problem.whole)
    )
    assert slow == whole == 2 * fast


def test_a_share_is_the_same_problem_with_fewer_samples(toys, mixed_toys):
    kind = mixed_toys.mixed_scorer(
        toys, [mixed_toys.ToyKind(), mixed_toys.ToyKind(flops_per_s=2e6)], global_batch=8
    ).problem.kinds[1]
    assert kind.with_batch(8) is kind.problem
    assert kind.with_batch(3).training.global_batch == 3
    assert kind.with_batch(3) is kind.with_batch(3)
    assert kind.with_batch(3).cluster is kind.problem.cluster
