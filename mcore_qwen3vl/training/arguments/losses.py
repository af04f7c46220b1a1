"""The flags of the losses of ``--loss``, and checks of them before anything is built."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.flags import Flag, Folder
from mcore_qwen3vl.objectives.settings import (
    DEFAULTS,
    TEACHER_TOP_K,
    Distillation,
    Divergence,
    DpoKind,
    Kto,
    Preference,
    check_top_k,
)
from mcore_qwen3vl.training.arguments.lora import asked as asks_for_lora

LOSSES = ("dpo", "simpo", "orpo")
"""Names of the losses over preference pairs for ``--loss``."""
KTO = "kto"
"""Name of the loss over labelled records."""
DISTILL = "distill"
"""Name of the loss of a student."""

Reference = Literal["adapter", "file", "model"]


@dataclass(frozen=True)
class PreferenceSettings:
    """The settings of the losses over pairs, and of KTO; None: the loss's own default."""

    beta: Annotated[float | None, Flag(aliases=("--dpo-beta",))] = None
    """dpo, kto: cost of deviating from the reference; simpo: scale of the rewards; orpo: weight of
    the odds ratio; default 0.1, with simpo 2.0"""
    dpo_loss: DpoKind | None = None
    """loss of a pair; default sigmoid"""
    dpo_label_smoothing: float | None = None
    """share of pairs that are labelled the wrong way round; default 0"""
    rpo_alpha: float | None = None
    """dpo, simpo: weight of the chosen answer's own loss, a mean over its tokens; default 0 (always
    1 with orpo)"""
    simpo_gamma: float | None = None
    """margin that the rewards of a pair should have; default 1.0"""
    desirable_weight: float | None = None
    """kto: weight of the losses of answers with the label true; default 1"""
    undesirable_weight: float | None = None
    """kto: weight of the losses of answers with the label false; default 1"""
    reference: Annotated[Reference | None, Flag(aliases=("--dpo-reference",))] = None
    """adapter: the model with its LoRA switched off (the default with LoRA from scratch); file:
    NAME.scores.jsonl beside each NAME.jsonl, which `mcore-qwen3vl score` writes (not with kto;
    otherwise the default); model: a frozen model in memory (the default with kto and without
    LoRA)"""
    reference_model: Folder | None = None
    """with --reference model: its checkpoint or hub id (default: what training starts from,
    --load-hf or --pretrained-checkpoint)"""


_LOSSES_OF = {
    "beta": (*LOSSES, KTO),
    "dpo_loss": ("dpo",),
    "dpo_label_smoothing": ("dpo",),
    "rpo_alpha": ("dpo", "simpo"),
    "simpo_gamma": ("simpo",),
    "reference": ("dpo", KTO),
    "reference_model": ("dpo", KTO),
    "desirable_weight": (KTO,),
    "undesirable_weight": (KTO,),
}
"""The losses that each argument is for."""


@dataclass(frozen=True)
class DistillationSettings:
    """The settings of ``--loss distill``, and its teacher; None: the loss's own default."""

    distill_divergence: Divergence | None = None
    """of the student from the teacher: forward KL (teacher || student), reverse KL (student ||
    teacher) or Jensen-Shannon; default forward"""
    distill_beta: float | None = None
    """with jsd: share of the teacher in the mixture, as in GKD; default 0.5"""
    distill_temperature: float | None = None
    """the logits of both are divided by this; give `mcore-qwen3vl score` the same --temperature;
    default 1"""
    distill_alpha: float | None = None
    """share of the cross entropy in the loss; default 0"""
    teacher: Folder | None = None
    """a teacher in memory, on the same GPUs: a checkpoint of any Qwen3-VL with the student's
    vocabulary, or hub id (default: the tokens that `mcore-qwen3vl score --top-k` wrote beside the
    data)"""
    teacher_top_k: Annotated[int | None, Flag("K")] = None
    """with --teacher: number of its likeliest tokens to learn from; default 64"""


_DISTILLATION = {f"distill_{field.name}": field.name for field in fields(Distillation)}
"""The settings of distillation by their arguments."""

