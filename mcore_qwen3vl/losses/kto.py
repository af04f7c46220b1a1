"""``--loss kto``: answers that are labelled as wanted or unwanted.

Source: Ethayarajh et al., "KTO: Model
Alignment as Prospect Theoretic Optimization", 2024, as TRL's ``KTOTrainer`` computes it. With
r = log p(y | x) - log p0(y | x) of an answer y to a prompt x, and the baseline z, the loss is

- w (1 - sigmoid(beta (r - z))) of a wanted answer, with the weight w of wanted answers;
- u (1 - sigmoid(beta (z - r))) of an unwanted answer, with the weight u of unwanted answers.

The baseline estimates the KL divergence of the policy from the reference. It is the mean of r over
the batch with each prompt followed by another's answer, and at least 0. It has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from mcore_qwen3vl.data.record_form import RecordForm
from mcore_qwen3vl.data.records.reading import BadSample, Reading
from mcore_qwen3vl.data.task_inputs import TaskInputs
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.lazy import Lazy
from mcore_qwen3vl.losses.answers import (
    UNCUT_ANSWER,
    AnswerLoss,
    Reference,
    answer_log_probs,
    answers_step,
)
from mcore_qwen3vl.losses.loss import require, without_none
from mcore_qwen3vl.settings.lora import LoraSettings
from mcore_qwen3vl.settings.run import RunSettings

if TYPE_CHECKING:
    import numpy as np
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch import Tensor

    from mcore_qwen3vl.data.encoding import batch as encoding_batch
    from mcore_qwen3vl.data.encoding.batch import Batch
    from mcore_qwen3vl.data.encoding.planning import Plan
    from mcore_qwen3vl.data.records import parse, tasks
    from mcore_qwen3vl.data.records.media import MediaFolder
    from mcore_qwen3vl.data.records.messages import Conversation
    from mcore_qwen3vl.losses import passes, reduction
    from mcore_qwen3vl.losses.passes import Within
    from mcore_qwen3vl.losses.reduction import Objective, Reduced
    from mcore_qwen3vl.model import inputs as model_inputs
else:
    np, encoding_batch = map(Lazy, ("numpy", "mcore_qwen3vl.data.encoding.batch"))
    parse = Lazy("mcore_qwen3vl.data.records.parse")
    tasks = Lazy("mcore_qwen3vl.data.records.tasks")
    model_inputs = Lazy("mcore_qwen3vl.model.inputs")
    torch, dist = map(Lazy, ("torch", "torch.distributed"))
    parallel_state = Lazy("megatron.core.parallel_state")
    passes = Lazy("mcore_qwen3vl.losses.passes")
    reduction = Lazy("mcore_qwen3vl.losses.reduction")


@dataclass(frozen=True)
class LabelledRecords(RecordForm):
    """Labelled records: each is one sequence with the label as its target."""

    @property
    def uncut(self) -> str:
        return UNCUT_ANSWER

    def describes(self, record: Mapping[str, Any]) -> bool:
        return tasks.is_labelled(record) and not parse.is_preference(record)

    def parse(
        self, record: Mapping[str, Any], folder: MediaFolder, reading: Reading
    ) -> Mapping[str, Conversation]:
        if not tasks.is_labelled(record):
            raise BadSample(
                "it is not a labelled record: --loss kto needs a label that is true or false."
            )
        return {"": tasks.parse_labelled(record, folder, reading)}

    def packed_length(self, lengths: Iterable[int], multiple: int, most: int) -> int:
        """Return the tokens that a record may take with the answer of another.

        The tokens of a pack remain the same, but each sequence may need more padding.
        """
        longer = (length + multiple - 1 for length in lengths)
        return min(super().packed_length(longer, multiple, most), most)


@dataclass(frozen=True)
class Labelled(TaskInputs):
    """What labelled records give for computing :class:`LabelledReferences`.

    The records of a micro-batch exchange their answers for the baseline: each prompt is also
    followed by the answer of the record before it, the first one's by the last. TRL does the same
    in the batches of a device.
    """

    desirable: Tensor  # (samples,) bool: the labels
    mismatched: Batch
    """The same prompts with the answers of others. Its `cu_seqlens` stays on the host. Its `visual`
    has shapes in place of the tensors with a patch axis, because these are the batch's own; see
    :func:`with_exchanged_answers`."""

    @classmethod
    def of_records(cls, records: Sequence[Any], assemble: Callable[..., Any], config: Any) -> Self:
        """Return the labels, and the batch in which each prompt has its neighbour's answer."""
        plans = [record.plans[0] for record in records]
        pairs = zip(plans, [plans[-1], *plans[:-1]], strict=True)
        exchanged = [_with_answer_of(plan, other, config.seq_length) for plan, other in pairs]
        other = assemble(exchanged, [record.name for record in records])
        visual = other.visual and encoding_batch.without_pixels(other.visual)
        return cls(
            torch.tensor([record.target > 0 for record in records]), replace(other, visual=visual)
        )


