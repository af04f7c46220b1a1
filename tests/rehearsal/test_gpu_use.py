"""What a profile says of the GPU's use, by profiles made here and one of a run on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.training.events import FINALIZE, FORWARD_BACKWARD, LOG
from mcore_qwen3vl.verification.curves import run_rank
from tests.docs.markdown import ROOT
from tests.training.one_step import step_job

MAIN, BACKWARD, FIRST_STREAM, SECOND_STREAM = 100, 101, 7, 20


@pytest.fixture
def gpu_use(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import gpu_use

    return gpu_use


def event(category: str, name: str, start: float, end: float, tid: int = MAIN) -> dict[str, Any]:
    """Return an event as PyTorch's profiler exports it; times are microseconds."""
    more = {"ph": "X", "pid": 1, "tid": tid}
    return {"cat": category, "name": name, "ts": start, "dur": end - start, **more}


def mark(number: int, start: float, end: float) -> dict[str, Any]:
    return event("user_annotation", f"iteration {number}", start, end)


def kernel(name: str, start: float, end: float, stream: int = FIRST_STREAM) -> dict[str, Any]:
    return event("kernel", name, start, end, stream)


def test_streams_that_overlap_are_busy_once(gpu_use: Any) -> None:
    """And so are a kernel within another, and two that touch."""
    found = gpu_use.use_of_gpu([
        mark(4, 1000, 2000),
        kernel("long", 1100, 1500),
        kernel("within", 1200, 1300, SECOND_STREAM),
        kernel("beyond", 1400, 1600, SECOND_STREAM),
        event("gpu_memcpy", "Memcpy HtoD", 1600, 1700, SECOND_STREAM),
        event("gpu_memset", "Memset (Device)", 1900, 1950, FIRST_STREAM),
    ])  # fmt: skip
    assert found["busy ms"] == pytest.approx(0.65)
    assert found["busy"] == pytest.approx(0.65)
    assert found["launches"] == 5
    assert sum(found["idle ms by length"].values()) == pytest.approx(0.35)


def test_only_what_is_within_the_iterations_counts(gpu_use: Any) -> None:
    """As means of an iteration; the marks that the GPU's own time line repeats are none."""
    found = gpu_use.use_of_gpu([
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
        event("gpu_user_annotation", "iteration 4", 0, 9000, FIRST_STREAM),
        event("user_annotation", "iteration 4, log", 0, 9000),
        kernel("before", 100, 900),
        mark(4, 1000, 2000),
        kernel("across", 900, 1100),
        kernel("first", 1200, 1400),
        mark(5, 2000, 4000),
        kernel("second", 2500, 3500),
        kernel("out", 3900, 4100),
        kernel("after", 4200, 5000),
        {"ph": "i", "cat": "kernel", "name": "an instant", "ts": 1500, "pid": 0, "tid": 7},
    ])  # fmt: skip
    assert found["iterations"] == 2
    assert found["ms"] == pytest.approx(1.5)
    assert found["busy ms"] == pytest.approx((0.1 + 0.2 + 1.0 + 0.1) / 2)
    assert found["launches"] == 2
    assert found["groups"] == {"others": {"ms": pytest.approx(0.7), "launches": 2}}
    with pytest.raises(gpu_use.NoIterations):
        gpu_use.use_of_gpu([kernel("any", 0, 1)])


def test_kernels_are_grouped_by_their_names(gpu_use: Any) -> None:
    """Names as they are in profiles; the first one is a product with CUTLASS, the next is none."""
    groups = {
        "products": (
            "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128>",
            "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT",
            "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>",
        ),
        "attention": (
            "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<...>>>",
            "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>",
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128",
        ),
        "our Triton kernels": ("_gelu_gradient", "_split"),
        "copies": (
            "Memcpy DtoD (Device -> Device)",
            "void at::native::elementwise_kernel<..., at::native::direct_copy_kernel_cuda(...)>",
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>",
        ),
        "exchanges": ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL",),
        "others": (
            "_splitting",  # of another library
            "void at::native::multi_tensor_apply_kernel<..., FusedAdamMathFunctor<float, 4, ...>>",
            "triton_poi_fused_mul_silu_0",
        ),
    }
    names = [name for of_group in groups.values() for name in of_group]
    found = gpu_use.use_of_gpu(
        [mark(4, 0, 1000), *(kernel(n, 10 * i, 10 * i + 5) for i, n in enumerate(names))]
    )
    assert {name: gpu_use.group_of(name) for name in names} == {
        name: group for group, of_group in groups.items() for name in of_group
    }
    for group, of_group in groups.items():
        milliseconds = 5e-3 * len(of_group)
        assert found["groups"][group] == {
            "ms": pytest.approx(milliseconds), "launches": len(of_group),
        }  # fmt: skip


