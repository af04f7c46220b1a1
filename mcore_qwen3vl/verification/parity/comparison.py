"""The comparison of a case with Hugging Face: the reference, the ranks, the findings."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import psutil

from mcore_qwen3vl.console import CountProgress, no_progress
from mcore_qwen3vl.converters.adapters.config import Preset
from mcore_qwen3vl.converters.identify import identify
from mcore_qwen3vl.converters.mapping.parameters import count_by_kind
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime import cpu
from mcore_qwen3vl.runtime.launch import check_gpus, describe_device, run_layout
from mcore_qwen3vl.runtime.lifetime import scratch_folder
from mcore_qwen3vl.verification.measurement import (
    Measurements,
    judge_measurements,
    measure,
    merge,
    take_frozen,
)
from mcore_qwen3vl.verification.parity.case import (
    RECIPES,
    AdamW,
    Dtype,
    GlobalBatch,
    ParityCase,
    batch_names_of,
    build_batch,
    preset_config,
    write_random_adapter,
)
from mcore_qwen3vl.verification.parity.reference import (
    AFTER_STEP,
    Expected,
    ReferenceCheckpoint,
    return_freed_memory,
)
from mcore_qwen3vl.verification.report import Report

if TYPE_CHECKING:  # imports megatron, before which the CPU backend must be installed
    from mcore_qwen3vl.model.transformer_config import Spec

TOLERANCE = 2e-5
"""Largest error in float32, relative to the largest expected magnitude of the same tensor."""

DOUBLE_TOLERANCE = 1e-10
"""The same in float64. Rounding alone is about 1e-14, and a hundred times that in a badly
conditioned model. A step that computes in float32, or another function, is off by 1e-8 and more."""

HALF_PRECISION_FACTOR = 2.0
"""Two bf16 runs that are each within E of the truth are within 2 E of one another."""

LARGEST_TOLERANCE = 0.5
"""With a tolerance of 1, gradients that are all zero would pass."""

GRADIENT_BYTES = 1 << 30
"""Most bytes of gradients of a run with several batches. With more, each batch runs by itself: its
gradients then need no room beside those of another, and loading both models again takes less time
than computing them."""

GB = 1e9

PROGRAM = 0.7 * GB
"""Bytes of the imported libraries and of activations; the libraries' are shared by all ranks."""

RANK = 0.4 * GB
"""Bytes that each rank adds to them."""

PARTS = ("logits", "loss", "gradients", "parameters", "gradient norm", AFTER_STEP)


