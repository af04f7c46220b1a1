"""The simulated GPU runs real operators, counts memory and work, and errs where GPUs err."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_qwen3vl.simulated_gpu import Failed, Settings, Unavailable, Workbench, device
from mcore_qwen3vl.simulated_gpu.device import short_path
from tests.leftovers import run_and_end

HERE = "tests.simulated_gpu.programs"


def test_the_operators_of_training_run(workbench: Workbench) -> None:
    name, report = workbench.call(f"{HERE}:operators")
    assert name == "Simulated GPU"
    counters = report.interval("end").counters
    assert counters["launches"] > 100
    assert counters["gemms"] >= 8
    assert counters["convolutions"] > 0


def test_ranks_that_share_a_gpu_exchange_tensors_of_the_device(workbench: Workbench) -> None:
    """What the exchange computes is tested on the host, in tests/runtime/test_shared_gpu.py."""
    devices, report = workbench.call(f"{HERE}:exchange_through_the_host")
    assert devices == ["cuda:0", "cuda:0"]
    assert report.interval("end").counters["launches"] > 0


def test_memory_is_counted_and_not_taken_from_the_host(workbench: Workbench) -> None:
    found, report = workbench.call(f"{HERE}:memory")
    assert found["host"] < 100 << 20
    assert "Tried to allocate 30.00 GiB" in found["refused"]
    assert "total capacity of 80.00 GiB" in found["refused"]
    assert report.interval("end").peak == 60 << 30
    with pytest.raises(Failed, match=r"total capacity of 40\.00 GiB"):
        workbench.call(f"{HERE}:memory", memory_gib=40)


def test_its_properties_are_read_at_the_right_offsets(workbench: Workbench) -> None:
    """This canary fails if PyTorch is compiled against another layout of ``cudaDeviceProp``."""
    found, _ = workbench.call(f"{HERE}:properties")
    assert found == {
        "total_memory": 80 << 30,
        "multi_processor_count": 132,
        "major": 9,
        "minor": 0,
        "L2_cache_size": 50 << 20,
        "max_threads_per_multi_processor": 2048,
        "warp_size": 32,
        "shared_memory_per_block_optin": 232448,
    }


ASKING = """
import torch

def asked():
    return torch.cuda.get_device_name(0), torch.cuda.get_device_capability()

FIRST = asked()

def both():
    torch.ones(2, device="cuda")  # raises if the process that forked this one has used CUDA
    return FIRST, asked()
"""


@pytest.mark.slow
def test_modules_may_ask_what_the_device_is_while_they_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """megatron-core 0.20 asks while it is imported."""
    (tmp_path / "asking.py").write_text(ASKING)
    monkeypatch.syspath_prepend(tmp_path)
    with Workbench(("asking",)) as bench:
        (while_imported, after), _ = bench.call("asking:both")
    assert while_imported == after == ("Simulated GPU", (9, 0))


def test_flops_are_those_of_the_products(workbench: Workbench) -> None:
    """Causal attention counts half of each segment's square; backward is five products, not two."""
    _, report = workbench.call(f"{HERE}:flops")
    interval = report.interval("end")
    counted = interval.flops
    assert counted["gemm"] == 3 * 2 * 7 * 30 * 50 + 2 * 3 * 11 * 13 * 17 + 2 * 23 * 7 * 19
    square = 4 * 4 * 16 * (10**2 + 20**2)
    grouped = 4 * 2 * 6 * 5 * 9 * 16
    assert counted["attention"] == square / 2 * (1 + 2.5) + square + grouped * (1 + 2.5)
    # What it would be if each query had one key: 30 queries twice, and ten of nine keys.
    assert interval.one_key == 4 * 4 * 16 * 30 * (1 + 2.5 + 1) + grouped / 9 * (1 + 2.5)


def test_every_host_sync_is_recorded_with_its_line(workbench: Workbench) -> None:
    _, report = workbench.call(f"{HERE}:host_syncs")
    here = [s for s in report.interval("end").host_syncs if "programs.py" in s.place]
    assert all(s.place.split(" < ")[0].endswith(" host_syncs") for s in here)
    lines = sorted((int(s.place.split(":")[1].split()[0]), s.kind) for s in here)
    first = lines[0][0]
    assert [(line - first, kind) for line, kind in lines] == [
        (0, "stream synchronize"),
        (1, "copy to pageable"),
        (2, "device synchronize"),
        (9, "event synchronize"),
    ]


