from __future__ import annotations

import pytest

from claw_plan.executor.trace_readers.rank_trace import KINDS, activities, kind_of


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ampere_sgemm_128x64_tn", "gemm"),
        ("nvjet_hsh_128x128_64x4_1x2_h_bz_coopA_NNT", "gemm"),
        ("Cijk_Alik_Bljk_SB_Bias_AS_SAV_UserArgs_MT64x16x32", "gemm"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu>", "gemm"),
        ("aten::addmm", "gemm"),
        ("aten::addcmul_", "memory"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("sm80_xmma_fprop_implicit_gemm_indexed_tf32f32", "conv"),
        ("void at::native::convert_kernel", "memory"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...>", "optimizer"),
        ("void at::native::vectorized_elementwise_kernel<4, ...>", "memory"),
        ("Memcpy HtoD (Pinned -> Device)", "copy"),
        ("autograd::engine::evaluate_function: AddmmBackward0", "host"),
    ],
)
def test_kernels_are_classed_by_their_libraries_names(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_activities_are_in_order_of_start() -> None:
    rows = [(5, 9, "gemm", "forward", 1), (0, 3, "memory", "backward", 0)]
    found = activities(rows, ("a", "b"))
    assert found.start_ns.tolist() == [0, 5]
    assert [KINDS[kind] for kind in found.kind.tolist()] == ["memory", "gemm"]
    assert len(activities([], ())) == 0
