"""``--loss distill``: a student's distributions, close to those of a teacher.

A divergence says how far a student's distribution is from a teacher's at a token. Both are given as
the probabilities of the teacher's k likeliest tokens and of all other tokens together, so they are
distributions over k + 1 outcomes. Their divergence is at most that over the whole vocabulary, by
the data-processing inequality, and equals it if nothing is left over.

- ``forward``: KL(teacher || student);
- ``reverse``: KL(student || teacher);
- ``jsd``: generalised Jensen-Shannon divergence, beta KL(teacher || m) + (1 - beta)
  KL(student || m), with the mixture m = beta teacher + (1 - beta) student. Source: Agarwal et al.,
  "On-Policy Distillation of Language Models" (GKD), 2024.

A teacher in memory takes one more forward pass in each step, which keeps its likeliest tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.sidecar import Sidecar
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.flags import Flag, Folder
from mcore_qwen3vl.lazy import Lazy
from mcore_qwen3vl.losses.loss import FrozenModel, Loss, refuse_without, require, without_none
from mcore_qwen3vl.settings.lora import LoraSettings
from mcore_qwen3vl.settings.run import RunSettings

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mcore_qwen3vl import forward
    from mcore_qwen3vl.data.encoding.batch import Batch
    from mcore_qwen3vl.forward import RunBatch
    from mcore_qwen3vl.losses import passes, teacher_file, tokens
    from mcore_qwen3vl.losses.reduction import Objective, Reduced
    from mcore_qwen3vl.model import inputs as model_inputs
    from mcore_qwen3vl.model import top_tokens
    from mcore_qwen3vl.model.decoder.attention import PackedSequence
    from mcore_qwen3vl.model.head import Head
    from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel
else:
    torch = Lazy("torch")
    top_tokens = Lazy("mcore_qwen3vl.model.top_tokens")
    passes, tokens = map(Lazy, ("mcore_qwen3vl.losses.passes", "mcore_qwen3vl.losses.tokens"))
    teacher_file = Lazy("mcore_qwen3vl.losses.teacher_file")
    model_inputs = Lazy("mcore_qwen3vl.model.inputs")
    forward = Lazy("mcore_qwen3vl.forward")

Divergence = Literal["forward", "reverse", "jsd"]


@dataclass(frozen=True)
class DistillationLoss(Loss):
    """Distillation, and its teacher; None: the loss's own default."""

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

    group = "qwen3-vl distillation"
    names = ("distill",)
    help = "distill from --teacher or from the tokens that `mcore-qwen3vl score --top-k` wrote"
    logged = ("distill loss",)

    @property
    def settings(self) -> Distillation:
        """The settings of the formula; BadInput for a value out of range."""
        values = {
            "divergence": self.distill_divergence,
            "beta": self.distill_beta,
            "temperature": self.distill_temperature,
            "alpha": self.distill_alpha,
        }
        return Distillation(**without_none(values))

    def complete(self, run: RunSettings, lora: LoraSettings, architecture: Architecture) -> Self:
        """Return the loss with the number of a live teacher's tokens; BadInput as in `Loss`."""
        top_k = self.teacher_top_k
        if not self.teacher:
            refuse_without("--teacher DIR", {"teacher_top_k": top_k})
        elif top_k is None:
            top_k = min(teacher_file.TEACHER_TOP_K, architecture.vocab_size)
        else:
            teacher_file.check_top_k("--teacher-top-k", top_k, architecture.vocab_size)
        if self.settings.divergence != "jsd":
            refuse_without("--distill-divergence jsd", {"distill_beta": self.distill_beta})
        if run.data.overlong == "truncate" and not self.teacher:
            raise BadInput(
                "--overlong truncate with --loss distill: the teacher saw whole samples. Leave "
                "the flag out: samples that are too long are then left out."
            )
        not_chunked = run.training.head_chunk == 0
        if not_chunked or run.compute.defer_embedding_wgrad_compute:
            flag = "--no-chunked-head" if not_chunked else "--defer-embedding-wgrad-compute"
            raise BadInput(
                f"{flag} with --loss distill, which reads the logits in chunks: drop the flag."
            )
        return replace(self, teacher_top_k=top_k)

    def checkpoints(self) -> dict[str, str | None]:
        return {"--teacher": self.teacher}

    def frozen_model(self, run: RunSettings, lora: LoraSettings) -> FrozenModel | None:
        return FrozenModel("--teacher", self.teacher) if self.teacher else None

    def sidecar(self, run: RunSettings, lora: LoraSettings) -> Sidecar | None:
        return None if self.teacher else teacher_file.TeacherFile(self.settings.temperature)

    def reads(self, run: RunSettings, lora: LoraSettings) -> dict[str, Any]:
        inputs = None if self.teacher else teacher_file.Top
        return {**super().reads(run, lora), "inputs": inputs}

    def summary(self, run: RunSettings, lora: LoraSettings) -> list[tuple[str, str]]:
        loss = self.settings
        beta = f", beta {loss.beta:g}" if loss.divergence == "jsd" else ""
        teacher = "NAME.topk.arrow beside each NAME.jsonl of the data"
        if self.teacher:
            teacher = f"a frozen model in memory, its {self.teacher_top_k} likeliest tokens"
        mixed = f", cross entropy x {loss.alpha:g}" if loss.alpha else ""
        how = f"{loss.divergence}{beta}, temperature {loss.temperature:g}{mixed}"
        return [("loss", f"distillation, {how}"), ("teacher", teacher)]

    def objective(self, run: RunSettings, lora: LoraSettings) -> Objective:
        return distillation_objective(self.settings)

    def compute(self, run: RunSettings) -> RunBatch:
        processor = partial(_divergences_and_cross_entropies, self.settings)
        return partial(forward.forward, processor=processor)

    def schedule(
        self, run: RunSettings, lora: LoraSettings, frozen: Any
    ) -> Callable[..., Any] | None:
        if frozen is None:
            return None
        k = self.teacher_top_k
        assert k is not None
        find = partial(_teachers_likeliest, k=k, temperature=self.settings.temperature)
        first = passes.first_pass_step(
            partial(forward.forward, processor=find),
            lambda batch, local, values: teacher_file.Top(values[..., :k].int(), values[..., k:]),
        )
        return partial(passes.run_two_passes, first=first, within=frozen)


