"""Checks, before anything is built, that flags fit one another and the machine.

:func:`check` runs after Megatron's own validation, called by ``ArgumentSetup`` in ``parser.py`` as
the checks of single concerns are.

:func:`check_early` needs no torch, no megatron and no ranks. ``mcore-qwen3vl train`` runs it before
it starts ranks, launch scripts run it by :mod:`.launch_check`, and every rank runs it before it
imports megatron, which takes seconds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mcore_qwen3vl.certificate_file import read_to_quote
from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.hf.companions import read_form, require_processor
from mcore_qwen3vl.converters.identify import (
    SMALL,
    TRACKER,
    PathKind,
    folder_name,
    identify,
    numbered_iterations,
    read_tracker,
    refuse_special_parts,
)
from mcore_qwen3vl.data.config import parse_sources, require_data_set
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import refuse_links_out
from mcore_qwen3vl.flags import flag_of
from mcore_qwen3vl.machine import require_extra
from mcore_qwen3vl.runtime.flash_attention import why_unavailable
from mcore_qwen3vl.runtime.gpus import c_compiler
from mcore_qwen3vl.settings.run import (
    CheckpointSettings,
    ComputeSettings,
    LogSettings,
    ModelSettings,
    ParallelSettings,
    TrainingSettings,
)
from mcore_qwen3vl.settings.schedule import ITERS, SAMPLES
from mcore_qwen3vl.training.arguments.command_line import CommandLine
from mcore_qwen3vl.training.arguments.experts import check_experts
from mcore_qwen3vl.training.arguments.settings import WHOLE, Settings
from mcore_qwen3vl.training.folders import (
    check_export,
    check_overwriting,
    check_writable,
    require_folder,
)
from mcore_qwen3vl.training.logs.trackers import check_tracker

_LARGEST_HEADS = 256
"""Values of the largest heads that FlashAttention takes."""


def check(settings: Settings, architecture: Architecture) -> None:
    """Refuse, with BadInput, combinations of flags that Megatron's own validation lets through."""
    model, loop = settings.model, settings.loop
    compute, parallel = settings.compute, settings.parallel
    if model.fp32 and (compute.bf16 or compute.fp16):
        raise BadInput(
            f"--fp32 and {'--bf16' if compute.bf16 else '--fp16'} contradict each other: leave one "
            "out."
        )
    if loop.eval_iters and not loop.valid_data_path:
        raise BadInput("--eval-iters is set without --valid-data-path: say what to evaluate on.")
    if loop.eval_iters < WHOLE:  # which is -1
        raise BadInput(f"--eval-iters is {loop.eval_iters}; leave it out to evaluate on all data.")
    if loop.full_validation:
        if not loop.valid_data_path:
            raise BadInput("--full-validation is set without --valid-data-path.")
        if loop.eval_iters != WHOLE:
            raise BadInput(
                "--full-validation evaluates on all of --valid-data-path, and --eval-iters on a "
                "part: leave one of them out."
            )
    for name in ("rampup_batch_size", "step_batch_size_schedule"):
        if settings.training.num_epochs and getattr(loop, name):
            raise BadInput(
                f"--num-epochs with {flag_of(name)}: the steps would hold different numbers of "
                "samples. Give --train-samples N."
            )
    _check_best(settings)
    if model.save_hf_interval is not None and model.save_hf is None:
        raise BadInput("--save-hf-interval is set without --save-hf DIR: say where to export.")
    tp = parallel.tensor_model_parallel_size
    if architecture.is_moe and tp > 1 and not parallel.sequence_parallel:
        raise BadInput(
            f"Megatron-Core trains MoE models under TP {tp} with "
            "sequence parallelism only: add --sequence-parallel."
        )
    rows, vocabulary = compute.padded_vocab_size, architecture.vocab_size
    if rows is not None and (rows < vocabulary or rows % tp):
        raise BadInput(
            f"--padded-vocab-size is {rows}: it must be at least the model's vocab_size, "
            f"{vocabulary}, and a multiple of TP {tp}. Leave it out, and Megatron pads as needed."
        )
    legacy = settings.checkpoints.ckpt_format == "torch"
    if settings.checkpoints.save and legacy and architecture.delta_net is not None:
        raise BadInput(
            "--ckpt-format torch: nothing here reads or converts a legacy checkpoint of a model "
            "with gated delta nets. Leave it at torch_dist."
        )
    _check_interleaving(settings)
    _check_expert_overlap(parallel, compute)
    _check_mtp(settings, architecture.mtp_num_hidden_layers)
    if architecture.is_moe:
        check_experts(settings)
    if compute.cuda_graph_impl != "none":  # Megatron turns its older flags into this one
        raise BadInput(
            f"--cuda-graph-impl {compute.cuda_graph_impl} (--enable-cuda-graph and "
            "--external-cuda-graph mean it too): a CUDA graph needs the same number of image "
            "tokens in every batch, which differs here, and Megatron's per-layer graphs leave "
            "DeepStack out: drop the flag."
        )
    if not model.cpu and c_compiler() is None:
        _refuse_flags_with_value(
            "needs a C compiler for Triton's kernels, and none was found (CC, gcc, clang): install "
            "one, or leave the flag out.",
            {
                "--compile-pointwise": settings.training.compile_pointwise,
                "--moe-permute-fusion": compute.moe_permute_fusion,
            },
        )
    if compute.layer_spec == "torch":
        _check_deterministic_attention(compute, architecture)
        _refuse_flags_with_value(
            "needs Transformer Engine and would do nothing with --spec torch: use --spec te, or "
            "leave it out.",
            {
                "--fp8-format": compute.fp8,
                "--tp-comm-overlap": compute.tp_comm_overlap,
                "--flash-attention-version 4": compute.flash_attention_version == 4,
            },
        )
        if architecture.is_moe and loop.optimizer not in (None, "adam", "sgd"):
            raise BadInput(
                f"--optimizer {loop.optimizer} is for matrices, and --spec torch holds all experts "
                "of a rank in one tensor, which would train with Adam: use --spec te, or adam."
            )


