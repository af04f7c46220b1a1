"""Values of single flags with which a run would end in a traceback, or go up its loss.

Megatron's own validation checks few of its numbers. The others reach a division by zero, or the
constructor of an optimizer, minutes after the start.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mcore_qwen3vl.data.config import MEDIA_BUDGETS
from mcore_qwen3vl.errors import BadInput

_INTERVALS = (
    "check_weight_hash_across_dp_replicas_interval",
    *("gpu_sniff_test_interval", "log_interval", "log_memory_interval"),
    *("non_persistent_save_interval", "save_interval", "save_retain_interval", "save_hf_interval"),
    *("save_activations_interval", "save_dgrads_interval", "save_params_interval"),
    *("save_tokens_per_expert_interval", "save_wgrads_interval"),
    *("tensorboard_log_interval", "tensorboard_queue_size"),
    *("exit_interval", "exit_duration_in_mins"),
)
_SIZES = (
    *("micro_batch_size", "global_batch_size", "eval_global_batch_size", "seq_length"),
    "eval_micro_batch_size",
    *("train_iters", "train_samples", "num_epochs", "expert_tensor_parallel_size"),
    *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
    *("microbatch_group_size_per_vp_stage", "num_distributed_optimizer_instances"),
    *("ddp_num_buckets", "dist_ckpt_workers", "distributed_timeout_minutes", "packing_buffer"),
    "distributed_timeout_seconds_after_init",
    *("make_vocab_size_divisible_by", "shuffle_buffer", "loss_scale_window", "hysteresis"),
    *(budget for budget in MEDIA_BUDGETS if budget != "video_fps"),  # may be a fraction
    "flight_recorder_trace_buffer_size",
    *("iterations_to_skip", "profile_step_end", "muon_num_ns_steps", "straggler_minmax_count"),
)
_NOT_NEGATIVE = (
    *("eval_interval", "start_eval_at_iter"),
    *(
        "train_sync_interval",
        "manual_gc_interval",
        "num_workers",
        "ckpt_step",
        "profile_step_start",
    ),
    *("lr", "decoupled_lr", "decoupled_min_lr", "vision_lr_mult", "aligner_lr_mult"),
    *("weight_decay", "clip_grad", "adam_eps", "init_method_std", "embedding_init_method_std"),
    *("mtp_loss_scaling_factor", "bad_fraction_floor", "max_sample_seconds", "loss_scale"),
    *("min_loss_scale", "initial_loss_scale", "head_chunk", "wgrad_deferral_limit", "peak_tflops"),
    *("cpu_offloading_num_layers", "moe_z_loss_coeff"),
)
_BELOW_ONE = (
    *("adam_beta1", "adam_beta2", "lion_beta1", "lion_beta2", "sgd_momentum", "muon_momentum"),
    *("hidden_dropout", "attention_dropout"),
)
_POSITIVE = ("video_fps", "moe_input_jitter_eps", "lora_alpha")
_SHARES = ("activation_offload_fraction", "optimizer_offload_fraction")

_MOST_SEED = 2**32 - 2**16
"""Numpy takes seeds below 2**32, and pipeline stages add to theirs."""

_Rule = tuple[Callable[[Any], bool], str]
_RULES: dict[str, _Rule] = {  # of a number that is none, no comparison holds
    **dict.fromkeys((*_INTERVALS, *_SIZES), (lambda value: value >= 1, "at least 1")),
    **dict.fromkeys(_NOT_NEGATIVE, (lambda value: value >= 0, "at least 0")),
    **dict.fromkeys(_BELOW_ONE, (lambda value: 0 <= value < 1, "at least 0 and below 1")),
    **dict.fromkeys(_SHARES, (lambda value: 0 <= value <= 1, "from 0 to 1")),
    **dict.fromkeys(_POSITIVE, (lambda value: value > 0, "above 0")),
    "seed": (lambda value: 1 <= value <= _MOST_SEED, f"from 1 to {_MOST_SEED}"),
}

_REFUSED: dict[tuple[str, str], str] = {
    ("exit_signal", "SIGKILL"): "no process can catch it: use SIGTERM",
    ("exit_signal", "SIGSTOP"): "no process can catch it: use SIGTERM",
    ("rerun_mode", "report_stats"): "Megatron does not know its own value",
    **{
        ("dist_ckpt_strictness", f"return_{which}"): "Megatron's loop does not read what a load "
        f"returns besides the weights: use log_{which}"
        for which in ("unexpected", "all")
    },
}

_NEEDS_TE = (
    *("batch_invariant_mode", "cpu_offloading_num_layers", "defer_embedding_wgrad_compute"),
    *("save_activations_interval", "save_dgrads_interval", "te_precision_config_file"),
    *("use_precision_aware_optimizer", "use_te_activation_func"),
)
"""Flags with which Megatron calls or looks for something of Transformer Engine, and fails."""
_NOT_TAKEN = {
    "override_ckpt_iteration": "it counts Megatron's own data sets anew, and the position in these "
    "data would stay; --ckpt-step N begins from another checkpoint",
    "use_ring_exchange_p2p": "it calls torch.distributed.ring_exchange, which no torch has",
    "exit_signal_handler_for_training": "at a signal Megatron then ends the run without a "
    "checkpoint; without the flag the run saves one first",
    "init_method_xavier_uniform": "Megatron sets a field with it that its config does not have",
    "test_mode": "Megatron's tests read a bias of the norms of query and key, and these have none",
}
_NEEDS_GPU = (
    *("gpu_sniff_test_interval", "log_device_memory_used", "use_sharp", "nccl_ub"),
    "pipeline_model_parallel_comm_backend",
)
"""Flags that on the CPU take minutes, or ask for what only a GPU has."""
_NEEDS_OTHER = {
    # Megatron writes their files below it, and asserts that there is one.
    **dict.fromkeys(
        (
            *("save_activations_interval", "save_dgrads_interval", "save_params_interval"),
            *("save_tokens_per_expert_interval", "save_wgrads_interval", "log_progress"),
        ),
        "--save DIR",
    ),
    "non_persistent_save_interval": "--non-persistent-ckpt-type global",
    "use_pytorch_profiler": "--tensorboard-dir DIR",  # beside which the profile is written
}
_NEEDS_MODULE = {
    "enable_ft_package": "nvidia_resiliency_ext",
    "run_workload_inspector_server": "workload_inspector",
    "hierarchical_context_parallel_sizes": "einops",
    **dict.fromkeys(
        (
            *("fault_injector_delay_start_iteration", "fault_injector_fault_delay"),
            *("fault_injector_fault_probabilities", "fault_injector_fault_types"),
            *("fault_injector_mtti_seconds", "fault_injector_num_ranks", "fault_injector_ranks"),
            *("fault_injector_offset_seconds", "fault_injector_seed"),
        ),
        "nvidia_resiliency_ext",
    ),
}
_FILES = ("nccl_communicator_config_path", "te_precision_config_file", "tp_comm_overlap_cfg")


def check_values(
    explicit: Mapping[str, Any], flags: Mapping[str, str], *, spec: str, cpu: bool
) -> None:
    """Refuse, with BadInput, values that single flags cannot have.

    Args:
        explicit: what the command line sets, by ``dest`` name.
        flags: the flag of each ``dest`` name.
        spec: the layer spec, ``te`` or ``torch``.
        cpu: whether the run is on the CPU.
    """
    given_flags = {flags[name] for name in explicit}
    for name, given in explicit.items():
        flag = flags[name]
        _check_range(flag, name, given)
        word = getattr(given, "name", given)  # Megatron's parser makes an enum of a signal's name
        if isinstance(word, str) and (why := _REFUSED.get((name, word))):
            raise BadInput(f"{flag} {word}: {why}.")
        if given and spec == "torch" and name in _NEEDS_TE:
            instead = "leave it out" if cpu else "use --spec te, or leave it out"
            raise BadInput(f"{flag} needs Transformer Engine, which --spec torch lacks: {instead}.")
        if name in _NOT_TAKEN and given is not False:
            raise BadInput(f"{flag}: {_NOT_TAKEN[name]}: leave it out.")
        if given and cpu and name in _NEEDS_GPU:
            raise BadInput(f"{flag} needs GPUs: leave it out with --cpu.")
        _check_needs(flag, name, given, given_flags)
    if cpu and "profile" in explicit and "use_pytorch_profiler" not in explicit:
        raise BadInput("--profile with --cpu: add --use-pytorch-profiler, the other needs GPUs.")


def _check_range(flag: str, name: str, given: Any) -> None:
    if name not in _RULES:
        return
    holds, allowed = _RULES[name]
    for value in given if isinstance(given, Sequence) else [given]:
        if value is not None and not holds(value):
            raise BadInput(f"{flag} is {value}; it is {allowed}.")


def _check_needs(flag: str, name: str, given: Any, given_flags: Collection[str]) -> None:
    other = _NEEDS_OTHER.get(name)
    if other and other.split()[0] not in given_flags:
        raise BadInput(f"{flag} is set without {other.split()[0]}: add {other}.")
    module = _NEEDS_MODULE.get(name)
    if module and find_spec(module) is None:
        raise BadInput(f"{flag} needs the Python module {module}: install it, or leave it out.")
    if name in _FILES and not Path(given).is_file():
        raise BadInput(f"{flag}: there is no file {given}.")
