"""The flags of the losses of ``--loss`` and of tasks, with checks of them before anything is built.

A task, ``--task``, is another one than predicting tokens, and has its own loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.flags import Flag, Folder
from mcore_qwen3vl.losses.loss import refuse_router_losses, refuse_without
from mcore_qwen3vl.losses.registry import kind_of
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
from mcore_qwen3vl.training.arguments.lora import LoraSettings
from mcore_qwen3vl.training.arguments.run import DISTILL, KTO, LOSSES, RunSettings

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

    @property
    def kto(self) -> Kto:
        """KTO's settings; BadInput for a value out of range."""
        return Kto(
            **_without_none({field.name: getattr(self, field.name) for field in fields(Kto)})
        )

    def pair_settings(self, loss: str) -> Preference:
        """Return the settings of a `loss` over pairs; BadInput for a value out of range."""
        kind = self.dpo_loss if loss == "dpo" else loss
        values = {
            "kind": kind,
            "beta": self.beta,
            "label_smoothing": self.dpo_label_smoothing,
            "rpo_alpha": self.rpo_alpha,
            "gamma": self.simpo_gamma,
        }
        return Preference(**(DEFAULTS.get(kind or "", {}) | _without_none(values)))

    def reference_of(self, loss: str, lora: LoraSettings) -> Reference | None:
        """Return where the log-probabilities of `loss`'s reference come from; None: it has none."""
        if loss != KTO and not (loss in LOSSES and self.pair_settings(loss).has_reference):
            return None
        if self.reference is not None:
            return self.reference
        # An adapter of --lora-init is part of the reference, and switching it off would lose that.
        # The default is then a file of log-probabilities, or the model for KTO, which has no file.
        from_scratch = lora.trains_adapter and not (lora.lora_init or lora.lora_modules_to_save)
        return "adapter" if from_scratch else "model" if loss == KTO else "file"

    def complete(self, run: RunSettings, lora: LoraSettings) -> Self:
        """Return these settings with the reference model named, if the loss has one.

        It raises BadInput if the flags do not fit one another or the others.
        """
        loss = run.training.loss
        if self.reference and loss in LOSSES and loss not in _LOSSES_OF["reference"]:
            raise BadInput(
                f"--reference {self.reference} with --loss {loss}, which has no reference: drop "
                "the flag."
            )
        for name, losses in _LOSSES_OF.items():
            if loss not in losses:
                refuse_without(f"--loss {_join_names(losses)}", _values(self, [name]))
        if loss not in (*LOSSES, KTO):
            return self
        _ = self.kto if loss == KTO else self.pair_settings(loss)  # made to check their values
        if run.data.overlong == "truncate":
            raise BadInput(
                f"--overlong truncate with --loss {loss}: an answer that is cut has no "
                "log-probability. Leave the flag out: pairs that are too long are then left out."
            )
        refuse_router_losses(run, f"--loss {loss}", "answers" if loss == KTO else "pairs")
        reference = self.reference_of(loss, lora)
        if loss == KTO:
            _check_kto(run, reference)
        if reference == "adapter":
            _check_adapter_reference(lora)
        if reference == "model":
            return replace(self, reference_model=self._model_of_reference(run, lora))
        refuse_without("--reference model", _values(self, ["reference_model"]))
        return self

    def _model_of_reference(self, run: RunSettings, lora: LoraSettings) -> str:
        """Return the checkpoint of the reference model; by default what training starts from."""
        if self.reference_model:
            return self.reference_model
        load, save = run.checkpoints.load, run.checkpoints.save
        # A resumed run loads its own checkpoint, so only the flags of a run's start can name it.
        resumes = load is None or (save and Path(load) == Path(save))
        other = "--lora-init" if lora.lora_init else "" if resumes else "--load"
        if other or run.start is None:
            why = f"with {other}" if other else "without --load-hf or --pretrained-checkpoint"
            raise BadInput(
                f"--reference model {why}: no flag names the weights that training started from. "
                "Name a checkpoint that has them with --reference-model DIR."
            )
        return run.start


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
    """a teacher in memory, on the same GPUs: a checkpoint of any size with the student's
    vocabulary, or hub id (default: the tokens that `mcore-qwen3vl score --top-k` wrote beside the
    data)"""
    teacher_top_k: Annotated[int | None, Flag("K")] = None
    """with --teacher: number of its likeliest tokens to learn from; default 64"""

    @property
    def loss(self) -> Distillation:
        """The loss's settings; BadInput for a value out of range."""
        values = {name: getattr(self, flag) for flag, name in _DISTILLATION.items()}
        return Distillation(**_without_none(values))

    def complete(self, run: RunSettings, vocab_size: int) -> Self:
        """Return these settings with the number of a live teacher's tokens, if there is one.

        It raises BadInput if the flags do not fit one another or the others.
        """
        if run.training.loss != DISTILL:
            names = [*_DISTILLATION, "teacher", "teacher_top_k"]
            refuse_without(f"--loss {DISTILL}", _values(self, names))
            return self
        top_k = self.teacher_top_k
        if not self.teacher:
            refuse_without("--teacher DIR", _values(self, ["teacher_top_k"]))
        elif top_k is None:
            top_k = min(TEACHER_TOP_K, vocab_size)
        else:
            check_top_k("--teacher-top-k", top_k, vocab_size)
        if self.loss.divergence != "jsd":
            refuse_without("--distill-divergence jsd", _values(self, ["distill_beta"]))
        if run.data.overlong == "truncate" and not self.teacher:
            raise BadInput(
                f"--overlong truncate with --loss {DISTILL}: the teacher saw whole samples. Leave "
                "the flag out: samples that are too long are then left out."
            )
        not_chunked = run.training.head_chunk == 0
        if not_chunked or run.compute.defer_embedding_wgrad_compute:
            flag = "--no-chunked-head" if not_chunked else "--defer-embedding-wgrad-compute"
            raise BadInput(
                f"{flag} with --loss {DISTILL}, which reads the logits in chunks: drop the flag."
            )
        return replace(self, teacher_top_k=top_k)


