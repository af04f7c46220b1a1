"""The modelled step time equals the same sums by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.rehearsal.step_time import Constants, Model, RankWork, StepTime
from mcore_qwen3vl.runtime.gpus import find_gpu
from mcore_qwen3vl.simulated_gpu.device import Interval, Traffic
from mcore_qwen3vl.simulated_gpu.rank import ONE_KEY

GPU = replace(find_gpu("h100"), tflops=1000.0, memory_tb_per_s=2.0, nvlink_gb_per_s=400.0)
PLAIN = Constants(
    gemm=0.5, attention=0.25, attention_keys=1000, memory=0.5, link=0.5, network_gb_per_s=40,
    launch_us=10, wait_us=30,
)  # fmt: skip
TP = Traffic("TENSOR_MODEL_PARALLEL_GROUP[4]", "all_gather", 2, 0, 4)
EP = Traffic("EXPERT_MODEL_PARALLEL_GROUP[16]", "all_to_all", 2, 0, 16)
DP = Traffic("DATA_PARALLEL_GROUP_WITH_CP[2]", "reduce_scatter", 1, 8 * 10**9, 9)
FORWARD = {"gemm": 1e14, "attention": 5e13, "bytes": 5e10, "launches": 10}
BACKWARD = {"gemm": 2e14, "attention": 1e14, "bytes": 1e11, "launches": 20}


def interval(*traffic: Traffic, **changes: Any) -> Interval:
    """Make an interval of two micro-batches and an optimizer that moves 1e10 bytes."""
    flops = {"gemm": int(6e14), "attention": int(3e14)}
    counters = {"launches": 60, "host_syncs": 0}
    made = Interval(
        "iteration 2", 1, 0, 0, 0, counters, [], list(traffic), flops, moved=int(3.1e11)
    )
    return replace(made, **changes)


def modelled(
    *flags: str,
    found: Interval | None = None,
    forward: dict[str, float] = FORWARD,
    stages: int = 1,
    constants: Constants = PLAIN,
    top: int = 8,
) -> StepTime:
    chunks = [{"forward": forward, "backward": BACKWARD}]
    rank = RankWork("rank", stages, chunks, found or interval(), 2, 16_000, 8e14)
    model = Model(GPU, constants, flags, top)
    return model.step([rank], micro_batches=6, group=0, gpus=4, dp=4)


def test_work_takes_what_the_gpu_needs() -> None:
    step = modelled()
    (role,) = step.roles
    assert role.seconds == pytest.approx(
        {"GEMM": 3.6, "attention": 3.6, "other kernels (memory)": 0.9}
        | {"optimizer and finalization": 0.01}
    )
    assert step.seconds == pytest.approx(8.11)
    assert step.tokens_per_s == pytest.approx(16_000 * 3 * 4 / 8.11)
    assert step.tflops == pytest.approx(800 * 3 / 8.11)
    assert step.mfu == pytest.approx(step.tflops / 1000)


def test_a_whole_training_takes_days_and_gpu_hours() -> None:
    step = replace(modelled(), seconds=10.0, tokens_per_s=50_000.0)
    whole = step.training(tokens=4.32e9, gpus=16)  # a day
    assert (whole.tokens, whole.steps, whole.days) == (4.32e9, pytest.approx(8640), 1.0)
    assert whole.gpu_hours == pytest.approx(24 * 16)
    assert str(whole).startswith(
        "4,320,000,000 tokens without padding: 8,640 steps, 1.00 days, 384 GPU-hours"
    )


def test_attention_is_slow_where_queries_have_few_keys() -> None:
    """At 1000 keys it takes twice as long as its FLOPs do, and at 500 three times."""
    forward = {**FORWARD, ONE_KEY: 5e13 / 500}
    spent = modelled(found=interval(one_key=2 * 10**11), forward=forward).roles[0].seconds
    assert spent["attention"] == pytest.approx(6 * (3 * 0.2 + 0.4))
    # A pass that runs before the micro-batches has its own.
    alone = interval(one_key=10**12, flops={"gemm": int(6e14), "attention": int(3e14)})
    before, after = (
        modelled(found=made).roles[0].seconds["optimizer and finalization"]
        for made in (interval(), alone)
    )
    assert after - before == pytest.approx(1000 * 1e12 / (0.25 * 1e15))


def test_the_host_counts_where_it_is_slower() -> None:
    forward = {**FORWARD, "launches": 1e5, "host_syncs": 1e3}  # a second, and 30 ms
    found = interval(counters={"launches": 200_040, "host_syncs": 2_000})
    spent = modelled(found=found, forward=forward).roles[0].seconds
    assert spent["host"] == pytest.approx(6 * (1 - 0.2 - 0.2 - 0.05 + 0.03))


def test_exchanges_by_link() -> None:
    forward = {**FORWARD, "TENSOR_MODEL_PARALLEL_GROUP[4]\nall_gather": 4e10}
    forward["EXPERT_MODEL_PARALLEL_GROUP[16]\nall_to_all"] = 1.6e10
    found = interval(replace(TP, size=8 * 10**10), replace(EP, size=32 * 10**9))
    spent = modelled(found=found, forward=forward).roles[0].seconds
    assert spent["TP exchange"] == pytest.approx(6 * 4e10 * 3 / 4 / 200e9)
    # Seven of the other fifteen ranks are on the same node.
    assert spent["EP exchange"] == pytest.approx(6 * 1e9 * (7 / 200e9 + 8 / 20e9))
    hidden = modelled("--tp-comm-overlap", found=found, forward=forward).roles[0].seconds
    assert hidden["TP exchange"] == pytest.approx(0.3 * spent["TP exchange"])


@pytest.mark.parametrize("operation", ["dispatch", "combine"])
def test_deepep_sends_a_token_once_to_each_node_and_gpu(operation: str) -> None:
    def seconds(ranks: int, top: int) -> float:
        group = f"EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP[{ranks}]"
        forward = {**FORWARD, f"{group}\n{operation}": 1e9}
        found = interval(Traffic(group, operation, 2, 2 * 10**9, ranks))
        return modelled(found=found, forward=forward, top=top).roles[0].seconds["EP exchange"] / 6

    # With one expert, a token has one of eight GPUs, and stays on its own in an eighth of cases.
    assert seconds(8, 1) == pytest.approx(1e9 * 7 / 8 / 200e9)
    assert seconds(8, 2) == pytest.approx(1e9 * 7 * (1 - (7 / 8) ** 2) / 200e9)
    # Over two nodes the network is slower than the eight links inside.
    assert seconds(16, 1) == pytest.approx(1e9 / 2 / 20e9)
    assert seconds(16, 8) == pytest.approx(1e9 * (1 - (1 / 2) ** 8) / 20e9)


def test_the_experts_exchange_hides_behind_another_micro_batch() -> None:
    key = "EXPERT_MODEL_PARALLEL_GROUP[16]\nall_to_all"
    exchange = 1e9 * (7 / 200e9 + 8 / 20e9)  # 0.435 s, and the other pass computes 0.9
    found = interval(replace(EP, size=32 * 10**9))
    flag = "--overlap-moe-expert-parallel-comm"
    spent = modelled(flag, found=found, forward={**FORWARD, key: 1.6e10}).roles[0].seconds
    # The first of six forwards runs alone.
    assert spent["EP exchange"] == pytest.approx(6 * exchange * (1 - 0.9 * 5 / 6))
    # What takes longer than the other pass computes stays.
    found = interval(replace(EP, size=320 * 10**9))
    spent = modelled(flag, found=found, forward={**FORWARD, key: 1.6e11}).roles[0].seconds
    assert spent["EP exchange"] == pytest.approx(6 * (10 * exchange - 0.9 * 5 / 6 * 0.9))


def test_the_data_parallel_exchange_hides_behind_a_micro_batch() -> None:
    exposed = modelled(found=interval(DP)).roles[0].seconds
    assert exposed["DP exchange"] == pytest.approx(4e9 / 20e9)
    assert (
        "DP exchange" not in modelled("--overlap-grad-reduce", found=interval(DP)).roles[0].seconds
    )


def test_stages_wait_for_each_other() -> None:
    step = modelled(stages=2)
    assert step.seconds == pytest.approx(7 * 1.35 + 0.01)
    assert step.roles[0].seconds["waiting for other stages"] == pytest.approx(1.35)
    assert sum(step.roles[0].seconds.values()) == pytest.approx(step.seconds)


def test_constants_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "constants.json"
    file.write_text('{"gemm": 1.0}')
    assert Constants.from_file(file) == Constants(gemm=1.0)
    for text, message in (
        ('{"gem": 1.0}', "gem is not one of gemm, "),
        ('{"gemm": 0}', "gemm is 0, not"),
        ('{"gemm": true}', "gemm is True, not"),
        ('{"gemm": 60}', "at most 1"),
        ("[1]", "no JSON object"),
        ("{", "cannot be read"),
    ):
        file.write_text(text)
        with pytest.raises(BadInput, match=f"--constants .*{message}"):
            Constants.from_file(file)
