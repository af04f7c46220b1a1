"""The results of Hugging Face's own model for a batch, which ours must equal.

Every sample runs alone, unpadded and unpacked, with the positions that Hugging Face derives from
it. Padding, packing and micro-batches are what we have to get right, so the reference has none.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.adapter import read_adapter
from mcore_qwen3vl.converters.adapters.config import PREFIX, lora_layers
from mcore_qwen3vl.converters.hf.hf_checkpoint import HuggingFaceCheckpoint
from mcore_qwen3vl.converters.mapping.table import table
from mcore_qwen3vl.converters.offline.engine import nonfinite_notes
from mcore_qwen3vl.converters.place import identify
from mcore_qwen3vl.converters.storage.dtypes import all_finite
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.verify.parity.batches import Batch, MicroBatch, Sample, build_batch, media
from mcore_qwen3vl.verify.parity.case import AdamW, Case

AFTER_STEP = "logits after a step"
"""The report's part on the forward pass that overlaps the gathering of new parameters."""


@dataclass(frozen=True)
class Expected:
    """The reference for one batch.

    Attributes:
        logits: for each micro-batch (B, S, V) float32; 0 at padding.
        losses: for each micro-batch (B, S) float32 cross-entropy of each token; 0 at padding.
        valid: for each micro-batch (B, S) bool: not padding.
        gradients: gradients by HF name, of the loss summed over the tokens that count and divided
            by their number in the whole batch; empty if not asked for.
    """

    batch: Batch
    logits: tuple[Tensor, ...]
    losses: tuple[Tensor, ...]
    valid: tuple[Tensor, ...]
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Stepped:
    """Parameters after one optimizer step, by HF name, and the gradient norm before clipping."""

    parameters: dict[str, Tensor]
    grad_norm: float
    logits: tuple[Tensor, ...]  # of the same batch, with the new parameters