def _with_answer_of(plan: Plan, other: Plan, most: int) -> Plan:
    """Return the prompt of `plan` with the answer of `other`, cut to at most `most` tokens.

    Such pairs give KTO's baseline. An answer begins with the first token that trains.
    """
    end, start = (int(np.flatnonzero(each.loss_weights > 0)[0]) for each in (plan, other))
    return replace(
        plan,
        input_ids=np.concatenate([plan.input_ids[:end], other.input_ids[start:]])[:most],
        loss_weights=np.concatenate([plan.loss_weights[:end], other.loss_weights[start:]])[:most],
    )


def with_exchanged_answers(batch: Batch) -> Batch:
    """Return the prompts with the answers of others, and the pixels, which are the same."""
    other = batch.inputs_of(Labelled).mismatched
    if batch.visual is None or other.visual is None:
        return other
    patches = {name: getattr(batch.visual, name) for name in model_inputs.PER_PATCH}
    return replace(other, visual=replace(other.visual, **patches))


@dataclass(frozen=True)
class LabelledReferences(TaskInputs):
    """What the loss needs."""

    desirable: Tensor  # (samples,) bool: the labels
    log_probs: Tensor  # (samples,) float32, of the reference
    baseline: Tensor  # scalar float32, of the global batch


@dataclass(frozen=True)
class KtoLoss(AnswerLoss):
    """KTO; None: the loss's own default."""

    desirable_weight: float | None = None
    """kto: weight of the losses of answers with the label true; default 1"""
    undesirable_weight: float | None = None
    """kto: weight of the losses of answers with the label false; default 1"""

    names = ("kto",)
    exchanges = True
    help = "kto on labelled records"
    unit = "answers"
    logged = ("kto loss",)
    files_reference = False
    records = LabelledRecords()
    made_up_records = MappingProxyType({"labelled": True})

    @property
    def settings(self) -> Kto:
        """The settings of the formula; BadInput for a value out of range."""
        values = {field.name: getattr(self, field.name) for field in fields(Kto)}
        return Kto(**without_none(values))

    def check_values(self) -> None:
        _ = self.settings

    def check_run(self, run: RunSettings, reference: Reference | None) -> None:
        """Raise BadInput where the baseline lacks the reference, or answers to exchange."""
        if reference == "file":
            raise BadInput(
                "--reference file with --loss kto: the baseline needs the reference's "
                "log-probabilities of answers to other prompts of the micro-batch, which no file "
                "has. Drop the flag: the reference is then the model without its LoRA, or a frozen "
                "model."
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

    def reads(self, run: RunSettings, lora: LoraSettings) -> dict[str, Any]:
        return {**super().reads(run, lora), "inputs": Labelled}

    def summary(self, run: RunSettings, lora: LoraSettings) -> list[tuple[str, str]]:
        loss = self.settings
        desirable, undesirable = loss.desirable_weight, loss.undesirable_weight
        weights = f"desirable x {desirable:g}, undesirable x {undesirable:g}"
        return [("loss", f"KTO, beta {loss.beta:g}, {weights}"), self.reference_row(lora)]

    def objective(self, run: RunSettings, lora: LoraSettings) -> Objective:
        return kto_objective(self.settings)

    def schedule(self, run: RunSettings, lora: LoraSettings, frozen: Any) -> Callable[..., Any]:
        return partial(run_with_baseline, frozen or passes.without_adapter)


@dataclass(frozen=True)
class Kto:
    """The settings of the formula.

    Attributes:
        beta: the strength with which the policy is kept near the reference.
        desirable_weight: weight of the losses of wanted answers.
        undesirable_weight: weight of the losses of unwanted answers.

    Raises:
        BadInput: a value is out of range.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require(name, value, value > 0, "above 0")


def kto_objective(kto: Kto) -> Objective:
    """Return the objective of KTO: a mean over the records of the global batch."""

    def objective(batch: Batch, local: Tensor, losses: Tensor) -> Reduced:
        inputs = batch.inputs_of(LabelledReferences)
        log_probs, _ = answer_log_probs(batch, local, losses)
        wanted, baseline, before = inputs.desirable, inputs.baseline, inputs.log_probs
        of_answers, rewards = labelled_losses(log_probs, before, wanted, baseline, kto)
        detached = log_probs.detach()
        numbers = {
            "kto loss": of_answers,
            "kl baseline": baseline.clamp(min=0).expand(len(detached)),
        }
        reduced = reduction.reduce_units(of_answers.sum(), batch, numbers)
        of_kinds = {}
        for name, mask in (("desirable", wanted), ("undesirable", ~wanted)):
            # A log interval may be without one kind of answer; 0 / 0 would be logged as NaN.
            count = mask.sum(dtype=torch.float32).clamp(min=1e-30)
            for what, values in (("rewards", rewards), ("log-prob", detached)):
                of_kinds[f"{what} {name}"] = torch.stack([values.where(mask, 0.0).sum(), count])
        # Every CP rank counts all answers of a kind, which cancels in their mean.
        return reduced._replace(sums={**reduced.sums, **of_kinds})

    return objective


def labelled_losses(
    log_probs: Tensor, reference: Tensor, desirable: Tensor, baseline: Tensor, kto: Kto
) -> tuple[Tensor, Tensor]:
    """Compute KTO's loss of each answer.

    Args:
        log_probs: (N,) float32, the policy's log-probabilities of the answers, summed over tokens.
        reference: (N,), the reference's log-probabilities, without a gradient.
        desirable: (N,) bool, whether an answer is wanted.
        baseline: scalar without a gradient, the mean of r for answers of other prompts.

    Returns:
        The losses (N,), and the rewards beta r (N,) without a gradient.
    """
    change = log_probs - reference
    sign = torch.where(desirable, 1.0, -1.0)
    weight = torch.where(desirable, kto.desirable_weight, kto.undesirable_weight)
    gap = change - baseline.clamp(min=0)
    losses = weight * (1 - torch.sigmoid(kto.beta * sign * gap))
    return losses, (kto.beta * change).detach()


def run_with_baseline(within: Within, schedule: Callable[..., Any], **arguments: Any) -> Any:
    """Run Megatron's `schedule` after a pass for the reference and two for KTO's baseline.

    The baseline is a mean over the global batch: over all micro-batches of all data-parallel ranks.
    So the policy and the reference compute the exchanged answers of a whole iteration before the
    first micro-batch is trained.
    """
    of_chunks = passes.read_batches(arguments)
    exchanged = [[with_exchanged_answers(batch) for batch in batches] for batches in of_chunks]
    policy, of_reference, reference = (
        passes.forward_pass(schedule, arguments, batches, first=answers_step(), within=model)
        for batches, model in (
            (exchanged, passes.evaluation_mode),
            (exchanged, within),
            (of_chunks, within),
        )
    )
    if reference:  # the last stage
        baseline = _mean_change(policy, of_reference)
        labels = [batch.inputs_of(Labelled).desirable for batch in of_chunks[-1]]
        of_chunks[-1] = [
            replace(batch, task=LabelledReferences(desirable, log_probs, baseline))
            for batch, desirable, log_probs in zip(of_chunks[-1], labels, reference, strict=True)
        ]
    return schedule(**{**arguments, "data_iterator": passes.replay(of_chunks)})


def _mean_change(policy: list[Tensor], reference: list[Tensor]) -> Tensor:
    """Return the mean difference of log-probabilities over all data-parallel ranks, a scalar.

    If all records are alone in their micro-batches, it is 0.
    """
    # A record that is alone in its micro-batch has kept its own answer, and is left out.
    changes = [p - r for p, r in zip(policy, reference, strict=True) if len(p) > 1]
    differences = torch.cat([policy[0].new_zeros(0), *changes])  # there may be no changes
    sums = torch.stack([differences.sum(), torch.full_like(differences.sum(), len(differences))])
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    return sums[0] / sums[1].clamp(min=1)