def _check_deterministic_attention(compute: ComputeSettings, architecture: Architecture) -> None:
    """Check that attention of ``--spec torch`` has deterministic gradients, if they are wanted."""
    # With --spec te, Transformer Engine takes another kernel there by itself.
    if (
        compute.deterministic_mode
        and compute.flash_attention_version == 3
        and architecture.head_dim == _LARGEST_HEADS
    ):
        raise BadInput(
            "--deterministic-mode with --flash-attention-version 3: FlashAttention 3 has no "
            f"deterministic gradients of heads of {_LARGEST_HEADS} values, as this model has. "
            "Leave --flash-attention-version out for FlashAttention 2."
        )


def _check_best(settings: Settings) -> None:
    """Check what ``--early-stop-patience`` and ``--keep-best`` need and cannot be combined with."""
    training, loop, checkpoints = settings.training, settings.loop, settings.checkpoints
    patience = training.early_stop_patience
    if patience is None and not training.keep_best:
        return
    flag = "--keep-best" if training.keep_best else "--early-stop-patience"
    if not loop.eval_iters:
        raise BadInput(
            f"{flag} needs the validation loss: add --valid-data-path PATH and --eval-iters N."
        )
    if patience is not None and patience < 1:
        raise BadInput(f"--early-stop-patience is {patience}; it is at least 1.")
    if training.keep_best and not checkpoints.save:
        raise BadInput("--keep-best is set without --save DIR: say where to keep it.")
    if training.keep_best and (checkpoints.async_save or checkpoints.save_retain_interval):
        other = "--async-save" if checkpoints.async_save else "--save-retain-interval"
        raise BadInput(
            f"--keep-best removes the previous best checkpoint, and {other} also decides when "
            "checkpoints are written or removed: drop one of the two."
        )


def _check_interleaving(settings: Settings) -> None:
    """Refuse steps with fewer micro-batches than virtual stages take together; Megatron raises."""
    parallel, loop = settings.parallel, settings.loop
    stages = parallel.pipeline_model_parallel_size
    virtual = parallel.virtual_pipeline_model_parallel_size or 1
    if stages == 1 or virtual == 1:
        return
    group = parallel.microbatch_group_size_per_vp_stage or stages
    micro, dp = settings.data.micro_batch_size, parallel.data_parallel_size
    batches = {"--global-batch-size": (loop.global_batch_size, micro)}
    if loop.rampup_batch_size:
        batches["--rampup-batch-size"] = (loop.rampup_batch_size[0], micro)
    if loop.valid_data_path and loop.eval_global_batch_size:
        evaluated = loop.eval_micro_batch_size or micro
        batches["--eval-global-batch-size"] = (loop.eval_global_batch_size, evaluated)
    for flag, (batch, rows) in batches.items():
        count = batch // (rows * dp)
        if batch and count < group:
            raise BadInput(
                f"{flag} {batch} has too few micro-batches ({count}, of {rows} on DP {dp}): "
                f"virtual stages take {group} together. Give {flag} {group * rows * dp}, or leave "
                "out --num-virtual-stages-per-pipeline-rank."
            )


