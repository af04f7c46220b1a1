"""A summary of what a run will do: a dozen lines at its start."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.console import counted, plain, visible
from mcore_qwen3vl.converters.mapping import parameters
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime.gpus import c_compiler
from mcore_qwen3vl.training import memory
from mcore_qwen3vl.training.arguments import lora as lora_flags
from mcore_qwen3vl.training.arguments import losses as preference
from mcore_qwen3vl.training.arguments.defaults import WHOLE, statement
from mcore_qwen3vl.training.arguments.losses import DISTILL, distillation_of
from mcore_qwen3vl.training.arguments.settings import media_limits
from mcore_qwen3vl.training.arguments.tasks import answers_of, contrastive_of, labels_of, ranking_of
from mcore_qwen3vl.training.folders import LOGS
from mcore_qwen3vl.training.second_model import architecture_of, source_of

if TYPE_CHECKING:
    from mcore_qwen3vl.generation.decoding import TurnEnd
    from mcore_qwen3vl.training.checkpoints.resume import OtherMaker
    from mcore_qwen3vl.training.lora import LoraRun


_LOSS_NAMES = {"simpo": "SimPO", "orpo": "ORPO"}
_REFERENCES = {
    "adapter": "the model with its adapter switched off",
    "file": "NAME.scores.jsonl beside each NAME.jsonl of the data",
    "model": "a frozen model in memory",
    None: "none: the loss has no reference",
}


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
    args: argparse.Namespace,
    a: Architecture,
    explicit: Collection[str],
    lora: LoraRun | None = None,
    other: OtherMaker | None = None,
) -> list[tuple[str, str]]:
    """Say what a run will do, in rows of a name and a description in words."""
    rows = [
        ("model", _model(args.hf_model, a)),
        ("weights", _weights(args, lora, other)),
        *([("trains", _adapter(args, a, lora))] if lora else []),
        *(_preference(args) if args.loss in preference.LOSSES else []),
        *(_kto(args) if args.loss == preference.KTO else []),
        *(_distillation(args) if args.loss == DISTILL else []),
        *(_task(args) if args.task else []),
        *_second(args, a),
        ("layout", _layout(args)),
        ("precision", _precision(args)),
        ("data", _data(args)),
        *([("validation", _validation(args))] if args.valid_data_path else []),
        ("schedule", _schedule(args)),
        ("memory", _memory(args, a)),
        ("writes", _writes(args)),
    ]
    if not args.cpu and c_compiler() is None:
        rows.append(("kernels", "not fused: there is no C compiler (CC, gcc, clang)"))
    taken = statement(args, explicit)
    return [*rows, ("defaults", taken)] if taken else rows


def _model(path: str, a: Architecture) -> str:
    size = _millions(parameters.total(a))
    kind = f"MoE, {a.num_experts} experts" if a.is_moe else "dense"
    layers = f"{a.num_hidden_layers} decoder layers, {a.vision.depth} vision blocks"
    return f"Qwen3-VL of {size} parameters ({kind}; {layers}), {path}"


def _second(args: argparse.Namespace, a: Architecture) -> list[tuple[str, str]]:
    source, architecture = source_of(args), architecture_of(args, a)
    if source is None or architecture is None:
        return []
    return [("frozen", _model(source.path, architecture))]


def _millions(count: int) -> str:
    return f"{count / 1e9:.2f}B" if count >= 1e8 else f"{count / 1e6:.2f}M"


def _adapter(args: argparse.Namespace, a: Architecture, lora: LoraRun) -> str:
    config, count = lora.config, lora.parameters
    where = args.lora_init or args.lora_config or " ".join(args.lora_target or ["language"])
    ranks = ", ".join(map(str, sorted({target.r for target in lora.targets.values()})))
    whole = f", and {', '.join(config.modules_to_save)} whole" if config.modules_to_save else ""
    return (
        f"a LoRA adapter of rank {ranks or 'none'}, alpha {config.lora_alpha:g} on "
        f"{len(lora.targets)} matrices ({where}){whole}: {_millions(count)} parameters, "
        f"{count / parameters.total(a):.2%} of the model's"
    )


def _task(args: argparse.Namespace) -> list[tuple[str, str]]:
    if args.task == "reranker":
        return [("loss", f"{ranking_of(args)}, from the answers {' and '.join(answers_of(args))}")]
    if args.task == "reward":
        return [
            ("loss", "Bradley-Terry over pairs"),
            ("head", "score, one value at the last token"),
        ]
    if labels := labels_of(args):
        names = ", ".join(labels.names)
        return [
            ("loss", f"{'binary ' * (not labels.is_single)}cross entropy over labels"),
            ("head", f"score, {len(labels)} labels at the last token: {names:.200}"),
        ]
    loss = contrastive_of(args)
    cut = f", embeddings cut to {', '.join(map(str, loss.dimensions))}" if loss.dimensions else ""
    scale = "" if loss.kind == "cosine" else f", temperature {loss.temperature:g}"
    return [
        ("loss", f"{loss.kind} of embeddings{scale}{cut}"),
        ("head", "none: the model is trained and written without lm_head"),
    ]


def _preference(args: argparse.Namespace) -> list[tuple[str, str]]:
    loss = preference.preference_of(args)
    extra = f", gamma {loss.gamma:g}" if loss.gamma else ""
    extra += f", label smoothing {loss.label_smoothing:g}" if loss.label_smoothing else ""
    extra += f", chosen answer's own loss x {loss.rpo_alpha:g}" if loss.rpo_alpha else ""
    return [
        ("loss", f"{_LOSS_NAMES.get(loss.kind, f'DPO ({loss.kind})')}, beta {loss.beta:g}{extra}"),
        ("reference", _REFERENCES[preference.reference_of(args)]),
    ]


def _kto(args: argparse.Namespace) -> list[tuple[str, str]]:
    loss = preference.kto_of(args)
    weights = f"desirable x {loss.desirable_weight:g}, undesirable x {loss.undesirable_weight:g}"
    return [
        ("loss", f"KTO, beta {loss.beta:g}, {weights}"),
        ("reference", _REFERENCES[preference.reference_of(args)]),
    ]


def _distillation(args: argparse.Namespace) -> list[tuple[str, str]]:
    loss = distillation_of(args)
    beta = f", beta {loss.beta:g}" if loss.divergence == "jsd" else ""
    teacher = "NAME.topk.arrow beside each NAME.jsonl of the data"
    if args.teacher:
        teacher = f"a frozen model in memory, its {args.teacher_top_k} likeliest tokens"
    mixed = f", cross entropy x {loss.alpha:g}" if loss.alpha else ""
    return [
        ("loss", f"distillation, {loss.divergence}{beta}, temperature {loss.temperature:g}{mixed}"),
        ("teacher", teacher),
    ]


def _weights(args: argparse.Namespace, lora: LoraRun | None, other: OtherMaker | None) -> str:
    from mcore_qwen3vl.training.model import resuming

    if other:
        return f"from {other.folder}, written by {other.maker}"
    if resuming(args):
        return f"the newest checkpoint in {args.load}"
    if base := lora.base.path if lora else args.load_hf or args.pretrained_checkpoint:
        return f"from {base}"
    return "random: --load-hf DIR starts from a Hugging Face checkpoint, --load DIR from Megatron's"


def _layout_of(args: argparse.Namespace) -> Layout:
    layout = Layout.from_flags(args, args.world_size, moe=bool(args.num_experts))
    # Megatron sets a dense model's ETP to TP too.
    return layout if args.num_experts else replace(layout, etp=1)


def _layout(args: argparse.Namespace) -> str:
    layout = _layout_of(args)
    ranks = f"{args.world_size} rank{'s' if args.world_size > 1 else ''}"
    device = "the CPU" if args.cpu else "GPUs"
    return f"{layout} on {ranks} on {device}, layer spec {args.spec[0]}"


def _precision(args: argparse.Namespace) -> str:
    if args.fp8:
        return f"{args.fp8} in FP8 layers, the rest bf16"
    if args.bf16 or args.fp16:
        return f"{'bf16' if args.bf16 else 'fp16'}, master weights and optimizer fp32"
    if args.cpu:
        return "fp32; --bf16 computes in bfloat16"
    return "fp32, whose attention is not fused: much slower than --bf16, and in far more memory"


def _data(args: argparse.Namespace) -> str:
    paths = " ".join(map(str, args.train_data_path or args.data_path))
    if args.packing:
        rows = f"packed into sequences of {args.seq_length} tokens"
    elif args.pad_to_longest:
        rows = f"one sample a row, padded to the longest of a batch, at most {args.seq_length}"
    else:
        rows = f"one sample a row, padded to {args.seq_length} tokens (--packing wastes less)"
    ranks, micro = args.data_parallel_size, args.micro_batch_size
    count = args.global_batch_size // (ranks * micro)
    batch = f"global batch {args.global_batch_size} = DP {ranks} x {count} micro-batches of {micro}"
    if args.kept_global_batch:
        batch += ", as the run that is resumed"
    return f"{paths}; {rows}; {batch}"


def _validation(args: argparse.Namespace) -> str:
    paths = " ".join(map(str, args.valid_data_path))
    if not args.eval_iters:
        return f"{paths}, which is never read: --eval-iters 0"
    count = "all of it" if args.eval_iters == WHOLE else f"the first {args.eval_iters} batches"
    batch = f"{count}, {args.eval_global_batch_size} samples at a time,"
    ends = []
    if args.early_stop_patience is not None:
        ends.append(f"the run ends after {args.early_stop_patience} without a lower loss")
    if args.keep_best:
        ends.append("the checkpoint with the lowest loss is kept")
    return "; ".join([f"{paths}; {batch} every {args.eval_interval} steps", *ends])


def _schedule(args: argparse.Namespace) -> str:
    length = f"{args.train_iters} steps" if args.train_iters else f"{args.train_samples} samples"
    if args.num_epochs:
        length = counted(args.num_epochs, "epoch")
    warm = args.lr_warmup_iters or args.lr_warmup_samples or args.lr_warmup_fraction
    decay = f"{args.lr_decay_style} to {args.min_lr or 0:g}"
    rate = f"learning rate {args.lr:g}{' after a warm-up' if warm else ''}"
    return f"{length}, {rate}{'' if args.lr_decay_style == 'constant' else f', {decay}'}"


def _memory(args: argparse.Namespace, a: Architecture) -> str:
    if not (args.bf16 and args.use_distributed_optimizer):
        return "not estimated: the estimate needs --bf16 with --use-distributed-optimizer"
    trained = memory.trained_of(args, a, Path(args.hf_model))
    stages = memory.of_flags(args, a, _layout_of(args), trained)
    return f"about {max(stages, key=lambda stage: stage.total)}"


def _turn_end(args: argparse.Namespace) -> TurnEnd | None:
    from mcore_qwen3vl.generation.decoding import unlisted_turn_end

    folder = Path(args.hf_model)
    return unlisted_turn_end(folder) if folder.is_dir() else None  # a config alone is a shape


def _writes(args: argparse.Namespace) -> str:
    writes = []
    if args.save:
        every = f"every {args.save_interval} steps and " if args.save_interval else ""
        writes.append(f"checkpoints to {args.save} {every}at the end")
    if args.save_hf:
        kind = "PEFT adapters" if lora_flags.asked(args) else "Hugging Face checkpoints"
        writes.append(f"{kind} to {args.save_hf}")
    budgets = [
        f"--{name.replace('_', '-')} {value:g}"
        for name, value in asdict(media_limits(args)).items()
        if value is not None
    ]
    if budgets and (args.save or args.save_hf):
        of_adapter = "; an adapter has no processor" if lora_flags.asked(args) else ""
        writes.append(f"the processor beside them has {', '.join(budgets)}{of_adapter}")
    if (args.save or args.save_hf) and not args.task and (end := _turn_end(args)):
        # An adapter has no such file, and an export has it only if the model does.
        is_exported = (Path(args.hf_model) / "generation_config.json").is_file()
        is_exported &= not lora_flags.asked(args)
        how = "it is added beside them" if is_exported else "add it there"
        writes.append(
            f"eos_token_id of {args.hf_model} lacks {end.token} ({end.id}), which ends "
            f"the template's turns: {how}"
        )
    if args.log_json:
        writes.append(f"numbers to {args.log_json}")
    if args.tensorboard_dir:
        writes.append(f"TensorBoard to {args.tensorboard_dir}")
    if not (args.save or args.save_hf):
        writes.append("no checkpoint (--save DIR)")
    log = f"{Path(args.save) / LOGS}" if args.save else ""
    kept = f"to {log}" if log else "is not kept"
    return "; ".join([*writes, f"Megatron's own log {kept} (--verbose: here)"])
