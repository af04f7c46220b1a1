"""--fit lists candidates, orders them by a model, and measures until three fit."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model import flops
from mcore_qwen3vl.published_configs import PUBLISHED
from mcore_qwen3vl.rehearsal import search as search_module
from mcore_qwen3vl.rehearsal.command import Command, read_command
from mcore_qwen3vl.rehearsal.holders import BACKWARD, FORWARD
from mcore_qwen3vl.rehearsal.pipeline import Durations, model_pipeline
from mcore_qwen3vl.rehearsal.rehearse import Options
from mcore_qwen3vl.rehearsal.search import (
    ESTIMATE_OFF,
    FULL_RECOMPUTE,
    candidates,
    modelled_work,
    step_seconds,
)
from mcore_qwen3vl.rehearsal.step_time import Constants
from mcore_qwen3vl.runtime.gpus import GPUS
from mcore_qwen3vl.tiny import tiny_config
from mcore_qwen3vl.training.parameter_counts import rank_parameters
from tests.command import exit_code
from tests.launch.test_scripts import final_command
from tests.rehearsal.conftest import Command as RunCommand
from tests.turns import slow

H100 = GPUS["h100-80gb"]
DENSE = Architecture.from_hf(PUBLISHED / "8b.json")
MODEL = ("--hf-model", str(PUBLISHED / "8b.json"))
HYBRID = Architecture.from_hf(PUBLISHED / "qwen3.5_9b.json")
IDEAL = Constants(gemm=0.5, attention=0.5, link=1)
SCRIPT = Path(__file__).parents[2] / "launch" / "sft_30b_a3b.sh"


def seconds(*flags: str, gpus: int = 1, batch: int = 4) -> float:
    """Return the modelled seconds of a step of packs whose samples have 512 tokens."""
    size = (*MODEL, "--seq-length", "8192", "--packing", "--global-batch-size", str(batch))
    return step_seconds(Command((*size, *flags), gpus), DENSE, H100, IDEAL)


def sized(**sizes: int) -> tuple[str, ...]:
    return tuple(Layout(**sizes, sp="tp" in sizes).flags(moe=False))


def test_one_gpu_computes_at_half_of_its_peak() -> None:
    patches = 4096 * 4
    work = flops.language(DENSE, 8192, 8192 * 512) + flops.vision(DENSE, patches, patches * 1024)
    # Attention over samples of 512 tokens, in which a token has 256 keys on average.
    work += IDEAL.attention_keys / 256 * flops.language(DENSE, 0, 8192 * 512)
    expected = 4 * work / (0.5 * 989e12)
    assert seconds() == pytest.approx(expected)
    recomputed = seconds("--recompute-granularity", "full")
    assert recomputed == pytest.approx(expected * 4 / 3)


def test_what_layouts_cost() -> None:
    alone = seconds()
    # TP 2 halves the work and adds ten exchanges of half the hidden states in each layer.
    hidden, keys = 36 * 8192 * 4096 * 2, 36 * 8192 * 2 * 1024 * 2
    moved = 10 * hidden / 2 / 450e9
    assert seconds(*sized(tp=2), gpus=2) == pytest.approx(alone / 2 + 4 * moved)
    # CP exchanges keys and values; beside TP 8 its ranks are on two nodes.
    moved = 2 * keys / 2 / 450e9
    assert seconds(*sized(cp=2), gpus=2) == pytest.approx(alone / 2 + 4 * moved + reduced(2))
    moved = 10 * hidden / 2 * 7 / 8 / 450e9 + 2 * keys / 8 / 2 / 50e9
    expected = alone / 16 + 4 * moved + reduced(2, tp=8)
    assert seconds(*sized(tp=8, cp=2), gpus=16) == pytest.approx(expected)
    assert seconds(gpus=2, batch=8) == pytest.approx(alone + reduced(2))
    # A pipeline waits; more micro-batches hide it.
    few, many = (seconds(*sized(pp=4), gpus=4, batch=n) for n in (4, 64))
    assert few > alone / 4 * 1.5
    assert many / 64 < few / 4


def test_a_gated_delta_net_sends_tokens_to_the_ranks_of_their_heads() -> None:
    """Two all-to-alls of projected values take the place of keys and values that are gathered."""
    (alone, _), (both, _) = (cp_exchange(a, Layout(cp=2)) for a in (DENSE, HYBRID))
    assert alone == {"all_gather": 36 * 8192 * 2 * 1024 * 2, "all_to_all": 0}
    # Of 32 layers, 8 have attention with 4 key/value heads of 256. The others have 16 key heads and
    # 32 value heads of 128: query and key; value, gate and output; beta and the decay.
    to_heads = 24 * 4096 * (2 * 2048 + 3 * 4096 + 2 * 32) * 2
    assert both == {"all_gather": 8 * 8192 * 2 * 1024 * 2, "all_to_all": to_heads}
    divided, twice = cp_exchange(HYBRID, Layout(tp=2, pp=2, cp=2, sp=True))
    assert divided == {operation: size / 4 for operation, size in both.items()}
    assert twice == divided  # the gradients take the same way


def cp_exchange(a: Architecture, layout: Layout) -> list[dict[str, float]]:
    """Return the bytes that a CP rank is to exchange forward and backward, by operation."""
    size = (*MODEL, "--seq-length", "8192", "--packing", "--global-batch-size", "4")
    command = Command((*size, *layout.flags(moe=a.is_moe)), layout.world_size)
    work = modelled_work(command, a)[0].chunks[0]
    return [
        {operation: work[direction][f"CONTEXT_PARALLEL_GROUP[{layout.cp}]\n{operation}"]
         for operation in ("all_gather", "all_to_all")}
        for direction in (FORWARD, BACKWARD)
    ]  # fmt: skip


def reduced(ranks: int, tp: int = 1) -> float:
    """Return the seconds in which gradients in fp32 and weights in bf16 are exchanged."""
    (count, _), speed = rank_parameters(DENSE, Layout(tp=tp), 0), 450e9 if tp == 1 else 50e9
    return (4 + 2) * count * (ranks - 1) / ranks / speed


def test_the_pipeline_s_bubble_is_that_of_the_schedule() -> None:
    """With equal stages it is (p - 1) / (m v) of the work; the slowest stage sets the pace."""
    even = model_pipeline([[Durations(1, 2)]] * 4, 12)
    assert (even.imbalance, even.flops) == (1, [3] * 4)
    assert even.bubble == pytest.approx(1 - 12 / 15)
    virtual = [[Durations(1, 2)] * 3] * 4
    assert model_pipeline(virtual, 12).bubble == pytest.approx(1 - 12 / 13)
    uneven = model_pipeline([[Durations(1, 2)], [Durations(3, 1)]], 2)
    assert uneven.imbalance == pytest.approx(4 / 3.5)
    assert uneven.bubble == pytest.approx(1 - 7 / 11)


def test_candidates_replace_the_layout_and_nothing_else() -> None:
    command = read_command([str(SCRIPT), "--global-batch-size", "32"], 16)
    a = Architecture.from_hf(PUBLISHED / "30b_a3b.json")
    found = list(candidates(command, a, H100, IDEAL))
    layouts = {str(c.command.layout) for c in found}
    assert {"tp2xep8xdp8+sp", "tp4xpp4xep4+sp", "ep8xcp2xdp8"} <= layouts
    assert all(c.command.layout.world_size == 16 for c in found)
    assert all(c.command.layout.ep <= 8 and c.command.layout.tp <= 8 for c in found)
    (requested,) = (candidate for candidate in found if candidate.is_requested)
    assert requested.command == command
    assert [c.command.layout for c in found].count(command.layout) == 2  # one recomputes
    for candidate in set(found) - {requested}:
        assert candidate.command.value("--global-batch-size") == "32"
        assert candidate.command.value("--expert-tensor-parallel-size") == "1"
        recomputes = candidate.command.value("--recompute-granularity") == "full"
        assert recomputes == ("full" in candidate.flags)


@pytest.mark.parametrize(
    ("name", "nodes"), [*slow(("8b", 1)), ("30b_a3b", 2), *slow(("235b_a22b", 4))]
)
def test_each_row_can_be_appended_to_the_script(name: str, nodes: int) -> None:
    """A row undoes what the script sets and the row does not have."""
    script, gpus = SCRIPT.with_name(f"sft_{name}.sh"), 8 * nodes
    a = Architecture.from_hf(PUBLISHED / f"{name}.json")
    rows = list(candidates(read_command([str(script)], gpus), a, H100, IDEAL))
    assert len(rows) > 20
    for row in rows[:: len(rows) // 20]:
        words = final_command(script, *row.flags, NODES=str(nodes))
        model = ("--hf-model", str(PUBLISHED / f"{name}.json"))
        started = Command((*model, *words[words.index("--bf16") :]), gpus)
        assert started.layout == row.command.layout
        for flag in ("granularity", "method", "num-layers"):
            flag = f"--recompute-{flag}"
            assert started.value(flag) == row.command.value(flag)


def test_what_context_and_nccl_take_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is more under TP x CP than under DP, and each layout has what is left of its own GPU."""
    flags = ("--hf-model", str(PUBLISHED / "8b.json"), *sized(tp=2, cp=2))
    command, options = Command(flags, 8), Options(gpu=H100)
    most = ESTIMATE_OFF * options.device(command).usable
    stage = SimpleNamespace(total=most)
    monkeypatch.setattr(search_module, "memory_of_stages", lambda *args: [stage])
    tried: list[Layout] = []

    def rehearse(candidate: Command, **_: Any) -> Any:
        tried.append(candidate.layout)
        return SimpleNamespace(fits=False, outcomes=[], step=None)

    rehearser: Any = SimpleNamespace(options=options, rehearse=rehearse)
    monkeypatch.setattr(search_module, "TRIED", 1000)
    search_module.search(rehearser, command, DENSE)
    assert Layout(tp=4, cp=2, sp=True) in tried  # with as many groups as the run's own
    stage.total = most * 1.0001
    tried.clear()
    search_module.search(rehearser, command, DENSE)
    assert tried  # under DP alone there is more
    assert not any(layout.tp > 1 and layout.cp > 1 for layout in tried if layout != command.layout)


