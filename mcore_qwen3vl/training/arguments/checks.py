"""Checks, before anything is built, that flags fit one another and the machine.

:func:`check_early` needs no torch, no megatron and no ranks. ``mcore-qwen3vl train`` runs it before
it starts ranks, launch scripts run it with ``python -m`` of this module, and every rank runs it
before it imports megatron, which takes seconds.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Sequence
from importlib.util import find_spec
from pathlib import Path

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.console import visible
from mcore_qwen3vl.converters.hf.companions import read_form, require_processor
from mcore_qwen3vl.converters.hf.hub import SMALL
from mcore_qwen3vl.converters.place import (
    TRACKER,
    Kind,
    Place,
    folder_name,
    identify,
    numbered_iterations,
    read_tracker,
)
from mcore_qwen3vl.data.loading.sources import parse_sources, require_data_set
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import refuse_links_out
from mcore_qwen3vl.machine import require_extra
from mcore_qwen3vl.runtime.gpus import c_compiler
from mcore_qwen3vl.training.arguments.command_line import COMMAND_LINE, CommandLine
from mcore_qwen3vl.training.arguments.defaults import WHOLE
from mcore_qwen3vl.training.arguments.help import asked_words
from mcore_qwen3vl.training.arguments.lora import check_targets
from mcore_qwen3vl.training.folders import check_export, check_overwriting, check_writable
from mcore_qwen3vl.unused import Unused


def check(args: argparse.Namespace, architecture: Architecture) -> None:
    """Refuse, with BadInput, combinations of flags that Megatron's own validation lets through."""
    if args.fp32 and (args.bf16 or args.fp16):
        raise BadInput(
            f"--fp32 and {'--bf16' if args.bf16 else '--fp16'} contradict each other: leave one "
            "out."
        )
    if args.eval_iters and not args.valid_data_path:
        raise BadInput("--eval-iters is set without --valid-data-path: say what to evaluate on.")
    if args.eval_iters < WHOLE:
        raise BadInput(f"--eval-iters is {args.eval_iters}; leave it out to evaluate on all data.")
    if args.full_validation:
        if not args.valid_data_path:
            raise BadInput("--full-validation is set without --valid-data-path.")
        if args.eval_iters != WHOLE:
            raise BadInput(
                "--full-validation evaluates on all of --valid-data-path, and --eval-iters on a "
                "part: leave one of them out."
            )
        args.full_validation = False  # Megatron's own would ask each rank's stream for its length
    for flag in ("rampup_batch_size", "step_batch_size_schedule"):
        if args.num_epochs and getattr(args, flag, None):
            raise BadInput(
                f"--num-epochs with --{flag.replace('_', '-')}: the steps would hold different "
                "numbers of samples. Give --train-samples N."
            )
    _check_best(args)
    if args.save_hf_interval is not None and args.save_hf is None:
        raise BadInput("--save-hf-interval is set without --save-hf DIR: say where to export.")
    if architecture.is_moe and args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        raise BadInput(
            f"Megatron-Core trains MoE models under TP {args.tensor_model_parallel_size} with "
            "sequence parallelism only: add --sequence-parallel."
        )
    _check_expert_overlap(args)
    if architecture.is_moe and args.moe_token_dispatcher_type == "flex":
        _check_flex(args)
    _check_graphs(args)
    if not args.cpu and c_compiler() is None:
        _check_uncompiled(args)
    if args.spec == ["torch"]:
        _check_torch_spec(args)


def _check_best(args: argparse.Namespace) -> None:
    """Check what ``--early-stop-patience`` and ``--keep-best`` need and cannot be combined with."""
    patience = args.early_stop_patience
    if patience is None and not args.keep_best:
        return
    flag = "--keep-best" if args.keep_best else "--early-stop-patience"
    if not args.eval_iters:
        raise BadInput(
            f"{flag} needs the validation loss: add --valid-data-path PATH and --eval-iters N."
        )
    if args.multiple_validation_sets:
        raise BadInput(f"{flag} needs a single validation loss: drop --multiple-validation-sets.")
    if patience is not None and patience < 1:
        raise BadInput(f"--early-stop-patience is {patience}; it is at least 1.")
    if args.keep_best and not args.save:
        raise BadInput("--keep-best is set without --save DIR: say where to keep it.")
    if args.keep_best and (args.async_save or args.save_retain_interval):
        other = "--async-save" if args.async_save else "--save-retain-interval"
        raise BadInput(
            f"--keep-best removes the previous best checkpoint, and {other} also decides when "
            "checkpoints are written or removed: drop one of the two."
        )