class Reference:
    """Hugging Face's model on one process; with an adapter, PEFT's, which alone has gradients.

    `trained` has the parameters with a gradient, by the names used in comparisons: factors are
    ``PARAMETER.lora_A`` and ``.lora_B``.

    Args:
        adapter: PEFT adapter directory; None: the whole model has gradients.
        dtype: dtype of weights and computation; factors stay float32, as in PEFT, unless this is
            float64.

    Raises:
        BadInput: a file is damaged, or a weight is NaN or infinite.
    """

    def __init__(
        self, path: Path, adapter: Path | None = None, *, dtype: torch.dtype = torch.float32
    ) -> None:
        import transformers

        HuggingFaceCheckpoint(path).form.require_transformers(path)
        self.architecture = Architecture.from_hf(path)
        kind = "Moe" if self.architecture.is_moe else ""
        model_class = getattr(transformers, f"Qwen3VL{kind}ForConditionalGeneration")
        self.model: Any = model_class.from_pretrained(
            path, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        )
        weights = self.model.named_parameters()
        nonfinite = [name for name, weight in weights if not all_finite(weight.detach())]
        for note in nonfinite_notes([{"nonfinite": nonfinite}]):
            raise BadInput(f"{path}: {note} What a model computes with them cannot be compared.")
        self.trained = dict(self.model.named_parameters())
        if adapter is not None:
            self.model = with_adapter(self.model, adapter)
            if dtype == torch.float64:
                self.model.double()
            self.trained = trained_parameters(self.model)
        self._adapted = adapter is not None
        self.model.eval()

    def run(self, batch: Batch, *, gradients: bool = True) -> Expected:
        """Compute logits, losses and, with `gradients`, all gradients, summed over samples."""
        self.model.zero_grad(set_to_none=True)
        scale = 1 / batch.tokens
        micro = [self._micro_batch(m, scale, gradients) for m in batch.micro_batches]
        logits, losses, valid = zip(*micro, strict=True)
        return Expected(batch, logits, losses, valid, self._gradients() if gradients else {})

    def step(self, expected: Expected, adamw: AdamW) -> Stepped:
        """Take one ``torch.optim.AdamW`` step with `expected`'s gradients, which are clipped."""
        parameters = {
            name: torch.nn.Parameter(weight.detach().float().clone())
            for name, weight in self.trained.items()
        }
        for name, parameter in parameters.items():
            parameter.grad = expected.gradients[name].clone()
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), adamw.clip_grad)
        torch.optim.AdamW(
            decay_groups(parameters, adamw.weight_decay),
            lr=adamw.lr,
            betas=(adamw.adam_beta1, adamw.adam_beta2),
            eps=adamw.adam_eps,
        ).step()
        stepped = {n: p.detach() for n, p in parameters.items()}
        with self._weights(stepped):
            logits = self.run(expected.batch, gradients=False).logits
        return Stepped(stepped, float(norm), logits)

    @contextmanager
    def _weights(self, values: dict[str, Tensor]) -> Iterator[None]:
        """Replace the trained parameters by `values` inside."""
        trained = self.trained
        own = {name: weight.detach().clone() for name, weight in trained.items()}
        try:
            for name, weight in trained.items():
                weight.data.copy_(values[name])
            yield
        finally:
            for name, weight in trained.items():
                weight.data.copy_(own[name])

    def _micro_batch(
        self, micro: MicroBatch, scale: float, gradients: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        shape = micro.input_ids.shape
        logits = torch.zeros(*shape, self.architecture.vocab_size)
        losses, valid = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
        for span in micro.spans:
            sample = span.sample
            with torch.set_grad_enabled(gradients):
                output = self._forward(sample)
                of_sample = output.logits[0]  # (L, V)
                of_tokens = F.cross_entropy(
                    of_sample.float(), sample.labels, reduction="none"
                )  # (L,)
            if gradients:
                loss = (of_tokens * sample.loss_mask).sum()
                ((loss + self.added_loss(output)) * scale).backward()
            logits[span.tokens] = of_sample.detach().float()
            losses[span.tokens] = of_tokens.detach()
            valid[span.tokens] = True
        return logits, losses, valid

    def added_loss(self, output: Any) -> Tensor | float:
        """Return what to add to a sample's summed loss; override it, for example for router losses.

        Args:
            output: output of HF's forward; for MoE models it has ``router_logits``, (L, E) for each
                MoE layer.
        """
        return 0.0

    def _forward(self, sample: Sample) -> Any:
        ids = sample.input_ids
        kinds = (ids == self.architecture.image_token_id).int()
        kinds += 2 * (ids == self.architecture.video_token_id).int()
        inputs = {"input_ids": ids[None], "mm_token_type_ids": kinds[None], **media(sample)}
        more = {"output_router_logits": True} if self.architecture.is_moe else {}
        return self.model(**inputs, use_cache=False, **more)

    def _gradients(self) -> dict[str, Tensor]:
        """Return all gradients, zero where the loss does not reach (vision in a batch of text)."""
        return {
            name: torch.zeros_like(p, dtype=torch.float32) if p.grad is None else p.grad.float()
            for name, p in self.trained.items()
        }

    @property
    def network(self) -> Any:
        """The model, whose modules have the names of the checkpoint.

        With an adapter, PEFT's wrappers are in place of the adapted modules.
        """
        return self.model.base_model.model if self._adapted else self.model


def with_adapter(model: Any, adapter: Path) -> Any:
    """Return PEFT's model, in which only the adapter is trained."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about experts' rank patterns, which work
        return PeftModel.from_pretrained(model, adapter, is_trainable=True)


def trained_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """Return what trains in PEFT's model: ``PARAMETER.lora_A`` and ``.lora_B``, and the rest."""
    found: dict[str, torch.nn.Parameter] = {}
    factors = set()
    for _, name, layer in lora_layers(model):
        for factor in ("lora_A", "lora_B"):
            parameter = getattr(layer, factor)["default"].weight
            found[f"{name}.{factor}"] = parameter
            factors.add(parameter)
    for path, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in factors:
            found[re.sub(r"\.modules_to_save\.default", "", path.removeprefix(PREFIX))] = parameter
    return found


def decay_groups(
    trained: Mapping[str, torch.nn.Parameter], weight_decay: float
) -> list[dict[str, Any]]:
    """Return an optimizer's groups; decay spares biases and one-dimensional weights."""
    groups: tuple[list[Tensor], list[Tensor]] = ([], [])
    for name, parameter in trained.items():
        groups[parameter.ndim <= 1 or name.endswith("bias")].append(parameter)
    rates = (weight_decay, 0.0)
    return [{"params": p, "weight_decay": r} for p, r in zip(groups, rates, strict=True)]


class ReferenceCheckpoint:
    """A Hugging Face checkpoint to compare with, loaded at most once in each dtype.

    The results for a batch are computed once too. With the directory `lora` of an adapter, PEFT's
    model is the reference, and only it is trained. `passed` is called after each pass over a batch.
    """

    def __init__(
        self,
        path: str | Path,
        lora: str | Path | None = None,
        *,
        passed: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = Path(path)
        identify(self.path).require_huggingface()
        self.architecture = Architecture.from_hf(self.path)
        self.adapter = None if lora is None else read_adapter(lora, self.path)
        self.lora = None if lora is None else Path(lora)
        self._passed = passed
        self._models: dict[torch.dtype, Reference] = {}
        self._expected: dict[tuple[object, ...], Expected] = {}
        self._stepped: dict[tuple[object, ...], Stepped] = {}

    @property
    def library(self) -> str:
        """The library whose model is the reference."""
        return "Hugging Face" if self.adapter is None else "PEFT"

    def model(self, dtype: torch.dtype = torch.float32) -> Reference:
        """Return the reference in this dtype."""
        if dtype not in self._models:
            self._models[dtype] = Reference(self.path, self.lora, dtype=dtype)
        return self._models[dtype]

    def expected(self, batch: str, case: Case) -> Expected:
        """Return the reference's results for a batch, with the case's dtype and lengths."""
        key = (batch, case.multiple, case.dtype, case.gradients)
        if key not in self._expected:
            built = build_batch(batch, self.architecture, multiple=case.multiple)
            model = self.model(case.torch_dtype)
            self._expected[key] = model.run(built, gradients=case.gradients)
            self._passed()
        return self._expected[key]

    def stepped(self, batch: str, case: Case, adamw: AdamW) -> Stepped:
        """Return the reference's parameters after an optimizer step on this batch."""
        key = (batch, case.multiple, case.dtype, adamw)
        if key not in self._stepped:
            model = self.model(case.torch_dtype)
            self._stepped[key] = model.step(self.expected(batch, case), adamw)
        return self._stepped[key]

    def value_counts(self, frozen: Mapping[str, int] | None = None) -> dict[str, int]:
        """Return the number of values of each tensor, expert and factor, without `frozen` ones."""
        counts = {
            source.label: prod(source.piece_shape)
            for row in table(self.architecture)
            for source in row.sources
        }
        if self.adapter is not None:
            counts |= {name: factor.numel() for name, factor in self.adapter.tensors().items()}
        trained = {name: count - (frozen or {}).get(name, 0) for name, count in counts.items()}
        return {name: count for name, count in trained.items() if count}