def test_a_gpu_smaller_than_its_context_takes_no_layout() -> None:
    command = Command(("--hf-model", str(PUBLISHED / "8b.json")), 8)
    rehearser: Any = SimpleNamespace(options=Options(gpu=H100, memory_gib=0.5))
    with pytest.raises(BadInput, match=r"No layout of this model fits on 8 GPUs"):
        search_module.search(rehearser, command, DENSE)


@pytest.mark.parametrize(
    ("model", "routing", "twice"),
    [("30b_a3b", "uniform", True), ("30b_a3b", "skewed", False), ("8b", "uniform", False)],
)
def test_a_layout_of_experts_has_to_fit_with_skewed_routing_too(
    model: str, routing: Any, twice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = Command(("--hf-model", str(PUBLISHED / f"{model}.json")), 16)
    monkeypatch.setattr(search_module, "memory_of_stages", lambda *a: [SimpleNamespace(total=0)])
    tried: list[tuple[str, str | None]] = []

    def rehearse(candidate: Command, *, routing: str | None = None, **_: Any) -> Any:
        tried.append((str(candidate.layout), routing))
        fits = routing is None or len(tried) > 2  # the first layout runs out of memory when skewed
        step = SimpleNamespace(seconds=float(len(tried)))
        words = "fits" if fits else "does not fit: first runs out of memory"
        return SimpleNamespace(fits=fits, outcomes=[], step=step, verdict=words)

    rehearser: Any = SimpleNamespace(options=Options(H100, routing=routing), rehearse=rehearse)
    found = search_module.search(rehearser, command, command.line.architecture)
    good = [fit for fit in found if fit.good]
    assert len(good) >= search_module.WANTED
    assert [how for _, how in tried[:4]] == ([None, "skewed"] * 2 if twice else [None] * 4)
    if twice:
        assert tried[0][0] == tried[1][0]
        (first,) = (fit for fit in found if not fit.good)
        assert str(first.candidate.command.layout) == tried[0][0]
        assert first.verdict == "does not fit: first runs out of memory with --routing skewed"
        assert all(fit.skewed is not None for fit in good)


def test_a_run_that_takes_no_layout() -> None:
    assert (
        list(candidates(Command(("--hf-model", str(PUBLISHED / "8b.json")), 3), DENSE, H100, IDEAL))
        != []
    )


def test_a_page_of_one_rehearsal_is_refused_for_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert exit_code("rehearse", "--fit", "--gpus", "8", "--report", page, SCRIPT) == 2
    assert "--report writes a page about one" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [(), FULL_RECOMPUTE], ids=["kept", "recomputed"])