def test_idle_time_is_that_of_phases_and_of_gaps_by_length(gpu_use: Any) -> None:
    """A phase does not count within another one."""
    found = gpu_use.use_of_gpu([
        mark(4, 0, 10000),
        event("user_annotation", LOG, 0, 1000),
        event("user_annotation", FORWARD_BACKWARD, 2000, 8000),
        event("user_annotation", FINALIZE, 6000, 8000),
        kernel("log", 500, 1500),
        kernel("forward", 1510, 6500),
        kernel("optimizer", 7000, 9000),
    ])  # fmt: skip
    assert found["idle ms by phase"] == {
        LOG: pytest.approx(0.5),
        "optimizer and the rest": pytest.approx(0.01 + 1.0),
        FINALIZE: pytest.approx(0.5),
    }
    assert list(found["idle ms by length"].values()) == [
        pytest.approx(0.01), pytest.approx(1.0), pytest.approx(1.0),
    ]  # fmt: skip


def test_the_longest_gap_has_the_operator_that_the_host_runs_in_it(gpu_use: Any) -> None:
    """Of any thread, and with its caller; the time of an operator's callees is not its own."""
    found = gpu_use.use_of_gpu([
        mark(4, 0, 10000),
        event("user_annotation", FORWARD_BACKWARD, 0, 9000),
        kernel("first", 0, 1000),
        event("cpu_op", "aten::mul", 900, 1200),
        event("cpu_op", "MulBackward0", 1000, 4000, BACKWARD),
        event("cpu_op", "aten::mul", 1500, 3900, BACKWARD),
        event("cuda_runtime", "cudaStreamSynchronize", 1600, 3600, BACKWARD),
        kernel("second", 4000, 8500),
        event("cpu_op", "aten::add_", 8500, 9300),
        event("cpu_op", "aten::empty", 9200, 9300),
        kernel("third", 9500, 9600),
    ])  # fmt: skip
    first, second, third = found["longest gaps"]
    assert first == {
        "at ms": pytest.approx(1.0),
        "ms": pytest.approx(3.0),
        "phase": FORWARD_BACKWARD,
        "host": "aten::mul > cudaStreamSynchronize",
        "host ms": pytest.approx(2.0),
    }
    assert (second["host"], second["host ms"]) == ("aten::add_", pytest.approx(0.7))
    assert (third["host"], third["host ms"]) == ("no operator", pytest.approx(0.4))


def _profile(argv: list[str], output: Path) -> dict[str, Any]:
    from benchmarks.loop_profile import LoopProfiler, report

    trace = output.with_name("trace.json.gz")
    observer = LoopProfiler(trace)
    run_rank(argv, output, observer)
    return report(trace, observer)


def test_the_loop_is_profiled(
    dense: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU a profile has no kernel, so that the two iterations are one gap."""
    monkeypatch.syspath_prepend(str(ROOT))
    job = step_job(dense, data, "single", steps=7)
    (found,) = run_layout(_profile, 1, job.argv, tmp_path / "output.txt")
    (gap,) = found["longest gaps"]
    assert found["iterations"] == 2
    assert gap["ms"] == pytest.approx(2 * found["ms"])
    assert found["busy"] == found["launches"] == 0
    idle = found["idle ms by phase"]
    assert set(idle) == {FORWARD_BACKWARD, FINALIZE, LOG, "optimizer and the rest"}
    assert sum(idle.values()) == pytest.approx(found["ms"])
    assert max(idle, key=idle.__getitem__) == gap["phase"] == FORWARD_BACKWARD
    assert 0 < found["ms without profile"] < 10 * found["ms"]
