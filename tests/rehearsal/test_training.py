"""The launch scripts' flags run through Megatron's real loop, as one rank of their layouts.

Widths, tokens and pixels are real, because memory is only counted. Dense models have their real
depth in the slow tests; the MoE model has 4 of 48 layers, because it would take minutes otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.simulated_gpu import Report, Workbench
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.tiny.records import write_half_images
from mcore_qwen3vl.training.events import FINALIZE, FORWARD_BACKWARD, LOG
from tests.rehearsal.conftest import (
    DISPATCHER,
    GROUPED_PRODUCTS,
    TRANSFERS,
    WITHOUT_TE,
    Rehearse,
    skip_other_torch,
)

TOLERANCE = 0.02  # of peak memory


@dataclass(frozen=True)
class Role:
    """One rank of a run."""

    script: str
    flags: tuple[str, ...]
    peak: float  # bytes, recorded with torch 2.13.0 and megatron-core 0.19.2
    parameters: int
    where: dict[str, Any]
    host_syncs: tuple[str, ...] = ()
    spec: str = "torch"


RECOMPUTE = (
    *("--recompute-granularity", "full", "--recompute-method", "uniform"),
    *("--recompute-num-layers", "1"),
)
PIPELINE = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")
ROLES = {
    "2B, 4 layers": Role(
        "sft_2b",
        ("--global-batch-size", "8"),
        12.16e9,
        667_543_552,
        {"layers": 4, "vision_blocks": 4},
    ),
    "2B": Role("sft_2b", ("--global-batch-size", "16"), 44.22e9, 2_127_532_032, {}),
    "8B, TP4": Role(
        "sft_8b",
        ("--global-batch-size", "4", "--tensor-model-parallel-size", "4"),
        41.69e9,
        2_624_303_344,
        {},
    ),
    "8B, TP2 PP2, last stage": Role(
        "sft_8b",
        ("--global-batch-size", "8", *PIPELINE),
        32.17e9,
        2_047_762_944,
        {"rank": 4},
        host_syncs=(TRANSFERS,),
    ),
    "30B-A3B, 4 layers, TP2 EP8": Role(
        "sft_30b_a3b",
        ("--global-batch-size", "16", *RECOMPUTE),
        9.6e9,
        840_094_400,
        {"layers": 4, "vision_blocks": 4},
        host_syncs=(DISPATCHER,),
    ),
    "LoRA 8B, TP2": Role(
        "lora_8b",
        ("--global-batch-size", "8", "--tensor-model-parallel-size", "2", "--sequence-parallel"),
        31.26e9,
        30_081_024,
        {},
    ),
    "LoRA 30B-A3B, 4 layers, TP2 EP8": Role(
        "lora_30b_a3b",
        ("--global-batch-size", "16", *RECOMPUTE),
        3.14e9,
        7_372_800,
        {"layers": 4, "vision_blocks": 4},
        host_syncs=(DISPATCHER,),
    ),
}
# Recorded with torch 2.11.0 and Transformer Engine 2.20.2, before scripts kept activations.
TE_PEAKS = {
    "2B": 36.1e9,
    "8B, TP4": 41.64e9,
    "8B, TP2 PP2, last stage": 32.14e9,
    "30B-A3B, 4 layers, TP2 EP8": 9.5e9,
    "LoRA 8B, TP2": 23.6e9,
    "LoRA 30B-A3B, 4 layers, TP2 EP8": 3.41e9,
}
for name, peak in TE_PEAKS.items():
    role = ROLES[name]
    grouped = (GROUPED_PRODUCTS,) if DISPATCHER in role.host_syncs else ()
    syncs = (*role.host_syncs, *grouped)
    flags = (*role.flags, "--no-keep-activations")
    ROLES[f"{name}, te"] = replace(role, flags=flags, peak=peak, spec="te", host_syncs=syncs)


FAST = ("2B, 4 layers",)


def marks(name: str) -> list[pytest.MarkDecorator]:
    slow = [] if name in FAST else [pytest.mark.slow]
    return [*slow, *([WITHOUT_TE] if ROLES[name].spec == "te" else [])]


PARAMS = [pytest.param(role, id=name, marks=marks(name)) for name, role in ROLES.items()]


@pytest.fixture(scope="module", params=PARAMS)
def rehearsed(request: pytest.FixtureRequest, rehearse: Rehearse) -> tuple[Role, Report]:
    """Run two iterations; an error in them fails every test below."""
    role = request.param
    return role, rehearse(role.script, *role.flags, **role.where, spec=role.spec)


def test_two_iterations_run_on_real_packs(rehearsed: tuple[Role, Report]) -> None:
    role, report = rehearsed
    assert [s.name for s in report.intervals][1:3] == ["iteration 1", "iteration 2"]
    assert report.facts["parameters"] == role.parameters
    assert report.facts["batch"]["tokens"] == (1, 8192)
    assert report.facts["batch"]["patches"] == (16384, 1536)
    assert report.interval("iteration 2").counters["unknown_calls"] == 0


def test_every_parameter_is_on_the_device_and_has_a_gradient(
    rehearsed: tuple[Role, Report],
) -> None:
    _, report = rehearsed
    assert report.facts["not on the device"] == []
    assert report.facts["without gradient"] == []


def test_forward_and_backward_wait_for_nothing_unknown(rehearsed: tuple[Role, Report]) -> None:
    role, report = rehearsed
    syncs = [
        w
        for w in report.interval("iteration 2").host_syncs
        if w.phase in (FORWARD_BACKWARD, FINALIZE)
    ]
    unknown = [w for w in syncs if not w.place.startswith(role.host_syncs or ("nothing",))]
    assert unknown == []
    assert bool(syncs) == bool(role.host_syncs), "the list above names what is gone"


def test_nothing_else_waits_between_two_logged_steps(rehearsed: tuple[Role, Report]) -> None:
    """Megatron's own loop does: for each tensor in the gradient's norm without Apex, for each rank
    with ``--exit-signal-handler``, and for success, norm, learning rate and the loss's scale."""
    _, report = rehearsed
    inside = (FORWARD_BACKWARD, FINALIZE, LOG)
    syncs = report.interval("iteration 2").host_syncs
    assert [w for w in syncs if w.phase not in inside] == []
    assert [w for w in syncs if w.phase == LOG], "the first step is logged"