def _check_expert_overlap(parallel: ParallelSettings, compute: ComputeSettings) -> None:
    """Refuse what Megatron's combined schedule, or our part of it, cannot be combined with."""
    if compute.delay_wgrad_compute:
        raise BadInput("--delay-wgrad-compute is not supported: drop the flag.")
    if not compute.overlap_moe_expert_parallel_comm:
        return
    stages = parallel.pipeline_model_parallel_size
    virtual = parallel.virtual_pipeline_model_parallel_size
    reasons = {
        "nothing is exchanged: add --expert-model-parallel-size N": (
            parallel.expert_model_parallel_size == 1
        ),
        "it needs half precision: add --bf16": not (compute.bf16 or compute.fp16),
        "the dispatcher must be --moe-token-dispatcher-type alltoall or flex": (
            compute.moe_token_dispatcher_type not in ("alltoall", "flex")
        ),
        "a pipeline needs virtual stages: add --num-virtual-stages-per-pipeline-rank N": (
            stages > 1 and not virtual
        ),
        "a layer cannot be recomputed as a whole: drop --recompute-granularity full": (
            compute.recompute_granularity == "full"
        ),
        "experts cannot be recomputed: take moe out of --recompute-modules": (
            "moe" in (compute.recompute_modules or ())
        ),
        "activations cannot be offloaded: drop --fine-grained-activation-offloading and "
        "--cpu-offloading-num-layers": (
            compute.fine_grained_activation_offloading or bool(compute.cpu_offloading_num_layers)
        ),
        "the schedule passes by its hooks: drop --use-megatron-fsdp": parallel.use_megatron_fsdp,
    }
    for reason, wrong in reasons.items():
        if wrong:
            raise BadInput(f"--overlap-moe-expert-parallel-comm: {reason}.")


def _check_mtp(settings: Settings, count: int) -> None:
    """Refuse settings that the MTP layer cannot have; the model has `count` MTP layers."""
    if settings.loop.mtp_num_layers is None:
        return
    if settings.loop.mtp_num_layers != count:
        has = f"the model has {count}" if count else "the model has no such layer"
        raise BadInput(
            f"--mtp-num-layers {settings.loop.mtp_num_layers}: {has} "
            "(text_config.mtp_num_hidden_layers). Leave the flag out"
            + (f", or set it to {count}." if count else ".")
        )
    if not settings.loss.takes_mtp:
        raise BadInput(
            f"--mtp-num-layers with {settings.loss.chosen_by}: MTP has a loss of "
            "its own beside a loss of single tokens, such as cross_entropy. Leave one of them out."
        )
    compute = settings.compute
    others = {
        "LoRA, whose adapters leave mtp.* as it is": settings.lora.trains_adapter,
        "--overlap-moe-expert-parallel-comm, whose schedule leaves MTP out": (
            compute.overlap_moe_expert_parallel_comm
        ),
        "--defer-embedding-wgrad-compute, which pairs the inputs of a head that is used once with "
        "its gradients": compute.defer_embedding_wgrad_compute,
    }
    for name, is_set in others.items():
        if is_set:
            raise BadInput(f"--mtp-num-layers with {name}: leave one of them out.")


def _refuse_flags_with_value(why: str, flags: Mapping[str, Any]) -> None:
    """Raise BadInput if any of `flags` has a value; the message says `why`."""
    if named := [flag for flag, value in flags.items() if value]:
        raise BadInput(f"{', '.join(named)} {why}")


def require_gpu() -> int:
    """Count the GPUs, or raise BadInput before megatron's CUDA modules print hundreds of lines."""
    import torch

    if not (count := torch.cuda.device_count()):
        raise BadInput("There is no GPU here: add --cpu to train on the CPU.")
    return count


