"""The trace of one input through both models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.identify import identify
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.verification.audit import compare_configs
from mcore_qwen3vl.verification.measurement import Finding, Measurement, merge, take_frozen
from mcore_qwen3vl.verification.parity.case import (
    MEDIA,
    GlobalBatch,
    MicroBatch,
    ParityCase,
    Sample,
    pad_to_micro_batch,
)
from mcore_qwen3vl.verification.report import Report
from mcore_qwen3vl.verification.trace.recording import (
    ACTIVATION_GRADIENTS,
    ACTIVATIONS,
    GRADIENTS,
    WEIGHTS,
    Recording,
    TraceReference,
)

AROUND = 3
"""Probe points shown before and after the first one out of tolerance."""

WEIGHTS_NAMED = 4
"""The most weights that the report names beside that point."""


@dataclass
class Trace(Report):
    """The comparison of both models along the data path, for the same input.

    The findings are activations in the order of the data, then gradients in the order of the
    backward pass, then weights.

    Attributes:
        first: the first probe point outside the expected rounding; None if there is none.
        settings: the fields in which the examined config is another model's.
    """

    first: Finding | None = None
    settings: list[Finding] = field(default_factory=list)
    failures_shown: ClassVar[int] = 5  # most of the others only follow from the first

    @property
    def verdict(self) -> str:
        """The result in one or two sentences."""
        if self.ok:
            return (
                f"All {len(self.findings):,} comparisons are within the expected rounding of "
                "float32."
            )
        if self.first is None:
            return super().verdict
        return f"The models differ first at {self.first.name} ({self.first.part})."

    @property
    def notes(self) -> dict[str, str]:
        if self.first is None:
            return {}
        notes = {
            "Where": (
                f"{self.first.name}, {self.first.part}: "
                f"relative error {self.first.relative_error:.2e}, "
                f"where rounding allows {self.first.tolerance:.1e}. Everything before it on the "
                "data path agrees."
            )
        }
        if around := self._points_around():
            notes["Around it"] = around
        if wrong := self.wrong_weights():
            more = f" and {len(wrong) - WEIGHTS_NAMED} more" if len(wrong) > WEIGHTS_NAMED else ""
            notes["Its weights"] = (
                f"Not Hugging Face's: {', '.join(wrong[:WEIGHTS_NAMED])}{more}. `verify audit` "
                "says what a conversion did to its tensors."
            )
        if self.settings:
            notes["Settings"] = "\n".join(f"{f.name} {f.flaw}." for f in self.settings)
        if not wrong and not self.settings:
            notes["What remains"] = (
                "Its weights and the config are Hugging Face's, so the code that computes it, or "
                "an argument of the model, is not."
            )
        return notes

    def wrong_weights(self) -> list[str]:
        """Return the weights of the first module out of tolerance that are not Hugging Face's."""
        module = f"{self.first.name}." if self.first else ""
        failures = (f.name for f in self.findings if f.part == WEIGHTS and not f.ok)
        return [name for name in failures if module and name.startswith(module)]

    def _points_around(self) -> str:
        """Return text on the probe points before and after the first one, and their errors."""
        path = [f for f in self.findings if f.part == ACTIVATIONS]
        if self.first not in path:
            return ""
        at = path.index(self.first)
        near = path[max(at - AROUND, 0) : at + AROUND + 1]
        return "\n".join(
            f"{f.name}: {f.relative_error:.1e}{'' if f.ok else ', out of tolerance'}" for f in near
        )


def trace(
    hf: str | Path | TraceReference,
    mcore: str | Path | None = None,
    *,
    layout: Layout | None = None,
    micro: MicroBatch | None = None,
    batch: str = "mixed",
    gradients: bool = False,
    case: ParityCase | None = None,
    lora: str | Path | None = None,
    timeout: float = 600.0,
) -> Trace:
    """Run the same input through Hugging Face's model and ours, and compare every probe point.

    Hugging Face's model gives the right values in float64, and in float32 the rounding to expect at
    each probe point. An error of more than `MARGIN` times this rounding, or float32's epsilon if
    that is larger, is out of tolerance.

    Args:
        hf: Hugging Face checkpoint directory, the reference. For several traces, pass a
            :class:`TraceReference`, which keeps its results.
        mcore: Megatron-Core checkpoint to examine; None: the model is loaded from `hf`.
        micro: the input, as from :func:`from_prompt`; default:
            the first micro-batch of the parity batch called `batch`. A language model alone gets
            text in place of its images and videos, which the report says.
        gradients: also compare gradients of activations and of parameters.
        case: how the model runs, apart from `layout` and `gradients`.
        lora: PEFT adapter directory to add to both models, PEFT's and ours. With `gradients` only
            the adapter is trained. A :class:`TraceReference` has its own instead.

    Raises:
        BadInput: a checkpoint, the layout or the batch cannot be used, or the two checkpoints have
            different shapes.
    """
    reference = hf if isinstance(hf, TraceReference) else TraceReference(hf, lora)
    hf, architecture = reference.path, reference.architecture
    mcore = None if mcore is None else Path(mcore)
    place = None if mcore is None else identify(mcore)
    if place is not None:
        place.require_megatron()
    config = (place and place.hf) or hf  # other makers' checkpoints have no config
    case = case or ParityCase()
    overrides = {**case.config, "head_chunk": 0}  # the logits are compared, so they must exist
    case = replace(case, layout=layout or Layout(), gradients=gradients, config=overrides)
    examined_config = Architecture.from_hf(config)
    _check_same_shape(architecture, examined_config)
    media: int | str | None = None
    if micro is None:
        micro = reference.micro_batch(batch, case.length_multiple)
        if not architecture.has_vision:  # see `BatchRecipe`
            media = f"none: text in place of those of batch {batch}, for a language model alone"
    if media is None:
        media = 0 if micro.visual is None else len(micro.visual.grid_thw)
    copies = case.layout.dp * (case.layout.pp if case.layout.vpp > 1 else 1)
    repeated = GlobalBatch(batch, (micro,) * copies)
    case.validate(architecture, (repeated,))

    exact = reference.recording(repeated, gradients)
    from mcore_qwen3vl.verification.trace.on_rank import TraceRequest, trace_on_rank

    request = TraceRequest(hf, config, mcore, case, exact, reference.adapter)
    measured = merge(
        run_layout(
            trace_on_rank, case.layout.world_size, request, timeout=timeout, device=case.device
        )
    )
    counts = _expected_counts(exact, case, reference, take_frozen(measured))
    examined = mcore.name if mcore else f"{hf.name} loaded directly"
    facts: dict[str, Any] = {
        "layout": str(case.layout),
        "spec": case.spec,
        "dtype": "float32, judged by Hugging Face in float64",
        "tokens": int(micro.input_ids.numel()),
        "images and videos": media,
    }
    result = Trace(f"{hf.name}: trace of {examined} at {case}", facts)
    points = [point.name for point in exact.points]
    # Forward along the data path, then backward against it.
    order = [(ACTIVATIONS, name) for name in points] + [("logits", "all"), ("loss", "all")]
    order += [(ACTIVATION_GRADIENTS, name) for name in reversed(points)]
    for key in dict.fromkeys([*order, *counts, *measured]):
        if key in counts or key in measured:
            found, tolerance = measured.get(key, Measurement()), exact.tolerances[key]
            result.findings.append(Finding(*key, found, tolerance, counts.get(key)))
    # Weights are not on the data path.
    computed = (f for f in result.findings if f.part != WEIGHTS)
    result.first = next((f for f in computed if f.relative_error > f.tolerance), None)
    result.settings = [f for f in compare_configs(examined_config, architecture) if not f.ok]
    return result


