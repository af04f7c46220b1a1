"""The flags of preference training, and checks of them before anything is built."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.objectives.settings import DEFAULTS, DpoKind, Kto, Preference
from mcore_qwen3vl.training.arguments.flag_table import add_flags
from mcore_qwen3vl.training.lora.flags import asked as asks_for_lora

LOSSES = ("dpo", "simpo", "orpo")
"""Names of the losses over preference pairs for ``--loss``."""
KTO = "kto"
"""Name of the loss over labelled records."""

Reference = Literal["adapter", "file", "model"]

_FLAGS = {
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

_ROUTER_LOSSES = ("moe_aux_loss_coeff", "moe_z_loss_coeff")


def add_preference_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flags of preference training to `group`."""
    default, simpo = Preference(), DEFAULTS["simpo"]
    answers = "kto: weight of the losses of answers with the label {}; default 1"
    flags = {
        "--beta,--dpo-beta X": "dpo, kto: cost of deviating from the reference; simpo: scale of "
        f"the rewards; orpo: weight of the odds ratio; default {default.beta}, with simpo "
        f"{simpo['beta']}",
        f"--dpo-loss {'|'.join(get_args(DpoKind))}": f"loss of a pair; default {default.kind}",
        "--dpo-label-smoothing X": "share of pairs that are labelled the wrong way round; default "
        "0",
        "--rpo-alpha X": "dpo, simpo: weight of the chosen answer's own loss, a mean over its "
        "tokens; default 0 (always 1 with orpo)",
        "--simpo-gamma X": "margin that the rewards of a pair should have; default "
        f"{simpo['gamma']}",
        "--desirable-weight X": answers.format("true"),
        "--undesirable-weight X": answers.format("false"),
        f"--reference,--dpo-reference {'|'.join(get_args(Reference))}": "adapter: the model with "
        "its LoRA switched off (the default with LoRA from scratch); file: NAME.scores.jsonl "
        "beside each NAME.jsonl, which `mcore-qwen3vl score` writes (not with kto; otherwise the "
        "default); model: a frozen model in memory (the default with kto and without LoRA)",
        "--reference-model DIR": "with --reference model: its checkpoint or hub id (default: what "
        "training starts from, --load-hf or --pretrained-checkpoint)",
    }
    add_flags(group, flags)


def kto_of(args: argparse.Namespace) -> Kto:
    """Return the settings of the loss over labelled records from the flags.

    Raises:
        BadInput: a value is out of range.
    """
    names = ("beta", "desirable_weight", "undesirable_weight")
    return Kto(**{name: getattr(args, name) for name in names if getattr(args, name) is not None})


def preference_of(args: argparse.Namespace) -> Preference:
    """Return the loss's settings from the flags.

    Raises:
        BadInput: a value makes no sense for the loss.
    """
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
        chosen: Reference = args.reference
        return chosen
    from_scratch = asks_for_lora(args) and not (args.lora_init or args.lora_modules_to_save)
    return "adapter" if from_scratch else "model" if args.loss == KTO else "file"


def preference_defaults(explicit: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of Megatron's arguments for losses that are no mean over tokens."""
    if explicit.get("loss") not in (*LOSSES, KTO) and explicit.get("task") is None:
        return {}
    return {"moe_aux_loss_coeff": 0.0}


def check_preference(args: argparse.Namespace) -> None:
    """Check the flags of preference training against the others.

    Raises:
        BadInput: flags do not fit together; the message names them and the remedy.
    """
    if args.reference and args.loss in LOSSES and args.loss not in _FLAGS["reference"]:
        raise BadInput(
            f"--reference {args.reference} with --loss {args.loss}, which has no reference: drop "
            "the flag."
        )
    for name, losses in _FLAGS.items():
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
    """
    Raises:
        BadInput: one of the arguments `names` is set, which have a meaning only with flag `owner`.
    """
    if given := [name for name in names if getattr(args, name) is not None]:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise BadInput(f"{flags} is set without {owner}: add it, or drop the flag.")


def refuse_router_losses(args: argparse.Namespace, owner: str, unit: str) -> None:
    """
    Raises:
        BadInput: a router's loss is added to that of flag `owner`, which is a mean over `unit`.
    """
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

    Raises:
        BadInput: these flags do not name it.
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