def test_context_parallel_ranks_exchange_what_the_search_expects(
    recompute: tuple[str, ...], command: RunCommand, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(family="qwen3.5")))
    flags = (
        *("--packing", "--seq-length", "512", "--global-batch-size", "1", "--bf16", "--lr", "1e-5"),
        *("--spec", "torch", "--context-parallel-size", "2", *recompute),
    )
    run = Command(("--hf-model", str(tmp_path), *flags), 2)
    (work,) = modelled_work(run, run.line.architecture)[0].chunks
    code, found = command("--gpus", 2, *run.flags)
    assert code == 0
    counted = {f"{t['group']}\n{t['operation']}": t["size"] for t in found["roles"][0]["traffic"]}
    group = "CONTEXT_PARALLEL_GROUP[2]"
    for operations in (["all_to_all"], ["all_gather", "reduce_scatter"]):
        expected, exchanged = (
            sum(one.get(f"{group}\n{operation}", 0) for one in each for operation in operations)
            for each in ([work[FORWARD], work[BACKWARD]], [counted])
        )
        assert exchanged == pytest.approx(expected, rel=0.01)


@pytest.mark.slow  # several rehearsals
def test_three_layouts_that_fit(command: RunCommand, config: Path) -> None:
    flags = ("--packing", "--seq-length", 512, "--global-batch-size", 4, "--bf16", "--lr", "1e-5")
    code, found = command("--fit", "--tokens", "1e9", "--gpus", 2, "--hf-model", config, *flags)
    assert code == 0
    for one in found:
        whole, step = one["training (modelled)"], one["seconds a step (modelled)"]
        assert whole["days"] == pytest.approx(whole["steps"] * step / 86_400)
        assert whole["gpu_hours"] == pytest.approx(2 * 24 * whole["days"])
    assert [one["fits"] for one in found].count(True) == 3
    seconds = [one["seconds a step (modelled)"] for one in found if one["fits"]]
    assert seconds == sorted(seconds)
    assert found[0]["fits"]
    code, found = command(
        "--fit", "--gpus", 2, "--memory-gib", 0.04, "--allowance-gib", 0, "--hf-model", config,
        *flags,
    )  # fmt: skip
    assert (code, any(one["fits"] for one in found)) == (1, False)
