"""A value that would end a run in a traceback is refused; a flag that needs another is named."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.training.arguments import values
from mcore_qwen3vl.training.arguments.command_line import CommandLine
from mcore_qwen3vl.training.arguments.megatron_flags import Sorting
from mcore_qwen3vl.training.arguments.parser import validate
from mcore_qwen3vl.training.arguments.settings import add_arguments
from mcore_qwen3vl.training.arguments.values import check_values
from mcore_qwen3vl.verification.curves import Job, train


@pytest.fixture(scope="module")
def flags() -> dict[str, str]:
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False, add_help=False))
    actions = add_arguments(parser)._actions
    return {action.dest: action.option_strings[0] for action in actions if action.option_strings}


def check(flags: dict[str, str], *, spec: str = "torch", cpu: bool = True, **given: Any) -> None:
    check_values(given, flags, spec=spec, cpu=cpu)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"save_dgrads_interval": 0}, "--save-dgrads-interval is 0; it is at least 1"),
        ({"log_interval": -1}, "--log-interval is -1; it is at least 1"),
        ({"iterations_to_skip": [3, 0]}, "--iterations-to-skip is 0; it is at least 1"),
        ({"distributed_timeout_seconds_after_init": 0}, "-after-init is 0; it is at least 1"),
        ({"vision_lr_mult": -0.5}, "--vision-lr-mult is -0.5; it is at least 0"),
        ({"weight_decay": float("nan")}, "--weight-decay is nan; it is at least 0"),
        ({"adam_beta1": 1.0}, "--adam-beta1 is 1.0; it is at least 0 and below 1"),
        ({"optimizer_offload_fraction": 1.5}, "it is from 0 to 1"),
        ({"video_fps": 0.0}, "--video-fps is 0.0; it is above 0"),
        ({"moe_input_jitter_eps": 0.0}, "--moe-input-jitter-eps is 0.0; it is above 0"),
        ({"override_ckpt_iteration": 0}, "--override-ckpt-iteration: it counts Megatron's own"),
        ({"lora_alpha": 0.0}, "--lora-alpha is 0.0; it is above 0"),
        ({"seed": 0}, "--seed is 0; it is from 1 to 4294901760"),
        ({"seed": 2**32}, "--seed is 4294967296; it is from 1 to 4294901760"),
        ({"exit_signal": signal.SIGKILL}, "--exit-signal SIGKILL: no process can catch it"),
        ({"dist_ckpt_strictness": "return_all"}, "returns besides the weights: use log_all"),
        ({"use_te_activation_func": True}, "--use-te-activation-func needs Transformer Engine"),
        ({"rerun_mode": "report_stats"}, "--rerun-mode report_stats: Megatron does not know"),
        ({"non_persistent_save_interval": 3}, "add --non-persistent-ckpt-type global"),
        ({"save_wgrads_interval": 1}, "--save-wgrads-interval is set without --save: add --save"),
        ({"tp_comm_overlap_cfg": "gone"}, "--tp-comm-overlap-cfg: there is no file gone"),
        (
            {"use_pytorch_profiler": True},
            "set without --tensorboard-dir: add --tensorboard-dir DIR",
        ),
        ({"profile": True}, "--profile with --cpu: add --use-pytorch-profiler"),
        ({"run_workload_inspector_server": True}, "needs the Python module workload_inspector"),
        ({"hierarchical_context_parallel_sizes": [1]}, "needs the Python module einops"),
        ({"use_ring_exchange_p2p": True}, "which no torch has: leave it out"),
        ({"exit_signal_handler_for_training": True}, "ends the run without a checkpoint"),
        (
            {"init_method_xavier_uniform": True},
            "--init-method-xavier-uniform: Megatron sets a field",
        ),
        ({"test_mode": True}, "--test-mode: Megatron's tests read a bias .*: leave it out"),
        ({"use_sharp": True}, "--use-sharp needs GPUs: leave it out with --cpu"),
        (
            {"pipeline_model_parallel_comm_backend": "nccl"},
            "--pipeline-model-parallel-comm-backend needs GPUs: leave it out with --cpu",
        ),
        ({"use_precision_aware_optimizer": True}, "needs Transformer Engine, .*: leave it out"),
        ({"batch_invariant_mode": True, "cpu": False}, ": use --spec te, or leave it out"),
    ],
)
def test_a_value_that_a_flag_cannot_have_is_refused(
    flags: dict[str, str], wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        check(flags, **wrong)


def test_values_at_the_border_are_taken(flags: dict[str, str]) -> None:
    check(flags, log_interval=1, iterations_to_skip=[1], vision_lr_mult=0.0, adam_beta1=0.0)
    check(flags, optimizer_offload_fraction=1.0, exit_signal=signal.SIGTERM, use_sharp=False)
    check(flags, spec="te", cpu=False, batch_invariant_mode=True, use_sharp=True)
    check(flags, save_interval=None)
    check(flags, non_persistent_save_interval=3, non_persistent_ckpt_type="local")


def test_every_flag_with_a_rule_exists(flags: dict[str, str]) -> None:
    ruled = {*values._RULES, *values._NEEDS_TE, *values._NEEDS_GPU, *values._NEEDS_OTHER}
    ruled |= {*values._FILES, *values._NEEDS_MODULE}
    assert ruled - flags.keys() == set()


def test_the_command_line_is_checked(dense: Path) -> None:
    argv = ["--cpu", "--hf-model", str(dense), "--data-path", "a", "--train-iters", "3"]
    with pytest.raises(BadInput, match=r"--adam-beta2 is 1\.5; it is at least 0"):
        validate([*argv, "--adam-beta2", "1.5"], 1)


def test_what_a_config_of_megatrons_refuses_is_no_traceback(
    dense: Path, data: Path, tmp_path: Path
) -> None:
    """Its configs are made of the flags when the run has begun."""
    job = Job(dense, data, steps=1, flags=("--overlap-p2p-communication-warmup-flush",))
    with pytest.raises(BadInput, match="Megatron refuses this model's settings: Pipeline par"):
        train(job, tmp_path)


@pytest.mark.parametrize(
    ("alone", "other"),
    [
        ("--fp8-margin 3", "--fp8-format e4m3"),
        ("--sgd-momentum 0.5", "--optimizer=sgd"),
        ("--muon-momentum=0.5", "--optimizer adaptive_muon"),
        ("--log-timers-to-tensorboard", "--tensorboard-dir tb"),
        ("--cross-entropy-loss-fusion", "--head-chunk 0"),
    ],
)
def test_a_flag_that_acts_with_another_is_named_without_it(alone: str, other: str) -> None:
    overridden = ["--optimizer", "sgd", "--optimizer", "adam"]
    (unused,) = CommandLine([*overridden, *alone.split()]).unused()
    assert unused.name == alone.partition(" ")[0].partition("=")[0]
    assert "it acts with --" in (unused.why or "")
    assert not CommandLine([*other.split(), *alone.split()]).unused()


def test_a_flag_may_act_with_what_is_the_default_on_gpus() -> None:
    flags = ["--attention-backend", "flash", "--grad-reduce-in-bf16"]
    assert not CommandLine(flags).unused()
    assert [item.name for item in CommandLine([*flags, "--cpu"]).unused()] == flags[::2]
    assert [item.name for item in CommandLine([*flags, "--fp32"]).unused()] == flags[2:]
    assert [item.name for item in CommandLine([*flags, "--spec", "torch"]).unused()] == flags[:1]


def test_what_a_flag_acts_with_reaches_the_run() -> None:
    sorting = Sorting.for_installed()
    named = (words for line in sorting.acts_with.values() for words in line.split(" or "))
    others = {words.split()[0] for words in named}
    assert others - sorting.reaching <= {"--no-chunked-head", "--head-chunk"}