def verify_parity(
    hf_dir: str | Path,
    layout: Layout | None = None,
    batches: Sequence[str] | None = None,
    *,
    gradients: bool = True,
    dtype: Dtype = "fp32",
    device: Literal["cpu", "cuda"] = "cpu",
    spec: Spec = "torch",
    lora: str | Path | None = None,
    checkpoint: str | Path | None = None,
    compile_pointwise: bool = False,
    timeout: float = 600.0,
    progress: CountProgress = no_progress,
    say: Callable[[str], None] = lambda line: None,
) -> Report:
    """Compare a checkpoint under a layout with Hugging Face's model on one process.

    In fp32 the tolerance is `TOLERANCE`, and one optimizer step is compared too. In fp64, in which
    Megatron takes no step, it is `DOUBLE_TOLERANCE`. In bf16 it is the difference between Hugging
    Face's own bf16 and fp32 runs, times `HALF_PRECISION_FACTOR`. A MoE model whose tokens are
    rounded to other experts has no such limit and is refused.

    Args:
        batches: names from ``batches.RECIPES``; default: all that `spec` takes.
        gradients: also compare gradients and parameters.
        device: of our model; the reference runs on the CPU. On ``cuda``, ranks share the GPUs of a
            machine that has fewer, and the report says so.
        lora: PEFT adapter directory, or one of ``adapters.config.Preset`` for random factors. Only
            the adapter is trained, and PEFT's model is the reference.
        checkpoint: Megatron-Core checkpoint that our model is loaded from; default: `hf_dir`.
        timeout: seconds for the ranks to finish.
        progress: shows how many passes over batches, of both models, are done.
        say: called at the start with a line about the memory and the disk space that this takes.

    Raises:
        BadInput: the layout does not divide the model, a batch is not known or not for `spec`,
            there are fewer GPUs than ranks, memory or disk space do not suffice, `checkpoint` holds
            another model, or rounding to bf16 changes too much to compare.
    """
    if checkpoint is not None:
        identify(checkpoint).require_megatron(instead="compare it with `verify tensors`")
    case = ParityCase(layout or Layout(), spec, dtype, device, gradients)
    adamw = AdamW() if gradients and dtype == "fp32" else None
    case = replace(case, adamw=adamw, compile_pointwise=compile_pointwise)
    names = list(batches or batch_names_of(spec))
    passes = itertools.count(1)
    with ExitStack() as stack:
        if lora is not None and str(lora) in get_args(Preset):
            folder = stack.enter_context(scratch_folder("mcore-qwen3vl-lora-"))
            config = preset_config(str(lora), hf_dir)
            lora = write_random_adapter(folder / "adapter", config, hf_dir)
        total = len(names) * (3 if dtype == "bf16" else 2)
        advance = stack.enter_context(progress("comparing", total, "passes"))

        def on_pass() -> None:
            advance(next(passes))

        reference = ReferenceCheckpoint(hf_dir, lora, on_pass=on_pass)
        case.layout.validate(reference.architecture)
        if device == "cuda":
            check_gpus()
        return_freed_memory()
        case = _fit_memory(reference, case, names, say)
        source = None if checkpoint is None else Path(checkpoint)
        return compare_case(
            reference, case, names, mcore=source, in_files=True, timeout=timeout, on_pass=on_pass
        )


@dataclass(frozen=True)
class Needs:
    """The most bytes that a comparison takes of this machine's memory, and of its disk."""

    memory: float
    disk: float


def memory_and_disk_of(
    reference: ReferenceCheckpoint, case: ParityCase, batches: Sequence[str]
) -> Needs:
    """Calculate what a comparison with its results in files takes.

    One model and its gradients are in memory at a time: first the reference, then the ranks of
    ours together. To these come temporary copies of the largest tensor, by autograd and AdamW, and
    Megatron's copy of the vision tower's gradients under sequence parallelism.
    """
    architecture, layout = reference.architecture, case.layout
    tensors: Counter[str] = Counter()
    for name, count in reference.value_counts().items():
        tensors[name.partition("[")[0]] += count  # HF's experts are one tensor
    trained = tensors
    if reference.adapter is not None:
        trained = Counter({n: t.numel() for n, t in reference.adapter.factor_tensors().items()})
    size = 8 if case.dtype == "fp64" else 4
    gradients = size * trained.total() if case.gradients else 0
    largest = size * max(trained.values()) if case.gradients else 0
    made = [build_batch(name, architecture, multiple=case.length_multiple) for name in batches]
    tokens = [sum(m.input_ids.numel() for m in batch.micro_batches) for batch in made]
    logits = size * architecture.vocab_size * (max(tokens) if case.gradients else sum(tokens))

    reference_weights = size * tensors.total()  # to judge bf16, the reference runs in float32 too
    # Of a tied embedding there are the head's gradient, the embedding's and their sum beside the
    # one that they are added to.
    copies = 3 if architecture.tie_word_embeddings else 2
    first = max(gradients + copies * largest, 5 * largest if case.adamw else 0)
    second = RANK * layout.world_size
    our_weights = 0.0
    if case.device == "cpu":
        cpu.install()
        from mcore_qwen3vl.training.parameter_counts import rank_parameters

        ranks = layout.world_size // layout.pp  # of each stage
        for stage in range(layout.pp):
            parameters = ranks * sum(rank_parameters(architecture, layout, stage))
            our_weights += case.torch_dtype.itemsize * parameters
            if case.gradients:
                second += size * parameters if trained is tensors else ranks * gradients
        second += copies * largest / layout.tp * ranks
        if case.gradients and trained is tensors and layout.sp:
            second += size * count_by_kind(architecture)["vision"] * ranks
    # Beside gradients, files hold the parameters after a step, and bf16's gradients in two bytes.
    disk = gradients * (1 + (case.adamw is not None) + (case.dtype == "bf16") / 2)
    if case.weights_in_files:
        disk += max(reference_weights, our_weights)
        first, second = max(first, reference_weights), max(second, our_weights)  # while they load
    else:
        first, second = first + reference_weights, second + our_weights
    return Needs(PROGRAM + logits + max(first, second), disk)


