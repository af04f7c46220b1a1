"""A summary of what a run will do: a dozen lines at its start."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.console import counted, plain, visible
from mcore_qwen3vl.converters.describe import inspect_path
from mcore_qwen3vl.converters.hf.hf_checkpoint import holder_of_mtp
from mcore_qwen3vl.converters.identify import PathKind, identify
from mcore_qwen3vl.converters.mapping import parameters
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.kernels import why_eager
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model_card import name_of_model, note_on_base
from mcore_qwen3vl.settings.lora import LoraSettings
from mcore_qwen3vl.settings.run import ParallelSettings
from mcore_qwen3vl.settings.schedule import growing_batches, samples_of_growing_batches
from mcore_qwen3vl.training import memory
from mcore_qwen3vl.training.arguments.settings import WHOLE, Settings, statement_of_defaults
from mcore_qwen3vl.training.folders import LOGS
from mcore_qwen3vl.training.parameter_counts import trained_of
from mcore_qwen3vl.training.second_model import architecture_of, source_of

if TYPE_CHECKING:
    from mcore_qwen3vl.training.checkpoints.other_maker import OtherMaker
    from mcore_qwen3vl.training.lora import LoraRun


def show_summary(screen: Console, rows: Sequence[tuple[str, str]]) -> None:
    """Print the rows of :func:`summary`."""
    if not screen.is_terminal:  # a table would be padded to its widest row
        for name, text in rows:
            screen.print(f"{name:12}{visible(text)}", markup=False, soft_wrap=True)
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, plain(text))
    screen.print(table)


def summary(
    settings: Settings,
    a: Architecture,
    explicit: Collection[str],
    lora: LoraRun | None = None,
    other: OtherMaker | None = None,
) -> list[tuple[str, str]]:
    """Say what a run will do, in rows of a name and a description in words."""
    model = settings.model
    source, second = source_of(settings), architecture_of(settings, a)
    rows = [
        ("model", _model_text(model.folder, a)),
        ("weights", _weights_text(settings, lora, other)),
        *([("trains", _adapter_text(settings.lora, a, lora))] if lora else []),
        *settings.loss.summary(settings, settings.lora),
        *([("frozen", _model_text(source.path, second))] if source and second else []),
        ("layout", _layout_text(settings, a)),
        ("precision", _precision_text(settings)),
        *([("rounded", rounded)] if (rounded := rounded_text(settings)) else []),
        ("data", _data_text(settings)),
        *([("validation", _validation_text(settings))] if settings.loop.valid_data_path else []),
        ("schedule", _schedule_text(settings)),
        ("memory", _memory_text(settings, a)),
        ("writes", _writes_text(settings, a)),
    ]
    if settings.compute.flash_attention_version == 3:
        rows.append(("attention", "FlashAttention 3"))
    if not model.cpu and (reason := why_eager()):
        rows.append(("kernels", f"not fused: {reason}"))
    taken = statement_of_defaults(settings, explicit)
    return [*rows, ("defaults", taken)] if taken else rows


def _model_text(path: str | Path, a: Architecture) -> str:
    size = _count_text(parameters.total(a))
    kind = f"MoE, {a.num_experts} experts" if a.is_moe else "dense"
    layers = f"{a.num_hidden_layers} decoder layers"
    if a.has_vision:
        layers += f", {a.vision.depth} vision blocks"
    return f"{a.brand} of {size} parameters ({kind}; {layers}), {path}"


def _count_text(count: int) -> str:
    return f"{count / 1e9:.2f}B" if count >= 1e8 else f"{count / 1e6:.2f}M"


def _adapter_text(flags: LoraSettings, a: Architecture, lora: LoraRun) -> str:
    config, count = lora.config, lora.parameters
    where = flags.lora_init or flags.lora_config or " ".join(flags.lora_target or ["language"])
    ranks = ", ".join(map(str, sorted({target.r for target in lora.targets.values()})))
    saved_modules = (
        f", and {', '.join(config.modules_to_save)} whole" if config.modules_to_save else ""
    )
    return (
        f"a LoRA adapter of rank {ranks or 'none'}, alpha {config.lora_alpha:g} on "
        f"{len(lora.targets)} matrices ({where}){saved_modules}: {_count_text(count)} parameters, "
        f"{count / parameters.total(a):.2%} of the model's"
    )


def _weights_text(settings: Settings, lora: LoraRun | None, other: OtherMaker | None) -> str:
    checkpoints = settings.checkpoints
    from mcore_qwen3vl.training.model import is_resuming

    if other:
        return f"from {other.folder}, written by {other.maker}"
    if is_resuming(checkpoints.load):
        return f"the newest checkpoint in {checkpoints.load}"
    start = settings.model.load_hf or checkpoints.pretrained_checkpoint
    if base := lora.base.path if lora else start:
        return f"from {base}"
    return "random: --load-hf DIR starts from a Hugging Face checkpoint, --load DIR from Megatron's"


def _layout_of(parallel: ParallelSettings, a: Architecture) -> Layout:
    layout = Layout.from_flags(parallel, parallel.world_size, moe=a.is_moe)
    # Megatron sets a dense model's ETP to TP too.
    return layout if a.is_moe else replace(layout, etp=1)


def _layout_text(settings: Settings, a: Architecture) -> str:
    layout, ranks = _layout_of(settings.parallel, a), settings.parallel.world_size
    device = "the CPU" if settings.model.cpu else "GPUs"
    spec = settings.compute.layer_spec
    return f"{layout} on {counted(ranks, 'rank')} on {device}, layer spec {spec}"


def _precision_text(settings: Settings) -> str:
    compute = settings.compute
    if compute.fp8:
        return f"{compute.fp8} in FP8 layers, the rest bf16"
    if compute.bf16 or compute.fp16:
        return f"{'bf16' if compute.bf16 else 'fp16'}, master weights and optimizer fp32"
    if settings.model.cpu:
        return "fp32; --bf16 computes in bfloat16"
    return "fp32, whose attention is not fused: much slower than --bf16, and in far more memory"


def rounded_text(settings: Settings) -> str:
    """Say which weights a run rounds because it begins with wider ones than it holds."""
    compute, checkpoints, start = settings.compute, settings.checkpoints, settings.start
    held = compute.params_dtype
    resumes = checkpoints.load and identify(checkpoints.load).kind is PathKind.MEGATRON
    if held == "float32" or start is None or resumes or settings.lora.trains_adapter:
        return ""
    return rounded_weights(start, held, settings.model.folder)


def rounded_weights(start: str | Path, held: str, hf_model: Path) -> str:
    """Say which weights of a checkpoint a run rounds that holds them in `held`, as torch names it.

    Args:
        hf_model: the folder with the config of a Megatron checkpoint.
    """
    of_megatron = identify(start).kind is PathKind.MEGATRON
    try:
        found = inspect_path(start, hf_config=hf_model if of_megatron else None)
    except BadInput:
        return ""  # whoever reads the weights says what is wrong with them
    wide = [tensor.name for tensor in found.tensors if tensor.dtype in ("float32", "float64")]
    if not wide:
        return ""
    return (
        f"{len(wide)} of {counted(len(found.tensors), 'tensor')} of {start} are wider than {held}, "
        f"in which this run holds and exports them, such as {wide[0]}"
    )


def _data_text(settings: Settings) -> str:
    loop, data = settings.loop, settings.data
    paths = " ".join(map(str, loop.training_data))
    if data.packing:
        rows = f"packed into sequences of {data.seq_length} tokens"
    elif data.pad_to_longest:
        rows = f"one sample a row, padded to the longest of a batch, at most {data.seq_length}"
    else:
        rows = f"one sample a row, padded to {data.seq_length} tokens (--packing wastes less)"
    ranks, micro = settings.parallel.data_parallel_size, data.micro_batch_size
    count = loop.global_batch_size // (ranks * micro)
    batch = f"global batch {loop.global_batch_size} = DP {ranks} x {count} micro-batches of {micro}"
    if loop.step_batch_size_schedule:
        sizes = [
            f"{size} from sample {start // data.seq_length:,} on"
            for start, size in growing_batches(loop.step_batch_size_schedule)
        ]
        batch = f"global batch {', '.join(sizes)}, in micro-batches of {micro} on DP {ranks}"
    if settings.kept_batch:
        batch += ", as the run that is resumed"
    return f"{paths}; {rows}; {batch}"


def _validation_text(settings: Settings) -> str:
    loop, training = settings.loop, settings.training
    paths = " ".join(map(str, loop.valid_data_path or ()))
    if not loop.eval_iters:
        return f"{paths}, which is never read: --eval-iters 0"
    count = "all of it" if loop.eval_iters == WHOLE else f"the first {loop.eval_iters} batches"
    batch = f"{count}, {loop.eval_global_batch_size} samples at a time,"
    ends = []
    if training.early_stop_patience is not None:
        ends.append(f"the run ends after {training.early_stop_patience} without a lower loss")
    if training.keep_best:
        ends.append("the checkpoint with the lowest loss is kept")
    return "; ".join([f"{paths}; {batch} every {loop.eval_interval} steps", *ends])


def _schedule_text(settings: Settings) -> str:
    loop, schedule, training = settings.loop, settings.schedule, settings.training
    length = f"{loop.train_iters} steps" if loop.train_iters else f"{loop.train_samples} samples"
    if loop.step_batch_size_schedule and loop.train_samples:
        growing, samples = loop.step_batch_size_schedule, loop.train_samples
        taken = samples_of_growing_batches(growing, samples, settings.data.seq_length)
        length += f" and {taken - samples} more, which fill the last step" * (taken > samples)
    if training.num_epochs:
        length = counted(training.num_epochs, "epoch")
    decay = f"{schedule.lr_decay_style} to {schedule.min_lr:g}"
    rate = f"learning rate {schedule.lr:g}{' after a warm-up' if schedule.has_warmup else ''}"
    return f"{length}, {rate}{'' if schedule.lr_decay_style == 'constant' else f', {decay}'}"


def _memory_text(settings: Settings, a: Architecture) -> str:
    if not (settings.compute.bf16 and settings.loop.use_distributed_optimizer):
        return "not estimated: the estimate needs --bf16 with --use-distributed-optimizer"
    trained = trained_of(settings, a, settings.model.folder)
    stages = memory.stages_of_settings(settings, a, _layout_of(settings.parallel, a), trained)
    return f"about {max(stages, key=lambda stage: stage.total)}"


def _writes_text(settings: Settings, a: Architecture) -> str:
    model, logs, training = settings.model, settings.logs, settings.training
    save, interval = settings.checkpoints.save, settings.checkpoints.save_interval
    trains_adapter = settings.lora.trains_adapter
    writes = []
    if save:
        every = f"every {interval} steps and " if interval else ""
        writes.append(f"checkpoints to {save} {every}at the end")
    if model.save_hf:
        kind = "PEFT adapters" if trains_adapter else "Hugging Face checkpoints"
        writes.append(f"{kind} to {model.save_hf}")
        trains_mtp = settings.loop.mtp_num_layers
        copies = a.mtp_num_hidden_layers and not (trains_adapter or trains_mtp)
        if copies and holder_of_mtp(model.folder, a) is None:
            writes[-1] += (
                f" without mtp.*, the MTP layer, of which {model.folder} has no weights: name a "
                "checkpoint that has them in --hf-model"
            )
    budgets = [
        f"--{name.replace('_', '-')} {value:g}"
        for name, value in asdict(settings.data.media_limits).items()
        if value is not None
    ]
    if budgets and a.has_vision and (save or model.save_hf):
        of_adapter = "; an adapter has no processor" if trains_adapter else ""
        writes.append(f"the processor beside them has {', '.join(budgets)}{of_adapter}")
    # A config alone is a shape.
    if (save or model.save_hf) and settings.loss.flag != "--task" and model.folder.is_dir():
        # It imports the generation of transformers, which takes seconds.
        from mcore_qwen3vl.generation.sampling import unlisted_turn_end

        if end := unlisted_turn_end(model.folder):
            # An adapter has no such file, and an export has it only if the model does.
            exported = not trains_adapter and (model.folder / "generation_config.json").is_file()
            how = "it is added beside them" if exported else "add it there"
            writes.append(
                f"eos_token_id of {model.hf_model} lacks {end.token} ({end.id}), which ends "
                f"the template's turns: {how}"
            )
    if model.model_card:
        note = settings.start and note_on_base(name_of_model(settings.start))
        writes.append(f"a model card beside them{f': {note.removesuffix(".")}' if note else ''}")
    if training.log_json:
        writes.append(f"numbers to {training.log_json}")
    if training.log_records:
        writes.append(f"names of records to {training.log_records}")
    if training.log_to:
        writes.append(f"numbers to {', '.join(training.log_to)}")
    if logs.tensorboard_dir:
        writes.append(f"TensorBoard to {logs.tensorboard_dir}")
    if not (save or model.save_hf):
        writes.append("no checkpoint (--save DIR)")
    kept = f"to {Path(save) / LOGS}" if save else "is not kept"
    return "; ".join([*writes, f"Megatron's own log {kept} (--verbose: here)"])
