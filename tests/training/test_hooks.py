"""Our changes to Megatron's loop besides our own steps: signals, statistics, NaN checks."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcore_qwen3vl.files import package_modules
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime import cpu
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from mcore_qwen3vl.training import hooks
from mcore_qwen3vl.training.folders import log_file
from mcore_qwen3vl.training.hooks import (
    AsyncHostCopy,
    NormCheck,
    Signals,
    Stats,
    success_of_all,
)
from mcore_qwen3vl.training.step import HOOKS
from mcore_qwen3vl.verification.curves import LEARNING_RATE, Job, curve_of, train, worst_difference
from tests.training.log import entries_of
from tests.training.megatron_symbols import differences, read_table

MEGATRON = re.compile(r"megatron\.(core|training|energon)\b")


@pytest.mark.parametrize("name", HOOKS)
def test_canary_every_wrapped_function_exists_and_is_called_there(name: str) -> None:
    """Where a module only defines a function, a run would go on with Megatron's own."""
    module = import_module(HOOKS[name])
    assert callable(getattr(module, name))
    source = Path(module.__file__ or "").read_text()
    late = f"        from {HOOKS[name]} import {name}\n"  # looked up when it is called
    users = Path(import_module("megatron.training.initialize").__file__ or "").read_text()
    assert re.search(rf"(?<!def )\b{name}\(", source) or late in users


def test_canary_every_symbol_that_we_use_by_name_has_the_signature_we_were_tested_with() -> None:
    """With another Megatron first on PYTHONPATH, this names each symbol that has changed."""
    assert differences(read_table()) == []


def test_canary_every_name_of_megatron_that_we_import_exists() -> None:
    """Many are imported in functions, so that only a run of each would miss one that is gone."""
    missing = []
    for file in package_modules().values():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not MEGATRON.match(node.module or ""):
                continue
            for name in (alias.name for alias in node.names):
                try:
                    exec(f"from {node.module} import {name}", {})
                except ModuleNotFoundError as error:
                    missing.append(f"{file.name}:{node.lineno}: {error}")
                except ImportError as error:
                    source = Path(import_module(node.module or "").__file__ or "").read_text()
                    if not re.search(rf"^ +def {name}\(", source, re.MULTILINE):  # if TE is there
                        missing.append(f"{file.name}:{node.lineno}: {error}")
    assert missing == []


def test_the_canary_knows_every_symbol_that_is_wrapped_or_replaced_on_the_cpu() -> None:
    used = {f"{module}.{name}" for name, module in HOOKS.items()}
    used |= {f"{module}.{name}" for module, name in cpu.originals if module.startswith("megatron")}
    assert used - set(read_table()) == set()