def _fit_memory(
    reference: ReferenceCheckpoint,
    case: ParityCase,
    batches: Sequence[str],
    say: Callable[[str], None],
) -> ParityCase:
    """Return the case with its weights in files if memory is short; say what it takes.

    Raises:
        BadInput: the machine has too little memory or disk space for that.
    """
    available = psutil.virtual_memory().available
    needs = memory_and_disk_of(reference, case, batches)
    if needs.memory > available and case.gradients:
        case = replace(case, weights_in_files=True)
        needs = memory_and_disk_of(reference, case, batches)
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    line = (
        f"At {case.layout} this comparison takes up to {needs.memory / GB:.1f} GB of memory, of "
        f"{available / GB:.1f} GB available, and {needs.disk / GB:.1f} GB of temporary files in "
        f"{folder}, which has {free / GB:.1f} GB free."
    )
    smaller = " or pass --no-gradients" if case.gradients else ""
    if needs.memory > available:
        raise BadInput(f"{line} Use a machine with more memory{smaller}.")
    if needs.disk > free:
        raise BadInput(f"{line} Set TMPDIR to a folder with more room{smaller}.")
    say(line)
    return case


def compare_case(
    reference: ReferenceCheckpoint,
    case: ParityCase,
    batches: Sequence[str],
    *,
    mcore: Path | None = None,
    in_files: bool = False,
    timeout: float = 120.0,
    on_pass: Callable[[], None] = lambda: None,
) -> Report:
    """Run `case` on `batches` and compare everything with the reference.

    Args:
        batches: names from `RECIPES`; an optimizer step is taken on the last of each run.
        mcore: Megatron-Core checkpoint that our model is loaded from; default: the reference's.
        in_files: keep the reference's results in temporary files, and let the reference leave
            memory before our model is loaded. By default it stays, for the next case.
        on_pass: called after each pass of our model over a batch.

    Raises:
        BadInput: the layout does not divide the model or a batch, the spec takes no such batch, or
            rounding to bf16 changes too much to compare.
    """
    source = mcore or reference.path
    report = Report(
        f"{source.name} at {case} against {reference.library}",
        {
            "layout": str(case.layout),
            "spec": case.spec,
            "dtype": case.dtype,
            "device": describe_device(case.device, case.layout.world_size),
        },
    )
    made = tuple(
        build_batch(n, reference.architecture, multiple=case.length_multiple) for n in batches
    )
    case.validate(reference.architecture, made)
    for names in _group_into_runs(
        made, case, _batches_per_run(reference, case) if in_files else len(made)
    ):
        with scratch_folder("mcore-qwen3vl-parity-") if in_files else nullcontext() as folder:
            allowed = dict.fromkeys(PARTS, DOUBLE_TOLERANCE if case.dtype == "fp64" else TOLERANCE)
            if case.dtype == "bf16":
                allowed = half_precision_tolerances(reference, case, names, folder)
            expected, stepped = reference.results(names, case, folder)
            if case.device == "cpu":
                cpu.install()
            # Imported here, once, so that the forked ranks need not import it again.
            from mcore_qwen3vl.verification.parity.on_rank import measure_on_rank

            ranks = run_layout(
                measure_on_rank,
                case.layout.world_size,
                *(reference.path, case, expected, stepped, reference.adapter, mcore),
                timeout=timeout,
                device=case.device,
                heard=lambda batch: on_pass(),
            )
            if in_files:
                reference.forget()
        for number, batch in enumerate(expected):
            measured = merge(rank[number] for rank in ranks)
            counts = _expected_value_counts(reference, case, batch, take_frozen(measured))
            if stepped is not None and number == len(expected) - 1:
                trained = {n: c for (part, n), c in counts.items() if part == "gradients"}
                counts |= {("parameters", n): c for n, c in trained.items()}
                counts["gradient norm", "all"] = 1
                if case.overlaps_gather:
                    counts[AFTER_STEP, "all"] = counts["logits", "all"]
            context = batch.batch.name
            report.findings += judge_measurements(measured, allowed, counts=counts, context=context)
    return report


