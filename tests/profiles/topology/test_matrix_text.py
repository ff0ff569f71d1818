from __future__ import annotations

from claw_plan.profiles.topology.matrix_text import Matrix, find_matrices
from claw_plan.profiles.topology.source import Source


def found(text: str) -> list[Matrix]:
    return find_matrices(Source("t", text))[0]


def test_cells_end_where_the_affinities_begin() -> None:
    (matrix,) = found("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tSOC\t0-11\nGPU1\tsys\tx\tN/A\n")
    assert matrix.columns == ["GPU0", "GPU1"]
    assert matrix.rows["GPU0"].cells == ["X", "SYS"]
    assert matrix.rows["GPU0"].rest == "0-11"
    assert matrix.rows["GPU1"].cells == ["SYS", "X"]


def test_fused_headers_are_taken_apart() -> None:
    (matrix,) = found("GPU0GPU1mlx5_0mlx5_1CPU Affinity\nGPU0 X NV1 PIX PIX\n")
    assert matrix.columns == ["GPU0", "GPU1", "mlx5_0", "mlx5_1"]


def test_a_word_that_is_no_path_stops_the_row_but_is_counted() -> None:
    (matrix,) = found("GPU0 X PIXNODE SYS 0-3\n")
    row = matrix.rows["GPU0"]
    assert (row.cells, row.readable, row.bad, row.rest) == (["X"], 2, "PIXNODE", "0-3")


def test_what_stands_around_a_matrix_is_kept_with_it() -> None:
    (matrix,) = found(
        "$ nvidia-smi topo -mp\n76 NICs found in the topology, only displaying 56 in the matrix.\n"
        " GPU0 NIC0\nGPU0 X PIX\nLegend:\n  PIX  = Connection\nNIC Legend:\n  NIC0: mlx5_bond_0\n"
    )
    assert matrix.pci_only
    assert matrix.capped == (76, 56)
    assert matrix.legend == {"PIX"}
    assert matrix.devices == {"NIC0": "mlx5_bond_0"}


def test_wrong_labels_and_other_matrices_are_marked() -> None:
    assert find_matrices(Source("t", "GP0 X SYS\n"))[1] == (1, "GP0")
    (matrix,) = found(" GPU0 GPU1\nGPU0 X CNS\n")
    assert matrix.p2p_line == 2


def test_prose_is_no_matrix() -> None:
    assert found("GPU0 is fast, NODE and SYS are slow; GPU1 too\nSee NIC0: it works\n") == []