_ROUTER_LOSSES = ("moe_aux_loss_coeff", "moe_z_loss_coeff")


def kto_of(args: argparse.Namespace) -> Kto:
    """Return KTO's settings from the flags, or raise BadInput for a value out of range."""
    names = ("beta", "desirable_weight", "undesirable_weight")
    return Kto(**{name: getattr(args, name) for name in names if getattr(args, name) is not None})


def preference_of(args: argparse.Namespace) -> Preference:
    """Return the settings of a loss over pairs, or raise BadInput for a value out of range."""
    kind = args.dpo_loss if args.loss == "dpo" else args.loss
    given = {
        "kind": kind,
        "beta": args.beta,
        "label_smoothing": args.dpo_label_smoothing,
        "rpo_alpha": args.rpo_alpha,
        "gamma": args.simpo_gamma,
    }
    given = {name: value for name, value in given.items() if value is not None}
    return Preference(**(DEFAULTS.get(kind, {}) | given))


def reference_of(args: argparse.Namespace) -> Reference | None:
    """Return where the reference's log-probabilities come from; None if the loss has no reference.

    An adapter that training starts from (``--lora-init``) is part of the reference. Switching it
    off would lose that, so the default is then ``file``, or ``model`` for KTO, which has no file.
    """
    if args.loss in LOSSES and not preference_of(args).has_reference:
        return None
    if args.reference is not None:
        return args.reference
    from_scratch = asks_for_lora(args) and not (args.lora_init or args.lora_modules_to_save)
    return "adapter" if from_scratch else "model" if args.loss == KTO else "file"


