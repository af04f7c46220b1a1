"""Commands run on the simulated GPU: ranks, generation, parity, and a model built by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_qwen3vl.simulated_gpu import Workbench
from mcore_qwen3vl.verification.search.case import Case

HERE = "tests.rehearsal.programs"


@pytest.mark.slow
def test_ranks_start_from_a_process_that_has_used_cuda(workbench: Workbench) -> None:
    """They are spawned: forked ones would raise, because CUDA does not survive a fork."""
    ranks, _ = workbench.call(f"{HERE}:spawned_ranks")
    assert ranks == [(0, 2, "cuda:0", 5), (1, 2, "cuda:0", 5)]


@pytest.mark.slow
@pytest.mark.parametrize("under_torchrun", [True, False], ids=["torchrun", "spawned"])
def test_generate(workbench: Workbench, moe: Path, under_torchrun: bool) -> None:
    lengths, _ = workbench.call(f"{HERE}:generate", moe, under_torchrun)
    assert lengths == [3]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["single", "dp2"])
def test_the_search_runs_and_judges_a_case_on_gpus(layout: str, tmp_path: Path) -> None:
    """It trains to the end, and its samples are the template's: only floats mean nothing here."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}]
    record = json.dumps({"messages": turns})
    case = Case(records=(record,) * 4, layout=layout, device="cuda")
    file = tmp_path / "case.sh"
    file.write_text(f"# case: {case.to_json()}\n", "utf-8")
    simulated = [sys.executable, "-m", "mcore_qwen3vl.simulated_gpu", "-m"]
    search = [*simulated, "mcore_qwen3vl.verification.search", "--case", str(file)]
    ended = subprocess.run(search, capture_output=True, text=True)
    assert "plain_loop: step 1: lm loss is " in ended.stdout, ended.stdout + ended.stderr


@pytest.mark.slow
def test_verify_parity_on_cuda_compares_everything(workbench: Workbench, moe: Path) -> None:
    """Nothing is missing from its findings, though their floats mean nothing here."""
    counts, _ = workbench.call(f"{HERE}:verify_parity", moe)
    assert counts["logits all"] > 10_000
    assert any(name.startswith("gradients model.visual") for name in counts)
    assert any(name.startswith("parameters ") for name in counts)


def test_a_model_built_without_cuda_lands_on_the_device(workbench: Workbench, moe: Path) -> None:
    """Megatron makes norms and routers on the host, and only its training loop moves them."""
    elsewhere, _ = workbench.call(f"{HERE}:built_without_cuda", moe)
    assert elsewhere == []


def test_the_heads_gradient_is_added_to_the_buffer_by_the_product(workbench: Workbench) -> None:
    """One kernel for each of two chunks: a separate product would be rounded to bf16 first."""
    written, _ = workbench.call(f"{HERE}:head_gradient", 12, 32, 40)
    assert set(written) <= {"aten.addmm.dtype_out", "aten.slice.Tensor", "aten.detach.default"}
    assert written.count("aten.addmm.dtype_out") == 2


@pytest.mark.parametrize(
    ("frozen", "gib", "products"), [(False, 80, 3), (False, 0.75, 4), (True, 0.75, 2)]
)
def test_the_heads_kernels_read_the_logits_once_and_write_their_gradient_over_them(
    frozen: bool, gib: float, products: int, workbench: Workbench
) -> None:
    """The eager code moves ten times as many bytes. Without room, logits are computed again."""
    tokens, width, columns, chunks = 4096, 64, 8192, 4
    sizes = (tokens, width, columns, chunks)
    found, _ = workbench.call(f"{HERE}:head_costs", *sizes, frozen, gib)
    assert found["gemm"] == products * 2 * tokens * width * columns
    floor = 3 * 2 * tokens * columns  # read, then read and written, in bf16
    assert floor < found["bytes"] < 1.2 * floor  # states and numbers of tokens are small beside it
    assert found["launches"] <= 40 + 11 * chunks


@pytest.mark.slow
def test_the_optimizer_is_saved_without_a_copy_on_the_device_and_loaded_onto_it(
    workbench: Workbench, tmp_path: Path
) -> None:
    found, _ = workbench.call(f"{HERE}:own_parts", tmp_path / "saved")
    assert found["devices"] == {"cuda"}
    assert found["stored"] == found["declared"] > 10_000
    assert found["more memory"] < 4 * found["declared"] / 10