def _check_expert_overlap(args: argparse.Namespace) -> None:
    """Refuse what Megatron's combined schedule, or our part of it, cannot be combined with."""
    if args.delay_wgrad_compute:
        raise BadInput("--delay-wgrad-compute is not supported: drop the flag.")
    if not args.overlap_moe_expert_parallel_comm:
        return
    stages, virtual = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    reasons = {
        "nothing is exchanged: add --expert-model-parallel-size N": (
            args.expert_model_parallel_size == 1
        ),
        "it needs half precision: add --bf16": not (args.bf16 or args.fp16),
        "the dispatcher must be --moe-token-dispatcher-type alltoall or flex": (
            args.moe_token_dispatcher_type not in ("alltoall", "flex")
        ),
        "a pipeline needs virtual stages: add --num-virtual-stages-per-pipeline-rank N": (
            stages > 1 and not virtual
        ),
        "a layer cannot be recomputed as a whole: drop --recompute-granularity full": (
            args.recompute_granularity == "full"
        ),
        "experts cannot be recomputed: take moe out of --recompute-modules": (
            "moe" in (args.recompute_modules or ())
        ),
        "activations cannot be offloaded: drop --fine-grained-activation-offloading and "
        "--cpu-offloading-num-layers": (
            args.fine_grained_activation_offloading or bool(args.cpu_offloading_num_layers)
        ),
        "the schedule passes by its hooks: drop --use-megatron-fsdp": args.use_megatron_fsdp,
    }
    for reason, wrong in reasons.items():
        if wrong:
            raise BadInput(f"--overlap-moe-expert-parallel-comm: {reason}.")


def _check_flex(args: argparse.Namespace) -> None:
    """Refuse what would end with an assertion of Megatron's or of DeepEP's kernels."""
    flag = "--moe-token-dispatcher-type flex"
    etp = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    if args.expert_model_parallel_size * etp == 1:
        raise BadInput(f"{flag}: nothing is exchanged: add --expert-model-parallel-size N.")
    if not args.bf16:
        raise BadInput(f"{flag}: DeepEP's kernels add up experts' outputs in bf16: add --bf16.")


def _check_graphs(args: argparse.Namespace) -> None:
    if args.cuda_graph_impl != "none":  # Megatron turns its older flags into this one
        raise BadInput(
            f"--cuda-graph-impl {args.cuda_graph_impl} (--enable-cuda-graph and "
            "--external-cuda-graph mean it too): a CUDA graph needs the same number of image "
            "tokens in every batch, which differs here, and Megatron's per-layer graphs leave "
            "DeepStack out: drop the flag."
        )


def _check_uncompiled(args: argparse.Namespace) -> None:
    compiled = {
        "--compile-pointwise": args.compile_pointwise,
        "--moe-permute-fusion": args.moe_permute_fusion,
    }
    named = [flag for flag, value in compiled.items() if value]
    if named:
        raise BadInput(
            f"{', '.join(named)} needs a C compiler for Triton's kernels, and none was found "
            "(CC, gcc, clang): install one, or leave the flag out."
        )


def _check_torch_spec(args: argparse.Namespace) -> None:
    """Refuse flags that would do nothing, and optimizers for matrices with stacked experts."""
    ignored = {"--fp8-format": args.fp8, "--tp-comm-overlap": args.tp_comm_overlap}
    named = [flag for flag, value in ignored.items() if value]
    if named:
        raise BadInput(
            f"{', '.join(named)} needs Transformer Engine and would do nothing with --spec torch: "
            "use --spec te, or leave it out."
        )
    if args.num_experts and args.optimizer not in ("adam", "sgd"):
        raise BadInput(
            f"--optimizer {args.optimizer} is for matrices, and --spec torch holds all experts of "
            "a rank in one tensor, which would train with Adam: use --spec te, or adam."
        )


def require_gpu() -> int:
    """Count the GPUs, or raise BadInput before megatron's CUDA modules print hundreds of lines."""
    import torch

    if not (count := torch.cuda.device_count()):
        raise BadInput("There is no GPU here: add --cpu to train on the CPU.")
    return count