def test_every_launch_is_recorded_with_its_line_if_asked_for(workbench: Workbench) -> None:
    count, report = workbench.call(f"{HERE}:launches")
    found = report.interval("watched").launches
    assert sum(launch.count for launch in found) == count
    (tangents,) = (launch for launch in found if "tan_kernel" in launch.kernel)
    assert tangents.count == 3
    assert tangents.phase == "here"
    assert tangents.place.startswith("tests/simulated_gpu/programs.py:")
    assert tangents.place.split(" < ")[0].endswith(" launches")
    assert report.interval("end").launches == []


def test_a_place_begins_with_the_outermost_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent):
        (folder / "__init__.py").touch()
    assert short_path(f"{inner}/module.py") == "outer/inner/module.py"
    assert short_path(f"{inner.parent}/module.py") == "outer/module.py"
    # A checkout of Megatron, whose outermost package has no __init__.py.
    monkeypatch.syspath_prepend(str(tmp_path.parent))
    assert short_path(f"{inner}/other.py") == f"{tmp_path.name}/outer/inner/other.py"
    assert short_path("/no/such/folder/script.py") == "such/folder/script.py"
    assert short_path("script.py") == "script.py"
    assert short_path("/venv/site-packages/megatron/core/x.py") == "megatron/core/x.py"


def test_a_device_mismatch_is_an_error(workbench: Workbench) -> None:
    with pytest.raises(Failed, match="Expected all tensors to be on the same device"):
        workbench.call(f"{HERE}:two_devices")


def test_cuda_does_not_survive_a_fork(workbench: Workbench) -> None:
    found, _ = workbench.call(f"{HERE}:fork_after_asking")
    assert "Cannot re-initialize CUDA in forked subprocess" in found


@pytest.mark.slow
def test_late_events_give_the_most_that_streams_hold_back(workbench: Workbench) -> None:
    (reserved, allocated), _ = workbench.call(f"{HERE}:late_events")
    assert reserved == 64 << 20
    with Workbench(settings=Settings(late_events=True)) as late:
        (reserved, _), _ = late.call(f"{HERE}:late_events")
    assert reserved == 4 * allocated


# ---- canaries: every replaced symbol ----


def _symbols(library: Path, *options: str) -> set[str]:
    shown = subprocess.run(
        ["nm", "-D", *options, str(library)], capture_output=True, text=True, check=True
    )
    return {line.split()[-1].split("@")[0] for line in shown.stdout.splitlines()}


def _torch_library(name: str) -> Path:
    import torch

    return Path(torch.__file__).parent / "lib" / name


@pytest.fixture(scope="module")
def ours() -> set[str]:
    if shutil.which("nm") is None:
        pytest.skip("nm is not installed")
    return set().union(
        *(_symbols(library, "--defined-only") for library in device.compiled_libraries())
    )


# Graphs, memory of other processes, and what torch 2.15 asks of kernel libraries that a program
# brings along are not replaced: NVIDIA's own functions answer that there is no device.
NOT_REPLACED = (
    "cudaGraph",
    "cudaUserObject",
    "cudaDeviceGetGraphMemAttribute",
    "cudaDeviceSetGraphMemAttribute",
    "cudaLibraryGetGlobal",
    "cudaLibraryGetKernelCount",
    "cudaLibraryGetManaged",
    "cudaLibraryGetUnifiedFunction",
    "cudaLibraryLoadFromFile",
    "cudaIpc",
    "cudaStreamBeginCapture",
    "cudaStreamEndCapture",
    "cudaStreamUpdateCapture",
    "cudaLibraryUnload",
)
OF_OTHER_VERSIONS = {
    "cublasLtGroupedMatrixLayoutInit_internal",
    "cudaGetDeviceProperties_v2",
    "cudaStreamGetCaptureInfo_v2",
    "cudaStreamGetCaptureInfo_v3",
}


@pytest.mark.parametrize("name", ["libc10_cuda.so", "libtorch_cuda.so", "libtorch_python.so"])
def test_canary_every_cuda_function_that_torch_needs_is_replaced(name: str, ours: set[str]) -> None:
    """An unreplaced function would reach NVIDIA's library, which finds no device."""
    needed = _symbols(_torch_library(name), "--undefined-only")
    prefixes = ("cuda", "__cuda", "cublas", "nvrtc", "nvml")
    needed = {s for s in needed if s.startswith(prefixes) and not s.startswith(NOT_REPLACED)}
    assert needed - ours == set()