@dataclass(frozen=True)
class Distillation:
    """The settings of the formula.

    Attributes:
        divergence: the kind of divergence of the student from the teacher.
        beta: the teacher's share in the mixture, above 0 and below 1; read for ``jsd`` only.
        temperature: number that the logits of both are divided by. The divergence is multiplied by
            its square, so that its gradients keep their size (Hinton et al. 2015).
        alpha: share of the cross entropy, at temperature 1, in the loss.

    Raises:
        BadInput: a value is out of range.
    """

    divergence: Divergence = "forward"
    beta: float = 0.5
    temperature: float = 1.0
    alpha: float = 0.0

    def __post_init__(self) -> None:
        inside = (
            "above 0 and below 1. For GKD's 0 and 1, choose the divergences forward and reverse"
        )
        require("distill_beta", self.beta, 0 < self.beta < 1, inside)
        require("distill_temperature", self.temperature, self.temperature > 0, "above 0")
        require("distill_alpha", self.alpha, 0 <= self.alpha < 1, "a share from 0 to below 1")


def distillation_objective(settings: Distillation) -> Objective:
    """Return the objective of distillation: a mean over the trained tokens of the global batch."""
    mean = tokens.token_objective(tokens.cross_entropy)

    def objective(batch: Batch, local: Tensor, values: Tensor) -> Reduced:
        divergence, of_labels = values
        # The squared temperature makes up for gradients that are as much smaller.
        scaled = settings.temperature**2 * divergence
        reduced = mean(batch, local, settings.alpha * of_labels + (1 - settings.alpha) * scaled)
        weights = batch.loss_weights.index_select(1, model_inputs.to_device(local, values.device))
        parts = {"divergence": divergence, "lm loss": of_labels}
        sums = {
            name: tokens.cross_entropy(part.detach(), weights)[0] for name, part in parts.items()
        }
        return reduced._replace(sums={"distill loss": reduced.total.detach(), **sums})

    return objective


def _divergences_and_cross_entropies(
    settings: Distillation,
    batch: Batch,
    chunk: Qwen3VLModel,
    *,
    hidden_states: Tensor,
    output_layer: Head,
    output_weight: Tensor | None,
    labels: Tensor,
    packed_seq_params: PackedSequence | None,
    **_: Any,
) -> Tensor:
    """Return (2, B, s) float32: divergences from the teacher, and cross entropies."""
    local = chunk.local_tokens(batch.input_ids.shape[1], packed_seq_params)
    ids, teacher = _teacher_at(batch, model_inputs.to_device(local, labels.device))
    student, of_labels = output_layer(
        hidden_states,
        output_weight,
        reduce=partial(
            top_tokens.log_probs_of, ids=ids, targets=labels, temperature=settings.temperature
        ),
    )
    return torch.stack([divergences(student, teacher, settings), -of_labels])


def _teacher_at(batch: Batch, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the teacher's ids (B, s, k) and log-probabilities (B, s, k + 1) at `positions`."""
    teacher = batch.inputs_of(teacher_file.Top)
    if teacher.ids.ndim == 3:  # a live teacher's, at these positions
        return teacher.ids, teacher.log_probs
    # A file has rows for the trained positions alone, in order, and a last one for all others.
    trained = batch.loss_weights > 0
    number = trained.flatten().cumsum(0).view_as(trained) - 1
    row = number.where(trained, len(teacher.ids) - 1).index_select(1, positions)
    return teacher.ids[row], teacher.log_probs[row]


def _teachers_likeliest(
    batch: Batch,
    chunk: Qwen3VLModel,
    *,
    hidden_states: Tensor,
    output_layer: Head,
    output_weight: Tensor | None,
    k: int,
    temperature: float,
    **_: Any,
) -> Tensor:
    """Compute (B, s, 2 k + 1) float32: k ids, their log-probabilities and that of the rest."""
    ids, log_probs = output_layer(
        hidden_states,
        output_weight,
        reduce=partial(top_tokens.likeliest, k=k, temperature=temperature),
    )
    return torch.cat([ids.float(), log_probs], -1)  # Megatron passes one tensor on


def divergences(student: Tensor, teacher: Tensor, settings: Distillation) -> Tensor:
    """Return the divergence at each token.

    Args:
        student: (..., k + 1) log-probabilities of the teacher's likeliest tokens and of the rest.
        teacher: the teacher's, without a gradient.

    Returns:
        (...), with a gradient for `student`. It is not multiplied by the squared temperature.
    """
    if settings.divergence == "forward":
        return _kl(teacher, student)
    if settings.divergence == "reverse":
        return _kl(student, teacher)
    beta = settings.beta
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p || q) over the last axis, from log-probabilities."""
    return (p.exp() * (p - q)).sum(-1)