def check_early(command: CommandLine) -> None:
    """Raise BadInput if no run can start: for its flags, its model, its data or its folders."""
    args = command.checked_args()
    check_surroundings(args)
    model = command.model
    require_processor(model)
    check_targets(args, command.architecture)
    targets = [Path(folder) for folder in (args.save, args.save_hf) if folder]
    if targets and os.environ.get("RANK", "0") == "0":
        for folder in targets:
            check_writable(folder)
        check_overwriting(args)
        check_export(args)
        refuse_links_out((file for glob in SMALL for file in model.glob(glob)), model)


def check_surroundings(args: argparse.Namespace) -> None:
    """Raise BadInput if the run lacks a flag, a data set, a checkpoint or a package."""
    train = args.train_data_path or args.data_path
    missing = []
    if not args.hf_model:
        missing.append(
            "No model: give --hf-model DIR; `mcore-qwen3vl tiny DIR` writes a small one."
        )
    if not train:
        missing.append("No training data: give --data-path PATH, or WEIGHT PATH WEIGHT PATH….")
    lengths = args.train_iters, args.train_samples, args.skip_train
    if args.num_epochs is None and not any(lengths):
        missing.append("No length of the run: give --train-iters N, or --num-epochs N.")
    if missing:
        raise BadInput(" ".join(missing))
    for path in (train, args.valid_data_path or train):
        for source in parse_sources(path, train_on=args.train_on):
            require_data_set(source.path)
    _check_epochs(args)
    _check_kinds(args)
    _check_loggers(args)
    _check_packages(args)


def unused_data_flags(args: argparse.Namespace, explicit: Collection[str]) -> list[Unused]:
    """Return what the command line sets, by its ``dest`` names in `explicit`, and no rank uses."""
    from mcore_qwen3vl.data.loading.readers import is_table

    found = []
    paths = [source.path for source in parse_sources(args.train_data_path or args.data_path)]
    if "shuffle_buffer" in explicit and all(
        path.suffix in (".json", ".jsonl") or is_table(path) for path in paths
    ):
        why = "each epoch of these data has a permutation of its own"
        found.append(Unused(COMMAND_LINE, "--shuffle-buffer", why))
    held_out = parse_sources(args.valid_data_path) if args.valid_data_path else []
    why = "a validation reads each data set once"
    if len({source.weight for source in held_out}) > 1:
        found.append(Unused("--valid-data-path", "weight", why))
    if {source.epochs for source in held_out} - {None, 1}:
        found.append(Unused("--valid-data-path", "epochs", why))
    return found


def _check_epochs(args: argparse.Namespace) -> None:
    if args.num_epochs is None:
        return
    if args.num_epochs < 1:
        raise BadInput(f"--num-epochs is {args.num_epochs}; it is at least 1.")
    for name in ("train_iters", "train_samples"):
        if getattr(args, name):
            flag = f"--{name.replace('_', '-')}"
            raise BadInput(f"--num-epochs and {flag} both set the length: leave one of them out.")


def _check_kinds(args: argparse.Namespace) -> None:
    """Check each flag's checkpoint: without one Megatron would start from random weights."""
    if args.ckpt_step and (folder := args.load or args.save):
        _check_step(Path(folder), args.ckpt_step)
    hf = args.load_hf
    for name in ("load_hf", "teacher", "reference_model"):
        path = getattr(args, name)
        if path and identify(path).kind is Kind.MISSING:
            flag = name.replace("_", "-")
            raise BadInput(f"{path} does not exist: check the path of --{flag}.")
    if hf and (place := identify(hf)).kind is not Kind.HUB_ID:
        place.require_huggingface(
            instead="use --load, or --pretrained-checkpoint for the base of LoRA"
        )
    starts = {"--load": args.load, "--pretrained-checkpoint": args.pretrained_checkpoint}
    places = {flag: identify(folder) for flag, folder in starts.items() if folder}
    for flag, place in places.items():
        _require_start(flag, place, empty=starts[flag] == args.save)  # a first run fills --save
        if args.task in (None, "reranker") and place.hf is not None:
            read_form(place.hf).require_language_model(place.path)
    if not (places or args.save):
        return
    from mcore_qwen3vl.training.checkpoints.resume import from_other_maker  # imports torch

    if from_other_maker(args) is not None:
        return
    for flag, place in places.items():
        if starts[flag] != args.save:
            _check_tracked(place, flag)


def _require_start(flag: str, place: Place, *, empty: bool) -> None:
    """Raise BadInput if a run cannot begin from what a flag names; it may be `empty`."""
    if place.kind in (Kind.MISSING, Kind.HUB_ID, Kind.CONFIG, Kind.UNKNOWN):
        if empty:
            return
        raise BadInput(
            f"{place.path} holds no checkpoint of Megatron's to begin from: check the path of "
            f"{flag}."
        )
    place.require_megatron(instead="use --load-hf")