PUBLISHED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings"),
    *("num_experts", "moe_intermediate_size", "moe_layers"),
)


def _check_same_shape(reference: Architecture, examined: Architecture) -> None:
    """Raise BadInput if the models differ in shape, so that values cannot be compared."""
    for name in PUBLISHED:
        expected, actual = getattr(reference, name), getattr(examined, name)
        if expected != actual:
            raise BadInput(
                f"The two models cannot be compared module by module: {name} is {expected} in the "
                f"Hugging Face checkpoint and {actual} in the Megatron-Core one. Convert again "
                "from this Hugging Face checkpoint."
            )


def _expected_counts(
    exact: Recording, case: ParityCase, reference: TraceReference, frozen: Mapping[str, int]
) -> dict[tuple[str, str], int]:
    """Return how many values each comparison must cover."""
    architecture = reference.architecture
    tokens = sum(len(span.sample.input_ids) for span in exact.micro.spans)
    counts: dict[tuple[str, str], int] = {}
    for part, values in ((ACTIVATIONS, exact.values), (ACTIVATION_GRADIENTS, exact.gradients)):
        for name, value in values.items():
            rows = tokens if value.ndim == 3 else len(value)
            counts[part, name] = rows * value.shape[-1]
    counts |= {(WEIGHTS, name): count for name, count in reference.value_counts().items()}
    if case.gradients:
        trained = reference.value_counts(frozen)
        counts |= {(GRADIENTS, name): count for name, count in trained.items()}
    copies = len(exact.expected.batch.micro_batches)
    counts["logits", "all"] = copies * tokens * architecture.vocab_size
    counts["loss", "all"] = copies * tokens
    fused = ("input_layernorm", "post_attention_layernorm")  # te: into the next linear layer
    for part, name in list(counts):
        backward = part == ACTIVATION_GRADIENTS
        # Ranks that share a head have each a part of its gradient.
        shared = (
            backward
            and name.endswith("k_norm")
            and case.layout.tp > architecture.num_key_value_heads
        )
        inside = (backward or part == ACTIVATIONS) and name.endswith(fused) and case.spec == "te"
        if shared or inside:
            del counts[part, name]
    return counts


def from_prompt(
    checkpoint: str | Path,
    prompt: str,
    images: Sequence[str | Path] = (),
    videos: Sequence[str | Path] = (),
    *,
    multiple: int = 1,
) -> MicroBatch:
    """Make a micro-batch with the checkpoint's own processor and chat template.

    Args:
        checkpoint: Hugging Face checkpoint directory with tokenizer and processor.
        prompt: the user's text after the images and videos, or around their tags; see
            :func:`mcore_qwen3vl.generation.prompts.user_turns`.
        multiple: number that the layout requires the length to be a multiple of; the prompt is
            padded on the right. See :func:`mcore_qwen3vl.model.inputs.length_multiple`.

    Raises:
        BadInput: an image or video cannot be read, or tags and media do not match.
    """
    # Imported here, because megatron must not be imported before the CPU backend is installed.
    from mcore_qwen3vl.data import load_processor
    from mcore_qwen3vl.generation.prompts import process_conversations, user_turns

    processor = load_processor(checkpoint)
    inputs = process_conversations(processor, user_turns([prompt], images, videos))
    ids = inputs["input_ids"][0]
    counts = torch.ones(len(ids))
    counts[-1] = 0  # no token follows the last one
    media = {name: inputs.get(name) for name in MEDIA}
    sample = Sample(input_ids=ids, loss_mask=counts, **media)
    return pad_to_micro_batch(Architecture.from_hf(checkpoint), [sample], multiple=multiple)
