"""What the losses of whole answers share: a reference's log-probabilities, and the policy's.

A reference in memory takes one more forward pass in each step (:mod:`mcore_qwen3vl.losses.passes`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.flags import Flag
from mcore_qwen3vl.lazy import Lazy
from mcore_qwen3vl.losses.loss import (
    FrozenModel,
    Loss,
    refuse_noise,
    refuse_router_losses,
    refuse_without,
)
from mcore_qwen3vl.settings.lora import LoraSettings
from mcore_qwen3vl.settings.run import RunSettings

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import mappings
    from torch import Tensor

    from mcore_qwen3vl import forward
    from mcore_qwen3vl.data.encoding.batch import Batch
    from mcore_qwen3vl.losses import passes
    from mcore_qwen3vl.model import inputs as model_inputs
else:
    torch, dist = Lazy("torch"), Lazy("torch.distributed")
    parallel_state = Lazy("megatron.core.parallel_state")
    mappings = Lazy("megatron.core.tensor_parallel.mappings")
    passes = Lazy("mcore_qwen3vl.losses.passes")
    model_inputs = Lazy("mcore_qwen3vl.model.inputs")
    forward = Lazy("mcore_qwen3vl.forward")

Reference = Literal["adapter", "file", "model"]

UNCUT_ANSWER = (
    "--overlong truncate with preference pairs, labelled records or a teacher: an answer that is "
    "cut has no log-probability. Leave over-long records out (drop)."
)

_IN_WORDS = {
    "adapter": "the model with its adapter switched off",
    "file": "NAME.scores.jsonl beside each NAME.jsonl of the data",
    "model": "a frozen model in memory",
    None: "none: the loss has no reference",
}


@dataclass(frozen=True)
class AnswerLoss(Loss):
    """A loss of answers' log-probabilities, most often beside those of a reference.

    Attributes:
        files_reference: whether the reference's log-probabilities may be read from a file.
    """

    beta: Annotated[float | None, Flag(aliases=("--dpo-beta",))] = None
    """dpo, kto: cost of deviating from the reference; simpo: scale of the rewards; orpo: weight of
    the odds ratio; default 0.1, with simpo 2.0"""
    reference: Annotated[Reference | None, Flag(aliases=("--dpo-reference",), last=True)] = None
    """adapter: the model with its LoRA switched off (the default with LoRA from scratch); file:
    NAME.scores.jsonl beside each NAME.jsonl, which `mcore-qwen3vl score` writes (not with kto;
    otherwise the default); model: a frozen model in memory (the default with kto and without
    LoRA)"""
    reference_model: Annotated[str | None, Flag("DIR", last=True)] = None
    """with --reference model: its checkpoint or hub id (default: what training starts from,
    --load-hf or --pretrained-checkpoint)"""

    group = "qwen3-vl preference"
    files_reference: ClassVar[bool] = True

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the policy with a reference."""
        return True

    def check_values(self) -> None:
        """Raise BadInput for a value out of range."""

    def check_run(self, run: RunSettings, reference: Reference | None) -> None:
        """Raise BadInput if the loss cannot be computed in the run."""

    def complete(self, run: RunSettings, lora: LoraSettings, architecture: Architecture) -> Self:
        """Return the loss with the reference model named, if it has one; BadInput as in `Loss`."""
        self.check_values()
        if run.data.overlong == "truncate":
            raise BadInput(
                f"--overlong truncate with {self.chosen_by}: an answer that is cut has no "
                "log-probability. Leave the flag out: pairs that are too long are then left out."
            )
        refuse_router_losses(run, self.chosen_by, self.unit)
        reference = self.reference_of(lora)
        if reference is not None:
            refuse_noise(
                run,
                self.chosen_by,
                "the reference is computed without it, so the rewards would measure it too.",
            )
        self.check_run(run, reference)
        if reference == "adapter":
            _check_adapter_reference(lora)
        if reference == "model":
            return replace(self, reference_model=self._model_of_reference(run, lora))
        refuse_without("--reference model", {"reference_model": self.reference_model})
        return self

    def reference_of(self, lora: LoraSettings) -> Reference | None:
        """Return where the reference's log-probabilities come from; None: it has none."""
        if not self.has_reference:
            return None
        if self.reference is not None:
            return self.reference
        # An adapter of --lora-init is part of the reference, and switching it off would lose that.
        # The default is then a file of log-probabilities, or else the model.
        from_scratch = lora.trains_adapter and not (lora.lora_init or lora.lora_modules_to_save)
        return "adapter" if from_scratch else "file" if self.files_reference else "model"

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

    def checkpoints(self) -> dict[str, str | None]:
        return {"--reference-model": self.reference_model}

    def frozen_model(self, run: RunSettings, lora: LoraSettings) -> FrozenModel | None:
        if self.reference_of(lora) != "model":
            return None
        # A rehearsal starts from no weights.
        return FrozenModel("--reference-model", self.reference_model or run.model.hf_model or "")

    def reference_row(self, lora: LoraSettings) -> tuple[str, str]:
        """Return the summary's row about the reference."""
        return "reference", _IN_WORDS[self.reference_of(lora)]


def _check_adapter_reference(lora: LoraSettings) -> None:
    """Raise BadInput unless only an adapter trains, which can be switched off."""
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


def answer_log_probs(batch: Batch, local: Tensor, losses: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the log-probabilities of every sequence over the trained tokens and over CP.

    Args:
        local: (s,) int64 on the host: this rank's positions in the sequence.
        losses: (B, s) float32 cross entropies there.

    Returns:
        (N,) float32 log-probabilities, with a gradient for `losses`; (N,) float32 numbers of
        tokens. Those of pairs are in the order chosen, rejected, chosen, rejected and so on.
    """
    positions = model_inputs.to_device(local, losses.device)
    trained = batch.loss_weights.index_select(1, positions) > 0
    sequence = model_inputs.to_device(batch.sequences(), losses.device).index_select(
        1, positions
    )  # (B, s)
    numbers = torch.arange(len(batch.lengths), device=losses.device)[:, None, None]
    member = (sequence == numbers) & trained  # (N, B, s)
    # A sum has a fixed order, unlike a scatter-add. Padding is masked: its loss may be infinite.
    of_tokens = torch.where(member, -losses, 0.0).sum((1, 2))
    group = parallel_state.get_context_parallel_group()
    # It passes gradients on.
    summed = mappings.reduce_from_tensor_model_parallel_region(of_tokens, group=group)
    lengths = member.sum((1, 2), dtype=torch.float32)
    dist.all_reduce(lengths, group=group)
    return summed, lengths


def answers_step() -> Callable[..., Any]:
    """Return the forward step of a first pass, which finds the answers' log-probabilities (N,)."""
    return passes.first_pass_step(
        forward.forward,
        lambda batch, local, losses: answer_log_probs(batch, local, losses.float())[0],
    )