def check_early(command: CommandLine, *, rehearsed: bool = False) -> None:
    """Raise BadInput if no run can start: for its flags, its model, its data or its folders.

    Args:
        rehearsed: whether a simulated GPU runs it, which needs none of the packages of kernels.
    """
    command.check_names()
    settings = command.settings
    check_surroundings(settings)
    if not rehearsed:
        if settings.compute.moe_token_dispatcher_type == "flex":
            check_deep_ep(settings.compute.moe_flex_dispatcher_backend)
        if settings.compute.flash_attention_version == 3:
            check_flash_attention_3(settings.model)
    model = command.model
    require_processor(model)
    settings.lora.check_targets(command.architecture)
    save, exports = settings.checkpoints.save, settings.model.save_hf
    targets = [Path(folder) for folder in (save, exports) if folder]
    # The first rank looks at the folders for all.
    if targets and os.environ.get("RANK", "0") == "0":
        for folder in targets:
            check_writable(folder)
        check_overwriting(settings.checkpoints, exports)
        check_export(save, exports)
        refuse_links_out((file for glob in SMALL for file in model.glob(glob)), model)


def check_surroundings(settings: Settings) -> None:
    """Raise BadInput if flags clash, or if a flag, data, a checkpoint or a package is missing."""
    loop = settings.loop
    train = loop.training_data
    missing = []
    if not settings.model.hf_model:
        missing.append(
            "No model: give --hf-model DIR; `mcore-qwen3vl tiny DIR` writes a small one."
        )
    if not train:
        missing.append("No training data: give --data-path PATH, or WEIGHT PATH WEIGHT PATH….")
    epochs = settings.training.num_epochs
    if epochs is None and not (loop.train_iters or loop.train_samples):
        other = "" if loop.skip_train else ", or --num-epochs N"
        missing.append(f"No length of the run: give --train-iters N{other}.")
    if missing:
        raise BadInput(" ".join(missing))
    if loop.skip_train and epochs is not None:
        raise BadInput(
            "--skip-train with --num-epochs, whose steps are counted when training begins: give "
            "--train-iters N."
        )
    if loop.skip_train and not loop.valid_data_path:
        raise BadInput(
            "--skip-train without --valid-data-path PATH leaves nothing to do: say what to "
            "evaluate on."
        )
    for path in (train, loop.valid_data_path or train):
        for source in parse_sources(path, settings.sources.reading):
            require_data_set(source.path)
    if epochs is not None and epochs < 1:
        raise BadInput(f"--num-epochs is {epochs}; it is at least 1.")
    for name in ("train_iters", "train_samples"):
        if epochs is not None and getattr(loop, name):
            raise BadInput(
                f"--num-epochs and {flag_of(name)} both set the length: leave one of them out."
            )
    _check_schedule(settings)
    _check_checkpoint_kinds(settings)
    _check_async(settings.checkpoints, cpu=settings.model.cpu)
    _check_loggers(settings.logs, settings.checkpoints.save)
    _check_trackers(settings.training, settings.logs)
    _check_card(settings.model)
    _check_packages(settings)


def _check_schedule(settings: Settings) -> None:
    """Check the schedule; that of ``--num-epochs`` is checked again, when its steps are counted."""
    loop, schedule = settings.loop, settings.schedule
    if loop.skip_train:
        return
    if loop.step_batch_size_schedule and loop.train_iters:
        raise BadInput(
            "--step-batch-size-schedule with --train-iters: the learning rate follows the samples, "
            "and as the batch grows these steps have more of them than its schedule. Give "
            "--train-samples N, and a warm-up or a decay in samples too."
        )
    unit = SAMPLES if loop.train_samples else ITERS
    schedule.check(unit)
    if length := loop.train_samples or loop.train_iters:
        schedule.check_length(length, unit)