def test_the_canary_names_a_changed_and_a_lost_symbol(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.training import training

    table = {s: args for s, args in read_table().items() if s.startswith(training.__name__)}
    monkeypatch.setattr(training, "get_optimizer_param_scheduler", lambda optimizer, args: None)
    monkeypatch.delattr(training, "evaluate")
    changed, lost = differences(table)
    name = "megatron.training.training.get_optimizer_param_scheduler"
    assert changed == f"{name} takes (optimizer, args), and not (optimizer)"
    assert lost.startswith("megatron.training.training.evaluate is gone; it was evaluate(forward_")


def _signals() -> tuple[list[int], list[int]]:
    from megatron.training import dist_signal_handler

    here, signals = int(dist.get_rank() == 1), Signals()
    assert signals.gather_late(None, here, dtype=torch.int32) == [0, 0, 0]
    return signals.gather_late(None, 0, dtype=torch.int32), dist_signal_handler.all_gather_item(
        here, dtype=torch.int32
    )


def test_a_signal_of_one_rank_reaches_all_a_step_later_as_megatrons_own_gather_tells_it() -> None:
    for ours, megatrons in run_layout(_signals, 3):
        assert ours == megatrons == [0, 1, 0]


def _stats(norms: list[float | None], rates: list[float | None]) -> list[Any]:
    initialize(Layout.parse("pp3"))
    rank, stats = dist.get_rank(), Stats()
    norm = norms[rank]
    own = None if norm is None else torch.tensor([norm])
    return [
        value if value is None else float(value)
        for value in (stats.maximum(None, own), stats.maximum(None, rates[rank]))
    ]


def test_every_rank_knows_norm_and_rate_if_any_has_them() -> None:
    assert run_layout(_stats, 3, [2.0, 2.0, 2.0], [0.5, 0.5, 0.5]) == [[2.0, 0.5]] * 3
    assert run_layout(_stats, 3, [None, 2.0, None], [None, 0.5, None]) == [[2.0, 0.5]] * 3
    assert run_layout(_stats, 3, [None] * 3, [None] * 3) == [[None, None]] * 3


def test_only_a_loss_scaler_asks_the_other_ranks_whether_a_step_was_taken() -> None:
    assert success_of_all(None, True, fp16=False)
    assert not success_of_all(lambda success, group: False, True, fp16=True)


_LATE = "--no-check-for-nan-in-loss-and-grad"  # as the launch scripts run


@pytest.mark.parametrize(("log_interval", "flags"), [("1", ()), ("1", (_LATE,)), ("50", (_LATE,))])
def test_a_poisoned_step_is_not_saved_and_its_records_are_named(
    dense: Path, data: Path, tmp_path: Path, log_interval: str, flags: tuple[str, ...]
) -> None:
    """The same happens with and without Megatron's check of every bucket."""
    from mcore_qwen3vl.runtime.launch import RanksFailed

    job = Job(dense, data, steps=2, flags=("--lr", "1e30", *flags))
    save = tmp_path / "save"
    intervals = ("--save-interval", "100", "--log-interval", log_interval)
    said = r"In step 2 the loss is NaN or infinite, on \S+\.jsonl:\d+, "
    with pytest.raises(RanksFailed, match=said):
        train(job, tmp_path / "run", "--save", str(save), *intervals)
    assert not (save / "latest_checkpointed_iteration.txt").exists()


def test_the_records_of_a_step_are_left_out(dense: Path, data: Path, tmp_path: Path) -> None:
    """Three steps of an untrained model: the third sees the same records with and without."""
    job = Job(dense, data, steps=3, flags=("--lr", "0"))
    whole = train(job, tmp_path / "whole")
    skipping = train(job, tmp_path / "skipping", "--iterations-to-skip", "2")
    assert [entry["iteration"] for entry in skipping] == [1, 3]
    assert [entry["lm loss"] for entry in skipping] == [whole[at]["lm loss"] for at in (0, 2)]


def test_what_is_due_after_a_step_that_is_left_out_is_done(
    dense: Path, data: Path, tmp_path: Path
) -> None:
    """Steps 2 and 4 are left out, after which all is due; of the others only step 3 is logged."""
    save, exports = tmp_path / "save", tmp_path / "exports"
    job = Job(
        dense, data, Layout.parse("pp2"), steps=4, flags=(
            "--save", str(save), "--save-interval", "2", "--save-hf", str(exports),
            "--save-hf-interval", "2", "--valid-data-path", str(data), "--eval-iters", "1",
            "--eval-interval", "2", "--iterations-to-skip", "2", "4", "--log-interval", "2"),
    )  # fmt: skip
    log = train(job, tmp_path / "run")
    assert [entry["iteration"] for entry in log] == [3]
    validated = [entry["iteration"] for entry in entries_of(tmp_path / "run") if entry not in log]
    assert validated == [2, 4]
    for step in (2, 4):
        assert (save / f"iter_{step:07d}" / ".metadata").exists()
        assert (exports / f"iter_{step:07d}" / "model.safetensors").exists()
    lines = (tmp_path / "run" / "output.txt").read_text().splitlines()
    left_out = [line for line in lines if "left out" in line]
    assert left_out == [f"step {n}: left out (--iterations-to-skip)" for n in (2, 4)]
    assert lines[-1].startswith("done: step 4, ")
    megatrons = log_file(save, 1).read_text()
    assert "skipped samples:            8" in megatrons
    assert train(job, tmp_path / "again") == []
    said = (tmp_path / "again" / "output.txt").read_text()
    assert f"nothing left to do: {save} has all of its steps" in said


def test_the_last_step_of_a_run_is_logged(dense: Path, data: Path, tmp_path: Path) -> None:
    rarely = ("--log-interval", "3")
    job = Job(dense, data, steps=4, batch=1, flags=(*rarely, "--save", str(tmp_path / "save")))
    stopped = train(job, tmp_path / "stopped", "--exit-interval", "2")
    assert [entry["iteration"] for entry in stopped] == [2]
    assert [entry["iteration"] for entry in train(job, tmp_path / "on")] == [3, 4]


def test_a_run_that_only_validates_says_so(dense: Path, data: Path, tmp_path: Path) -> None:
    valid = ("--valid-data-path", str(data), "--eval-iters", "1")
    job = Job(dense, data, steps=4, flags=("--skip-train", *valid))
    train(job, tmp_path)
    last = (tmp_path / "output.txt").read_text().splitlines()[-1]
    assert last.startswith("done: validated, 0:00:")


def test_batches_padded_to_their_longest_sample_cross_pipeline_stages(
    dense: Path, data: Path, tmp_path: Path
) -> None:
    """Stages that transfer --seq-length tokens would fail or hang on a shorter batch."""
    flags = ("--pad-to-longest",)
    alone = train(Job(dense, data, steps=2, flags=flags), tmp_path / "alone")
    # The first stage has all DeepStack layers; otherwise lengths vary in any case.
    split = (*flags, "--decoder-first-pipeline-num-layers", "3")
    staged = Job(dense, data, Layout.parse("pp2"), steps=2, flags=split)
    found = worst_difference(curve_of(train(staged, tmp_path / "pp2", timeout=60)), curve_of(alone))
    assert found.loss < 1e-4
    assert found.grad_norm < 1e-4


def test_numbers_arrive_as_they_were() -> None:
    assert AsyncHostCopy(torch.tensor([3, 5], dtype=torch.int32)).wait() == [3, 5]


@pytest.mark.parametrize("norm", [float("nan"), float("inf"), torch.tensor([float("nan")])])
def test_a_norm_that_is_no_number_stops_the_run_at_the_next_step_or_save(
    norm: float | torch.Tensor,
) -> None:
    for settle in (True, False):
        check = NormCheck(lambda step: FloatingPointError(f"step {step}"))
        for iteration, fine in enumerate((None, 0.0, torch.tensor(1e9), 2.0), start=3):
            check.add(fine, iteration)
        check.add(norm, 7)
        with pytest.raises(FloatingPointError, match="step 7"):
            check.settle() if settle else check.add(1.0, 8)


def test_steps_that_the_loss_scaler_skips_are_counted_and_said(
    dense: Path, data: Path, tmp_path: Path
) -> None:
    steps = 8
    flags = ("--fp16", "--initial-loss-scale", str(2.0**15), "--hysteresis", "1")
    schedule = ("--lr-decay-style", "linear", "--min-lr", "0")
    log = train(Job(dense, data, Layout(), steps=steps, batch=1), tmp_path, *flags, *schedule)
    skipped = [entry["skipped steps"] for entry in log]
    assert 0 < sum(skipped) < steps
    assert [entry["grad norm"] is None for entry in log] == [bool(skip) for skip in skipped]
    taken = 0
    for entry, skip in zip(log, skipped, strict=True):
        taken += not skip
        assert entry["learning rate"] == pytest.approx(LEARNING_RATE * (1 - taken / steps))
    said = (tmp_path / "output.txt").read_text()
    assert f"{sum(skipped)} of {steps} steps were skipped" in said
    assert "loss-scale below 32768" in said


SIZES = {"whole": (5, 7), "cut": (6, 3), "norm": (11,), "mean": (4,), "last": (9, 2)}
MARKS = {
    "whole": "sequence_parallel",
    "norm": "sequence_parallel",
    "mean": "average_gradients_across_tp_domain",
    "last": "sequence_parallel",
}


def chunk() -> Any:
    """Make a model chunk like one that DDP wraps, with this rank's gradients."""
    rank = torch.distributed.get_rank()
    module = nn.ParameterDict({name: torch.zeros(size) for name, size in SIZES.items()})
    for number, (name, parameter) in enumerate(module.items()):
        made = torch.Generator().manual_seed(10 * rank + number)
        parameter.main_grad = torch.randn(parameter.shape, generator=made)
        if name in MARKS:
            setattr(parameter, MARKS[name], True)
    module.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
    return module


def on_rank(piece: int) -> tuple[list[Tensor], list[Tensor], int]:
    """Return gradients reduced by mcore at once, those reduced in pieces, and the piece count."""
    from importlib import import_module

    initialize(Layout(tp=2, sp=True))
    module = import_module("megatron.core.distributed.finalize_model_grads")
    original = module._allreduce_non_tensor_model_parallel_grads
    config = SimpleNamespace(sequence_parallel=True, qk_layernorm=True)
    calls = 0

    def counted(model: Any, *args: Any) -> None:
        nonlocal calls
        calls += 1
        original(model, *args)

    hooks.PIECE = piece
    at_once, in_pieces = chunk(), chunk()
    original([at_once], config, None)
    hooks.reduce_in_pieces(counted, [in_pieces], config, None)
    return [p.main_grad for p in at_once.values()], [p.main_grad for p in in_pieces.values()], calls


@pytest.mark.parametrize(("piece", "calls"), [(46, 2), (20, 3), (1000, 1)])
def test_pieces_add_up_to_what_mcore_reduces_at_once(piece: int, calls: int) -> None:
    for expected, found, made in run_layout(on_rank, 2, piece):
        assert made == calls
        for name, want, got in zip(SIZES, expected, found, strict=True):
            assert torch.equal(want, got), name