def test_peak_memory_is_what_it_was(rehearsed: tuple[Role, Report]) -> None:
    """The peaks are in the table above; change them there if a change is intended."""
    role, report = rehearsed
    skip_other_torch(role.spec)
    assert report.interval("iteration 2").peak == pytest.approx(role.peak, rel=TOLERANCE)


def test_export_out_of_a_running_job(rehearse: Rehearse, tmp_path: Path) -> None:
    """``--save-hf`` works as the only rank; simulated others would claim the same slices."""
    tiny = write_tiny_checkpoint(tmp_path / "tiny", moe=True)
    out = tmp_path / "exported"
    flags = ("--seq-length", "1024", "--global-batch-size", "2", "--save-hf", str(out))
    report = rehearse("sft_2b", *flags, model=tiny, gpus_per_node=1)
    assert report.facts["without gradient"] == []
    assert list((out / "iter_0000002").glob("*.safetensors"))


def test_a_rank_that_is_sent_its_batches_is_refused(workbench: Workbench, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="choose the first rank of the group"):
        _tiny_rank(workbench, tmp_path, 1)


def test_a_later_stage_takes_patterns_that_select_nothing_of_it(
    workbench: Workbench, tmp_path: Path
) -> None:
    """The tower is on the first stage, which does not run and so cannot tell."""
    layout = ("--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "2")
    report = _tiny_rank(workbench, tmp_path, 1, *layout, "--freeze", "vision", "aligner")
    assert report.facts["without gradient"] == []


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_batches_wait_for_nothing_read_ahead_or_not(
    workers: int, workbench: Workbench, tmp_path: Path
) -> None:
    """Torch's loader pins what this rank reads, and copies run on a stream of their own."""
    flags = ("--num-workers", str(workers), "--train-iters", "3")
    report = _tiny_rank(workbench, tmp_path, 0, *flags)
    assert report.facts["batch"]["patches"] is not None
    syncs = [w for i in (2, 3) for w in report.interval(f"iteration {i}").host_syncs]
    assert [w for w in syncs if w.phase == FORWARD_BACKWARD or "data/sharing" in w.place] == []
    assert report.interval("iteration 3").counters["unknown_calls"] == 0


def test_losses_of_data_sets_stay_on_the_device_until_they_are_logged(
    workbench: Workbench, tmp_path: Path
) -> None:
    size = {"tokens": 120, "image_side": 8, "token_pixels": 8}
    parts = [str(write_half_images(tmp_path / name, 4, **size)) for name in ("a", "b")]

    def syncs(*data: str) -> list[int]:
        """Return the host syncs of an unlogged iteration, and of a logged one."""
        four = ("--micro-batch-size", "4", "--train-iters", "4", "--log-interval", "4")
        folder = tmp_path / str(len(data))
        report = _tiny_rank(workbench, folder, 0, *four, "--data-path", *data)
        assert report.facts["batch"]["tokens"] == (4, 128)
        stages = [report.interval(f"iteration {number}") for number in (3, 4)]
        return [sum(sync.count for sync in stage.host_syncs) for stage in stages]

    one, several = syncs(parts[0]), syncs("0.5", parts[0], "0.5", parts[1])
    assert several == [one[0], one[1] + 1]


def test_a_save_starts_no_process(workbench: Workbench, tmp_path: Path) -> None:
    """Megatron's own save starts one on each rank, which stays forever if its rank is killed."""
    save = tmp_path / "save"
    flags = _tiny_flags(tmp_path, "--tensor-model-parallel-size", "1", "--save", str(save))
    program = "tests.rehearsal.programs:processes_after_training"
    processes, _ = workbench.call(program, flags)
    assert list(save.rglob("*.distcp"))
    assert processes == []


def _tiny_rank(workbench: Workbench, tmp_path: Path, rank: int, *more: str) -> Report:
    program, flags = "mcore_qwen3vl.rehearsal.rank:main", _tiny_flags(tmp_path, *more)
    _, report = workbench.call(program, flags, rank=rank, world_size=2)
    return report


def _tiny_flags(tmp_path: Path, *more: str) -> list[str]:
    tiny = write_tiny_checkpoint(tmp_path / "tiny")
    data = write_half_images(tmp_path / "data", 2, tokens=120, image_side=8, token_pixels=8)
    return [
        "--spec", "torch", "--hf-model", str(tiny), "--data-path", str(data), "--lr", "1e-5",
        "--train-iters", "1", "--seq-length", "128", "--micro-batch-size", "1",
        "--tensor-model-parallel-size", "2", "--bf16", "--num-workers", "0", *more,
    ]  # fmt: skip