def preference_defaults(explicit: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of Megatron's arguments for losses that are no mean over tokens."""
    if explicit.get("loss") not in (*LOSSES, KTO) and explicit.get("task") is None:
        return {}
    return {"moe_aux_loss_coeff": 0.0}


def check_preference(args: argparse.Namespace) -> None:
    """Raise BadInput if the flags of preference training do not fit one another or the others."""
    if args.reference and args.loss in LOSSES and args.loss not in _LOSSES_OF["reference"]:
        raise BadInput(
            f"--reference {args.reference} with --loss {args.loss}, which has no reference: drop "
            "the flag."
        )
    for name, losses in _LOSSES_OF.items():
        if args.loss not in losses:
            refuse_without(f"--loss {listed(losses)}", args, [name])
    if args.loss not in (*LOSSES, KTO):
        return
    _ = kto_of(args) if args.loss == KTO else preference_of(args)
    loss = f"--loss {args.loss}"
    if args.overlong == "truncate":
        raise BadInput(
            f"--overlong truncate with {loss}: an answer that is cut has no "
            "log-probability. Leave the flag out: pairs that are too long are then left out."
        )
    refuse_router_losses(args, loss, "answers" if args.loss == KTO else "pairs")
    if args.loss == KTO:
        _check_kto(args)
    if reference_of(args) == "adapter":
        _check_adapter_reference(args)
    if reference_of(args) == "model":
        _name_reference_model(args)
    else:
        refuse_without("--reference model", args, ["reference_model"])


def listed(losses: Sequence[str]) -> str:
    """Return names as text: "dpo", "dpo or simpo", "dpo, simpo or orpo"."""
    return " or ".join(filter(None, (", ".join(losses[:-1]), losses[-1])))


def refuse_without(owner: str, args: argparse.Namespace, names: Sequence[str]) -> None:
    """Raise BadInput if one of `names` is set, which have a meaning only with the flag `owner`."""
    if given := [name for name in names if getattr(args, name) is not None]:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise BadInput(f"{flags} is set without {owner}: add it, or drop the flag.")


def refuse_router_losses(args: argparse.Namespace, owner: str, unit: str) -> None:
    """Raise BadInput if a router's loss is added to that of flag `owner`, a mean over `unit`."""
    for name in _ROUTER_LOSSES:
        if getattr(args, name, None):
            raise BadInput(
                f"--{name.replace('_', '-')} {getattr(args, name):g} with {owner}: Megatron "
                f"adds the router's losses up over tokens, and this loss is a mean over {unit}, so "
                "they would weigh hundreds of times too much. Set it to 0."
            )


def _check_kto(args: argparse.Namespace) -> None:
    if reference_of(args) == "file":
        raise BadInput(
            "--reference file with --loss kto: the baseline needs the reference's "
            "log-probabilities of answers to other prompts of the micro-batch, which no file has. "
            "Drop the flag: the reference is then the model without its LoRA, or a frozen model."
        )
    if args.eval_iters and args.eval_micro_batch_size == 1 and args.packing:
        raise BadInput(
            "--loss kto with --packing: a validation is not packed, and the records of a "
            "micro-batch exchange their answers: add --eval-micro-batch-size 2 or more."
        )
    if args.micro_batch_size == 1 and not args.packing:
        raise BadInput(
            "--loss kto with --micro-batch-size 1: the records of a micro-batch exchange their "
            "answers for the baseline. Add --packing, or set --micro-batch-size 2 or more."
        )


def _check_adapter_reference(args: argparse.Namespace) -> None:
    if not asks_for_lora(args):
        raise BadInput(
            "--reference adapter needs an adapter to switch off: add --lora-rank 16, or choose "
            "--reference model, or precompute the reference with `mcore-qwen3vl score` "
            "(--reference file, not with kto)."
        )
    if args.lora_modules_to_save:
        raise BadInput(
            "--reference adapter with --lora-modules-to-save: what trains whole cannot be "
            "switched off. Precompute the reference with `mcore-qwen3vl score` (--reference "
            "file), or drop --lora-modules-to-save."
        )


def _name_reference_model(args: argparse.Namespace) -> None:
    """Set the checkpoint of the reference model to what training starts from, if none is given.

    A resumed run loads its own checkpoint, so only the flags of a run's start can name it.
    If these do not, it raises BadInput.
    """
    start = args.pretrained_checkpoint or args.load_hf
    resumes = args.load is None or (args.save and Path(args.load) == Path(args.save))
    other = "--lora-init" if args.lora_init else "" if resumes else "--load"
    if args.reference_model is None and (other or start is None):
        why = f"with {other}" if other else "without --load-hf or --pretrained-checkpoint"
        raise BadInput(
            f"--reference model {why}: no flag names the weights that training started from. Name "
            "a checkpoint that has them with --reference-model DIR."
        )
    args.reference_model = args.reference_model or start


def distillation_of(args: argparse.Namespace) -> Distillation:
    """Return distillation's settings from the flags, or raise BadInput for a value out of range."""
    given = {name: getattr(args, flag) for flag, name in _DISTILLATION.items()}
    return Distillation(**{name: value for name, value in given.items() if value is not None})


def check_distillation(args: argparse.Namespace) -> None:
    """Raise BadInput if the flags of distillation do not fit one another or the others."""
    if args.loss != DISTILL:
        refuse_without(f"--loss {DISTILL}", args, [*_DISTILLATION, "teacher", "teacher_top_k"])
        return
    _check_teacher(args)
    if distillation_of(args).divergence != "jsd":
        refuse_without("--distill-divergence jsd", args, ["distill_beta"])
    if args.overlong == "truncate" and not args.teacher:
        raise BadInput(
            f"--overlong truncate with --loss {DISTILL}: the teacher saw whole samples. Leave the "
            "flag out: samples that are too long are then left out."
        )
    if args.head_chunk == 0 or args.defer_embedding_wgrad_compute:
        flag = "--no-chunked-head" if args.head_chunk == 0 else "--defer-embedding-wgrad-compute"
        raise BadInput(
            f"{flag} with --loss {DISTILL}, which reads the logits in chunks: drop the flag."
        )


def _check_teacher(args: argparse.Namespace) -> None:
    """Check the flags of a live teacher, and set the number of its tokens if none is given."""
    if not args.teacher:
        refuse_without("--teacher DIR", args, ["teacher_top_k"])
    elif args.teacher_top_k is None:
        args.teacher_top_k = min(TEACHER_TOP_K, args.vocab_size)
    else:
        check_top_k("--teacher-top-k", args.teacher_top_k, args.vocab_size)