_DISTILLATION = {f"distill_{field.name}": field.name for field in fields(Distillation)}
"""The settings of distillation by their arguments."""


def defaults_of_sample_losses(explicit: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of Megatron's arguments for losses that are no mean over tokens."""
    of_samples = explicit.get("loss") in (*LOSSES, KTO) or kind_of(explicit) is not None
    # A router's balancing loss is a mean over tokens, and cannot be added to them.
    return {"moe_aux_loss_coeff": 0.0} if of_samples else {}


def _values(settings: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in names}


def _join_names(losses: Sequence[str]) -> str:
    """Return names as text: "dpo", "dpo or simpo", "dpo, simpo or orpo"."""
    return " or ".join(filter(None, (", ".join(losses[:-1]), losses[-1])))


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `values` that flags give; the loss has its own defaults for the others."""
    return {name: value for name, value in values.items() if value is not None}


def _check_kto(run: RunSettings, reference: Reference | None) -> None:
    """Raise BadInput where the baseline lacks the reference, or answers to exchange."""
    if reference == "file":
        raise BadInput(
            "--reference file with --loss kto: the baseline needs the reference's "
            "log-probabilities of answers to other prompts of the micro-batch, which no file has. "
            "Drop the flag: the reference is then the model without its LoRA, or a frozen model."
        )
    if run.loop.eval_iters and run.loop.eval_micro_batch_size == 1 and run.data.packing:
        raise BadInput(
            "--loss kto with --packing: a validation is not packed, and the records of a "
            "micro-batch exchange their answers: add --eval-micro-batch-size 2 or more."
        )
    if run.data.micro_batch_size == 1 and not run.data.packing:
        raise BadInput(
            "--loss kto with --micro-batch-size 1: the records of a micro-batch exchange their "
            "answers for the baseline. Add --packing, or set --micro-batch-size 2 or more."
        )


def _check_adapter_reference(lora: LoraSettings) -> None:
    """Raise BadInput unless all that trains is an adapter, which can be switched off."""
    if not lora.trains_adapter:
        raise BadInput(
            "--reference adapter needs an adapter to switch off: add --lora-rank 16, or choose "
            "--reference model, or precompute the reference with `mcore-qwen3vl score` "
            "(--reference file, not with kto)."
        )
    if lora.lora_modules_to_save:
        raise BadInput(
            "--reference adapter with --lora-modules-to-save: what trains whole cannot be "
            "switched off. Precompute the reference with `mcore-qwen3vl score` (--reference "
            "file), or drop --lora-modules-to-save."
        )