def _batches_per_run(reference: ReferenceCheckpoint, case: ParityCase) -> int:
    """Return how many batches run together: as many as have small gradients together."""
    if not case.gradients:
        return len(RECIPES)
    return max(1, GRADIENT_BYTES // (4 * sum(reference.value_counts().values())))


def _group_into_runs(
    batches: Iterable[GlobalBatch], case: ParityCase, most: int
) -> list[list[str]]:
    """Return the names of batches, grouped by what one run of the ranks can take: `most` of them.

    A pipeline is told once whether micro-batches differ in shape. It must also work where it may
    assume equal shapes, so even and uneven batches run apart.
    """
    runs: tuple[list[str], list[str]] = ([], [])
    for batch in batches:
        runs[batch.uneven and case.layout.pp > 1].append(batch.name)  # False is 0, True is 1
    return [run[i : i + most] for run in runs for i in range(0, len(run), most)]


def _expected_value_counts(
    reference: ReferenceCheckpoint, case: ParityCase, expected: Expected, frozen: dict[str, int]
) -> dict[tuple[str, str], int]:
    """Return how many values there are to compare, by part and name."""
    tokens = sum(int(valid.sum()) for valid in expected.valid)
    vocabulary = reference.architecture.vocab_size
    counts = {("logits", "all"): tokens * vocabulary, ("loss", "all"): tokens}
    trained = reference.value_counts(frozen) if case.gradients else {}
    return counts | {("gradients", name): count for name, count in trained.items()}


def half_precision_tolerances(
    reference: ReferenceCheckpoint, case: ParityCase, batches: Sequence[str], folder: Path | None
) -> dict[str, float]:
    """Return by part `HALF_PRECISION_FACTOR` times the worst error of HF's own bf16 run.

    Raises:
        BadInput: HF's error is so large that the comparison would prove nothing.
    """
    worst = dict.fromkeys(("logits", "loss", "gradients"), 0.0)
    both = [reference.results(batches, c, folder)[0] for c in (case, replace(case, dtype="fp32"))]
    for rounded, exact in zip(*both, strict=True):
        # Of these findings only the errors count, whatever the tolerances that they are given.
        for finding in judge_measurements(merge(_measure_differences(rounded, exact)), worst):
            worst[finding.part] = max(worst[finding.part], finding.relative_error)
    for part, error in worst.items():
        if error * HALF_PRECISION_FACTOR > LARGEST_TOLERANCE:
            raise BadInput(
                f"bf16: Hugging Face's own {part} differ by {error:.0%} between bf16 and float32, "
                "so that no limit would prove anything. In a MoE model, rounding sends tokens to "
                "other experts: compare it in float32 (--dtype fp32)."
            )
    return {part: HALF_PRECISION_FACTOR * error for part, error in worst.items()}


def _measure_differences(actual: Expected, expected: Expected) -> Iterator[Measurements]:
    """Measure one reference against another."""
    for number, valid in enumerate(expected.valid):
        logits, losses = actual.logits[number], actual.losses[number]
        yield {
            ("logits", "all"): measure(logits[valid], expected.logits[number][valid]),
            ("loss", "all"): measure(losses[valid], expected.losses[number][valid]),
        }
    for name, gradient in expected.gradients.items():
        if gradient.any():  # rounding has no scale where the gradient is exactly zero
            yield {("gradients", name): measure(actual.gradients[name], gradient)}