def _check_checkpoint_kinds(settings: Settings) -> None:
    """Check each flag's checkpoint: without one Megatron would start from random weights."""
    checkpoints = settings.checkpoints
    step = checkpoints.ckpt_step
    if step and (named := checkpoints.load or checkpoints.save):
        folder = Path(named)
        if not (folder / folder_name(step)).is_dir():
            saved_steps = ", ".join(map(str, numbered_iterations(folder))) or "none"
            raise BadInput(
                f"--ckpt-step {step}: {folder} has no checkpoint of that step; it has "
                f"{saved_steps}."
            )
    resumed = checkpoints.load or checkpoints.save
    if checkpoints.exit_on_missing_checkpoint and resumed and read_tracker(Path(resumed)) is None:
        raise BadInput(  # Megatron would end there with exit code 0
            f"--exit-on-missing-checkpoint: {resumed} holds no checkpoint to go on from. To begin "
            "a run, leave it out."
        )
    hf = settings.model.load_hf
    others = {"--load-hf": hf, **settings.loss.checkpoints()}
    for flag, path in others.items():
        if path and identify(path).kind is PathKind.MISSING:
            raise BadInput(f"{path} does not exist: check the path of {flag}.")
    if hf and (place := identify(hf)).kind is not PathKind.HUB_ID:
        place.require_huggingface(
            instead="use --load, or --pretrained-checkpoint for the base of LoRA"
        )
    base = checkpoints.pretrained_checkpoint
    starts = {"--load": checkpoints.load, "--pretrained-checkpoint": base}
    places = {flag: identify(folder) for flag, folder in starts.items() if folder}
    for flag, place in places.items():
        if place.kind not in (PathKind.MISSING, PathKind.HUB_ID, PathKind.CONFIG, PathKind.UNKNOWN):
            place.require_megatron(instead="use --load-hf")
            refuse_special_parts(place.folder)
        elif starts[flag] != checkpoints.save:  # which a first run fills
            raise BadInput(
                f"{place.path} holds no checkpoint of Megatron's to begin from: check the path of "
                f"{flag}."
            )
        if settings.loss.lm_head and place.hf is not None:
            read_form(place.hf).require_language_model(place.path)
    if not (places or checkpoints.save):
        return
    # It imports torch.
    from mcore_qwen3vl.training.checkpoints.other_maker import checkpoint_of_other_maker

    if checkpoint_of_other_maker(settings.checkpoints) is not None:
        return
    for flag, place in places.items():
        if starts[flag] == checkpoints.save or read_tracker(place.path) is not None:
            continue
        # Without a tracker, Megatron would start from random weights.
        folder, number = place.path, place.iteration
        chosen = f" --ckpt-step {number}" if flag == "--load" and isinstance(number, int) else ""
        raise BadInput(
            f"{folder} is one iteration, and Megatron begins from a run's folder with a {TRACKER}: "
            f"use {flag} {folder.absolute().parent}{chosen}."
        )


def _check_async(checkpoints: CheckpointSettings, *, cpu: bool) -> None:
    """Refuse what Megatron's validation turns off, and what would end at the first save."""
    if not checkpoints.async_save:
        return
    if cpu:  # the process ends while it starts, and the run would wait for it
        raise BadInput(
            "--async-save with --cpu: Megatron's process that saves in the background chooses a "
            "GPU. Drop --async-save."
        )
    if not checkpoints.use_persistent_ckpt_worker:
        raise BadInput(
            "--async-save alone does nothing: Megatron saves in the background only with "
            "--use-persistent-ckpt-worker. Add it, or drop --async-save."
        )
    if checkpoints.async_strategy == "nvrx" and find_spec("nvidia_resiliency_ext") is None:
        raise BadInput(
            "--async-save needs the package nvidia-resiliency-ext: install it, or add "
            "--async-strategy mcore."
        )


def _check_loggers(logs: LogSettings, save: str | None) -> None:
    """Check the packages and the other flags that TensorBoard and W&B need."""
    if logs.tensorboard_dir:
        require_extra("tensorboard", "--tensorboard-dir")
        require_folder("--tensorboard-dir", str(logs.tensorboard_dir))
    if logs.wandb_project:
        if not logs.tensorboard_dir:
            raise BadInput(
                "--wandb-project alone would not show the loss: Megatron sends W&B what it writes "
                "to TensorBoard. Add --tensorboard-dir DIR."
            )
        if find_spec("wandb") is None:
            raise BadInput("--wandb-project needs the package wandb: pip install wandb.")
        if not logs.wandb_exp_name:
            raise BadInput("--wandb-project needs a name for the run: add --wandb-exp-name NAME.")
        if not (logs.wandb_save_dir or save):
            raise BadInput("--wandb-project needs a place for its files: --wandb-save-dir DIR.")