def _check_tracked(place: Place, flag: str) -> None:
    """Refuse one iteration of a run, which has no tracker: Megatron would start at random."""
    folder, step = place.path, place.iteration
    if read_tracker(folder) is not None:
        return
    chosen = f" --ckpt-step {step}" if flag == "--load" and isinstance(step, int) else ""
    raise BadInput(
        f"{folder} is one iteration, and Megatron begins from a run's folder with a {TRACKER}: "
        f"use {flag} {folder.absolute().parent}{chosen}."
    )


def _check_step(folder: Path, step: int) -> None:
    if (folder / folder_name(step)).is_dir():
        return
    found = numbered_iterations(folder)
    listed = f"it has {', '.join(map(str, found))}" if found else "it has none"
    raise BadInput(f"--ckpt-step {step}: {folder} has no checkpoint of that step; {listed}.")


def _check_loggers(args: argparse.Namespace) -> None:
    if args.tensorboard_dir:
        require_extra("tensorboard", "--tensorboard-dir")
    if args.wandb_project:
        if not args.tensorboard_dir:
            raise BadInput(
                "--wandb-project alone would not show the loss: Megatron sends W&B what it writes "
                "to TensorBoard. Add --tensorboard-dir DIR."
            )
        if find_spec("wandb") is None:
            raise BadInput("--wandb-project needs the package wandb: pip install wandb.")
        if not args.wandb_exp_name:
            raise BadInput("--wandb-project needs a name for the run: add --wandb-exp-name NAME.")
        if not (args.wandb_save_dir or args.save):
            raise BadInput("--wandb-project needs a place for its files: --wandb-save-dir DIR.")


def _check_packages(args: argparse.Namespace) -> None:
    """Check what Megatron needs for a flag, and misses after a minute."""
    for flag in ("--use-megatron-fsdp", "--use-torch-fsdp2"):
        if args.cpu and getattr(args, flag[2:].replace("-", "_")):
            raise BadInput(
                f"{flag} with --cpu: Megatron's code for it needs CUDA. Use "
                "--use-distributed-optimizer, which shards the optimizer's state."
            )
    is_emerging = args.optimizer not in (None, "adam", "sgd")
    if is_emerging and find_spec("emerging_optimizers") is None:
        raise BadInput(
            f"--optimizer {args.optimizer} needs the package emerging-optimizers: pip install "
            "'emerging-optimizers>=0.2', or leave the flag out, for Adam."
        )
    if is_emerging and args.use_distributed_optimizer and not args.bf16:
        raise BadInput(
            f"--optimizer {args.optimizer} with --use-distributed-optimizer needs --bf16: Megatron "
            "cannot build it in float32. Add --bf16, or drop --use-distributed-optimizer."
        )
    if args.moe_token_dispatcher_type == "flex":
        check_deep_ep(args.moe_flex_dispatcher_backend)
    if args.use_megatron_fsdp and find_spec("einops") is None:
        raise BadInput(
            "--use-megatron-fsdp needs the package einops: pip install einops, or use "
            "--use-distributed-optimizer, which shards the optimizer's state over the same ranks."
        )


def check_deep_ep(backend: str) -> None:
    """Check that Megatron will find this backend of the flex dispatcher in the package deep_ep.

    The package is not imported, which would need a GPU.
    """
    if backend == "ncclep":
        return
    package = find_spec("deep_ep")
    if package is None or package.origin is None:
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


def _main(words: Sequence[str]) -> int:
    """Check a launch script's flags for ``WORLD_SIZE`` ranks; return the exit code, 0 or 2.

    After ``--dry-run``, only flags that are wrong on every machine are refused. The rest is noted,
    because the run may have its model and data on another machine.
    """
    dry_run = words[:1] == ["--dry-run"]
    command = CommandLine(words[dry_run:])
    if asked_words(command.words) is not None:
        return 0
    checked = False
    try:
        command.checked_args()
        checked = True
        check_early(command)
        command.layout(int(os.environ["WORLD_SIZE"]))
    except BadInput as error:
        noted = dry_run and checked
        what = "note: this would be refused here" if noted else "error"
        print(f"{what}: {visible(str(error))}", file=sys.stderr)
        return 0 if noted else error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