def test_canary_every_replaced_runtime_function_still_exists(ours: set[str]) -> None:
    """If NVIDIA renames a function, ours is never called, and its successor is not replaced."""
    import nvidia

    real: set[str] = set()
    for root in nvidia.__path__:
        for library in Path(root).rglob("*.so*"):
            if library.name.startswith(("libcudart", "libcublas", "libnvrtc.so", "libcudnn")):
                real |= _symbols(library, "--defined-only")
    known = {s for s in ours if s.startswith(("cuda", "__cuda", "cublas", "nvrtc", "cudnn"))}
    assert known - real <= OF_OTHER_VERSIONS


def test_the_counters_are_those_of_the_stub() -> None:
    from mcore_qwen3vl.simulated_gpu.device import COUNTERS, HOST_SYNCS

    header = (device.SOURCES / "stub.h").read_text()
    names = header.split("enum {\n    LAUNCHES")[1].split("}")[0]
    names = [n.strip().lower() for n in f"LAUNCHES{names}".replace("\n", " ").split(",")]
    assert tuple(names[:-1]) == COUNTERS
    kinds = header.split("enum { SYNC_DEVICE")[1].split("}")[0]
    assert len(kinds.split(",")) == len(HOST_SYNCS)


# ---- where it cannot run ----


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with pytest.raises(Unavailable, match=r"no C compiler no-such-compiler: install gcc"):
        device.compiled_libraries()
    monkeypatch.setenv("CC", "false")
    with pytest.raises(Unavailable, match=r"false cannot compile the simulated GPU"):
        device.compiled_libraries()
    assert not list(tmp_path.rglob("*.so*"))


def test_on_another_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(Unavailable, match=r"needs Linux with glibc, and this is darwin"):
        device.compiled_libraries()


def test_where_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(Unavailable, match="set XDG_CACHE_HOME"):
        device.compiled_libraries()


@pytest.mark.slow
def test_it_is_compiled_once_and_again_when_its_source_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "stub"
    shutil.copytree(device.SOURCES, source)
    monkeypatch.setattr(device, "SOURCES", source)
    first = device.compiled_libraries()
    made = [library.stat().st_mtime_ns for library in first]
    assert [library.stat().st_mtime_ns for library in device.compiled_libraries()] == made
    (source / "count.c").write_text((source / "count.c").read_text() + "\n// changed\n")
    assert device.compiled_libraries()[0] != first[0]


def test_a_program_runs_on_it_with_nothing_else_of_ours(tmp_path: Path) -> None:
    """The package alone in a folder, under a name of its own, where ours cannot be imported."""
    shutil.copytree(device.SOURCES.parent, tmp_path / "another_name")
    (tmp_path / "mcore_qwen3vl.py").write_text("raise ImportError('nothing of it is here')\n")
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, torch\n"
        "kept = torch.empty(3 << 20, dtype=torch.uint8, device='cuda')\n"
        "print(kept.device)\n"
        "sys.exit(3)\n"
    )
    command = [sys.executable, "-m", "another_name", "--peak", str(program)]
    alone = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        command, cwd=tmp_path, env=alone, capture_output=True, text=True, check=False
    )
    assert done.stdout == "cuda:0\n", done.stderr
    assert done.returncode == 3
    assert "program.py:2 <module>: 3145728" in done.stderr


def test_outside_it_says_so() -> None:
    from mcore_qwen3vl.simulated_gpu.rank import one_rank

    assert not hasattr(ctypes.CDLL(None), "simulated_counters")
    with pytest.raises(Unavailable, match="does not run on the simulated GPU"), one_rank():
        pass


LEAVER = """
import multiprocessing
from mcore_qwen3vl.simulated_gpu.workbench import leave_at_once

def main():
    print("printed")
    queue = multiprocessing.Manager().Queue()
    leave_at_once(3)

if __name__ == "__main__":
    main()
"""


def test_leaving_at_once_ends_managers_too(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(LEAVER)
    left = run_and_end([sys.executable, program], tmp_path, "success")
    assert (left.exit_code, left.printed) == (3, "printed\n")
    assert left.anything == []