def _check_trackers(training: TrainingSettings, logs: LogSettings) -> None:
    """Check the trackers of ``--log-to``, and the flags that only they read."""
    for name in ("log_project", "log_run"):
        if getattr(training, name) is not None and not training.log_to:
            raise BadInput(f"{flag_of(name)} acts with --log-to alone: add it, or drop the flag.")
    if "wandb" in training.log_to and logs.wandb_project:
        raise BadInput(
            "--log-to wandb and --wandb-project would both write to W&B: give one of them."
        )
    for named in training.log_to:
        if training.log_to.count(named) > 1:
            raise BadInput(f"--log-to names {named} twice.")
        check_tracker(named)


def _check_card(model: ModelSettings) -> None:
    """Check that a model card goes somewhere, and the certificates that it quotes."""
    if model.model_card and not model.save_hf:
        raise BadInput("--model-card writes into exports: add --save-hf DIR, or drop it.")
    if model.certificate and not model.model_card:
        raise BadInput("--certificate is quoted in a model card: add --model-card, or drop it.")
    for file in model.certificate:
        read_to_quote(Path(file))


def _check_packages(settings: Settings) -> None:
    """Check what Megatron needs for a flag, and misses after a minute."""
    loop, compute = settings.loop, settings.compute
    for name in ("use_megatron_fsdp", "use_torch_fsdp2"):
        if settings.model.cpu and getattr(settings.parallel, name):
            raise BadInput(
                f"{flag_of(name)} with --cpu: Megatron's code for it needs CUDA: leave it out. "
                "--use-distributed-optimizer shards the optimizer's state."
            )
    if loop.optimizer == "sgd" and loop.use_distributed_optimizer:
        raise BadInput(
            "--optimizer sgd with --use-distributed-optimizer: Megatron cannot store its momentum "
            "in parts. Drop one of them."
        )
    is_emerging = loop.optimizer not in (None, "adam", "sgd")
    if is_emerging and find_spec("emerging_optimizers") is None:
        raise BadInput(
            f"--optimizer {loop.optimizer} needs the package emerging-optimizers: pip install "
            "'emerging-optimizers>=0.2', or leave the flag out, for Adam."
        )
    if is_emerging and loop.use_distributed_optimizer and not compute.bf16:
        raise BadInput(
            f"--optimizer {loop.optimizer} with --use-distributed-optimizer needs --bf16: Megatron "
            "cannot build it in float32. Add --bf16, or drop --use-distributed-optimizer."
        )
    if settings.parallel.use_megatron_fsdp and find_spec("einops") is None:
        raise BadInput(
            "--use-megatron-fsdp needs the package einops: pip install einops, or use "
            "--use-distributed-optimizer, which shards the optimizer's state over the same ranks."
        )


def check_deep_ep(backend: str | None) -> None:
    """Check that Megatron will find this backend of the flex dispatcher in the package deep_ep."""
    if backend == "ncclep":
        return
    # An import would need a GPU.
    package = find_spec("deep_ep")
    if package is None or package.origin is None:  # missing, or a folder without __init__.py
        raise BadInput(
            "--moe-token-dispatcher-type flex needs the package deep_ep: build DeepEP, or use "
            "--moe-token-dispatcher-type alltoall (and drop --moe-enable-deepep)."
        )
    folder = Path(package.origin).parent
    if backend == "hybridep" and not (folder / "hybrid_ep_buffer.py").exists():
        raise BadInput(
            f"--moe-flex-dispatcher-backend hybridep: {folder} has no HybridEPBuffer. Build DeepEP "
            "from its branch hybrid-ep."
        )
    if not (folder / "utils.py").exists():
        raise BadInput(
            f"--moe-token-dispatcher-type flex: {folder} is DeepEP 2, in which Megatron-Core does "
            "not find what it needs. Build DeepEP 1.2.1, or its branch hybrid-ep."
        )


def check_flash_attention_3(model: ModelSettings) -> None:
    """Check that this run computes attention in half precision, and that this machine can."""
    for flag, given in {"--cpu": model.cpu, "--fp32": model.fp32}.items():
        if given:
            raise BadInput(
                f"--flash-attention-version 3 with {flag}: it computes in half precision on Hopper "
                "GPUs. Leave it out."
            )
    if why := why_unavailable():
        raise BadInput(f"--flash-attention-version 3: {why}. Leave it out for FlashAttention 2.")
