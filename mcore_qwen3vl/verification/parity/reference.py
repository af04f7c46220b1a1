"""The results of Hugging Face's own model for a batch, which ours must equal.

Every sample runs alone, unpadded and unpacked, with the positions that Hugging Face derives from
it. Padding, packing and micro-batches are what we have to get right, so the reference has none.
"""

from __future__ import annotations

import ctypes
import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_qwen3vl.config import Architecture, family_of, read_config_file
from mcore_qwen3vl.converters.adapters.adapter import read_adapter
from mcore_qwen3vl.converters.adapters.config import PREFIX, lora_layers
from mcore_qwen3vl.converters.hf.hf_checkpoint import HuggingFaceCheckpoint
from mcore_qwen3vl.converters.identify import identify
from mcore_qwen3vl.converters.mapping.forms import CURRENT, Names, names_in_transformers
from mcore_qwen3vl.converters.mapping.table import table
from mcore_qwen3vl.converters.offline.engine import nonfinite_notes
from mcore_qwen3vl.converters.storage.archive import as_bytes
from mcore_qwen3vl.converters.storage.dtypes import all_finite
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.hf_kernels import without_gpu_kernels
from mcore_qwen3vl.verification.parity.case import (
    AdamW,
    GlobalBatch,
    MicroBatch,
    ParityCase,
    RouterLosses,
    Sample,
    build_batch,
    computing_in,
    media_arguments,
)

AFTER_STEP = "logits after a step"
"""The report's part on the forward pass that overlaps the gathering of new parameters."""

PIECE_VALUES = 1 << 22
"""Values of a gradient that are in memory in float64 at a time."""

M_MMAP_THRESHOLD = -3  # of <malloc.h>


def return_freed_memory() -> None:
    """Let this process, and those forked from it, return a tensor's memory when it is freed.

    By default glibc keeps freed tensors of up to 32 MiB while anything that was allocated after
    them is still in use. With 6 of the 2B's 28 layers that was 1.5 GB more at the peak.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's own
    if set_option is not None:
        set_option(M_MMAP_THRESHOLD, 4 * 2**20)


def move_to_files(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Move the values of parameters into temporary files, which are mapped into memory.

    The system writes what it lacks memory for, and reads it again when it is used. The files have
    no names any more: they end with the last process that has them mapped.
    """
    for parameter in parameters:
        with NamedTemporaryFile() as file:
            file.write(as_bytes(parameter.data))
            file.flush()
            size, dtype = parameter.numel(), parameter.dtype
            mapped = torch.from_file(file.name, shared=True, size=size, dtype=dtype)
        parameter.data = mapped.view(parameter.shape)


class SavedTensors(Mapping[str, Tensor]):
    """Tensors in files, each mapped into memory only while it is used.

    Forked and started processes get names of files instead of values.

    Args:
        folder: made by this class; whoever removes it removes the tensors.
        tensors: names and values, which are written one after another.
    """

    def __init__(self, folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
        folder.mkdir()
        self._files: dict[str, tuple[Path, torch.dtype, torch.Size]] = {}
        for name, tensor in tensors:
            file = folder / str(len(self._files))
            file.write_bytes(as_bytes(tensor))
            self._files[name] = file, tensor.dtype, tensor.shape

    def __getitem__(self, name: str) -> Tensor:
        file, dtype, shape = self._files[name]
        # Not shared: what is written to the tensor stays out of the file.
        mapped = torch.from_file(str(file), shared=False, size=prod(shape), dtype=dtype)
        return mapped.view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


@dataclass(frozen=True)
class Expected:
    """The reference for one batch; logits, losses and valid have a tensor for each micro-batch."""

    batch: GlobalBatch
    logits: tuple[Tensor, ...]  # (B, S, V) float32, or float64; 0 at padding
    losses: tuple[Tensor, ...]  # (B, S) cross-entropy of each token, likewise
    valid: tuple[Tensor, ...]  # (B, S) bool: not padding
    # By HF name, in the model's dtype, of the loss summed over the tokens that count and divided by
    # their number in the whole batch; empty if not asked for.
    gradients: Mapping[str, Tensor]


@dataclass(frozen=True)
class Stepped:
    """Parameters after one optimizer step, by HF name, and the gradient norm before clipping."""

    parameters: Mapping[str, Tensor]
    grad_norm: float
    logits: tuple[Tensor, ...]  # of the same batch, with the new parameters; empty: not compared


class _Kept(NamedTuple):
    """What a sample's backward pass begins from."""

    micro: MicroBatch
    loss: Tensor  # summed over the tokens that count
    router_logits: tuple[Tensor, ...]  # (L, E) for each MoE layer


class Reference:
    """Hugging Face's model on one process; with an adapter, PEFT's, which alone has gradients.

    `network` has transformers' names of modules, which `names` tells from ours; PEFT's wrappers are
    in place of adapted ones. `trained` has the parameters with a gradient, by the names used in
    comparisons: factors are ``PARAMETER.lora_A`` and ``.lora_B``.

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
        self.names = names_in_transformers(has_vision=self.architecture.has_vision)
        with without_gpu_kernels():
            model_class = getattr(transformers, family_of(read_config_file(path)).model_class)
        self.dtype = dtype
        with computing_in(dtype):
            self.network: Any = model_class.from_pretrained(
                path, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
            )
        weights = self.network.named_parameters()
        nonfinite = [name for name, weight in weights if not all_finite(weight.detach())]
        for note in nonfinite_notes([{"nonfinite": nonfinite}]):
            raise BadInput(f"{path}: {note} What a model computes with them cannot be compared.")
        self.model = self.network
        self.trained = {self.names.current_name(n): p for n, p in self.network.named_parameters()}
        if adapter is not None:
            self.model = with_adapter(self.network, adapter)
            if dtype == torch.float64:
                self.model.double()
            self.trained = trained_parameters(self.model, self.names)
        self.model.eval()

    def compute_expected(
        self,
        batch: GlobalBatch,
        *,
        gradients: bool = True,
        router_losses: RouterLosses | None = None,
    ) -> Expected:
        """Compute logits, losses and, with `gradients`, all gradients, summed over samples.

        The gradients are of the loss plus `router_losses`; the losses leave the routers' out.
        """
        self.model.zero_grad(set_to_none=True)
        scale = 1 / batch.tokens
        # A router's loss is over several samples, so their graphs are kept for it.
        kept: list[_Kept] | None = None if router_losses is None else []
        with computing_in(self.dtype):
            micro = [self._run_micro_batch(m, scale, gradients, kept) for m in batch.micro_batches]
            if kept is not None and router_losses is not None and gradients:
                total = sum(sample.loss for sample in kept)
                total = total + self._router_loss(router_losses, kept)
                (total * scale).backward()
        logits, losses, valid = zip(*micro, strict=True)
        return Expected(
            batch, logits, losses, valid, self._gradients_or_zeros() if gradients else {}
        )

    def step(self, gradients: Mapping[str, Tensor], adamw: AdamW) -> float:
        """Take one ``torch.optim.AdamW`` step in place, and return the norm before clipping.

        The states of one parameter are gone before those of the next are made: AdamW computes each
        value of a parameter from the values at the same place.
        """
        # In float32, torch's norm of an embedding's gradient would be 2 % too small on the CPU. It
        # copies what it converts, so it gets pieces.
        pieces = (piece for g in gradients.values() for piece in g.flatten().split(PIECE_VALUES))
        norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]
        norm = torch.linalg.vector_norm(torch.stack(norms)).float()
        for name, parameter in self.trained.items():
            parameter.grad = gradients[name].clone()  # clipping changes it; they are compared yet
            torch.nn.utils.clip_grads_with_norm_([parameter], adamw.clip_grad, norm)
            torch.optim.AdamW(
                decay_groups({name: parameter}, adamw.weight_decay),
                lr=adamw.lr,
                betas=(adamw.adam_beta1, adamw.adam_beta2),
                eps=adamw.adam_eps,
            ).step()
            parameter.grad = None
        return float(norm)

    def _run_micro_batch(
        self, micro: MicroBatch, scale: float, gradients: bool, kept: list[_Kept] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run each sample, and its backward pass unless it is added to `kept` for a later one."""
        shape = micro.input_ids.shape
        logits = torch.zeros(*shape, self.architecture.vocab_size)
        losses, valid = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
        for span in micro.spans:
            sample = span.sample
            with torch.set_grad_enabled(gradients):
                output = self._run_sample(sample)
                of_sample = output.logits[0]  # (L, V)
                of_tokens = F.cross_entropy(of_sample.float(), sample.labels, reduction="none")
            if gradients:
                loss = (of_tokens * sample.loss_mask).sum()
                if kept is None:
                    (loss * scale).backward()
                else:
                    kept.append(_Kept(micro, loss, output.router_logits))
            logits[span.tokens] = of_sample.detach().float()
            losses[span.tokens] = of_tokens.detach()
            valid[span.tokens] = True
        return logits, losses, valid

    def _router_loss(self, losses: RouterLosses, samples: Sequence[_Kept]) -> Tensor:
        """Return the losses of all routers, each weighted by the tokens that it is a mean over.

        Source: HF ``load_balancing_loss_func``, for one layer at a time as in Megatron.
        """
        from transformers.models.qwen3_vl_moe import modeling_qwen3_vl_moe as hf

        key: Callable[[_Kept], int] = {
            "aux_loss": lambda sample: id(sample.micro),
            "seq_aux_loss": id,
            "global_aux_loss": lambda sample: 0,
        }[losses.kind]
        groups: dict[int, list[_Kept]] = {}
        for sample in samples:
            groups.setdefault(key(sample), []).append(sample)
        a, total = self.architecture, torch.zeros(())
        for group in groups.values():
            for of_samples in zip(*(sample.router_logits for sample in group), strict=True):
                logits = torch.cat(of_samples)  # (L of all samples, E)
                balance = hf.load_balancing_loss_func(
                    (logits,), a.num_experts, a.num_experts_per_tok
                )
                balance = balance / a.num_experts_per_tok
                z = logits.logsumexp(-1).square().mean()
                total = total + (losses.aux * balance + losses.z * z) * len(logits)
        return total

    def _run_sample(self, sample: Sample) -> Any:
        """Return the output of HF's forward for one sample; of a MoE model, with router logits."""
        ids = sample.input_ids
        # 1 at placeholders of images, 2 at those of videos.
        kinds = (ids == self.architecture.image_token_id).int()
        kinds += 2 * (ids == self.architecture.video_token_id).int()
        inputs = {"input_ids": ids[None], **media_arguments(sample)}
        if self.architecture.has_vision:
            inputs["mm_token_type_ids"] = kinds[None]
        more = {"output_router_logits": True} if self.architecture.is_moe else {}
        return self.model(**inputs, use_cache=False, **more)

    def _gradients_or_zeros(self) -> dict[str, Tensor]:
        """Return all gradients, zero where the loss does not reach (vision in a batch of text)."""
        return {
            name: p.new_zeros(()).expand(p.shape) if p.grad is None else p.grad
            for name, p in self.trained.items()
        }


def with_adapter(model: Any, adapter: Path) -> Any:
    """Return PEFT's model, in which only the adapter is trained."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about experts' rank patterns, which work
        return PeftModel.from_pretrained(model, adapter, is_trainable=True)


def trained_parameters(model: Any, names: Names = CURRENT) -> dict[str, torch.nn.Parameter]:
    """Return what trains in PEFT's model: ``PARAMETER.lora_A`` and ``.lora_B``, and the rest.

    `names` tells our names of parameters from the model's.
    """
    trained: dict[str, torch.nn.Parameter] = {
        f"{name}.{factor}": getattr(layer, factor)["default"].weight
        for _, name, layer in lora_layers(model, names)
        for factor in ("lora_A", "lora_B")
    }
    factors = set(trained.values())
    for path, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in factors:
            name = path.removeprefix(PREFIX).replace(".modules_to_save.default", "")
            trained[names.current_name(name)] = parameter
    return trained


def decay_groups(
    trained: Mapping[str, torch.nn.Parameter], weight_decay: float
) -> list[dict[str, Any]]:
    """Return an optimizer's groups; decay spares biases and one-dimensional weights."""
    groups: tuple[list[Tensor], list[Tensor]] = ([], [])
    for name, parameter in trained.items():
        spared = parameter.ndim <= 1 or name.endswith("bias")
        groups[spared].append(parameter)  # False is 0, True is 1
    rates = (weight_decay, 0.0)
    return [{"params": p, "weight_decay": r} for p, r in zip(groups, rates, strict=True)]


class ReferenceCheckpoint:
    """A Hugging Face checkpoint to compare with.

    With the directory `lora` of an adapter, PEFT's model is the reference, and only it is trained.
    `on_pass` is called after each pass over a batch.
    """

    def __init__(
        self,
        path: str | Path,
        lora: str | Path | None = None,
        *,
        on_pass: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = Path(path)
        identify(self.path).require_huggingface()
        self.architecture = Architecture.from_hf(self.path)
        self.adapter = None if lora is None else read_adapter(lora, self.path)
        self.lora = None if lora is None else Path(lora)
        self._on_pass = on_pass
        self._models: dict[torch.dtype, Reference] = {}
        self._expected: dict[tuple[object, ...], Expected] = {}
        self._stepped: dict[tuple[object, ...], Stepped] = {}

    @property
    def library(self) -> str:
        """The library whose model is the reference."""
        return "Hugging Face" if self.adapter is None else "PEFT"

    def load(self, dtype: torch.dtype) -> Reference:
        """Load the reference in this dtype."""
        return Reference(self.path, self.lora, dtype=dtype)

    def model(
        self, dtype: torch.dtype = torch.float32, *, weights_in_files: bool = False
    ) -> Reference:
        """Return the reference in this dtype, loaded once unless a step has changed it."""
        if dtype not in self._models:
            reference = self._models[dtype] = self.load(dtype)
            if weights_in_files:
                move_to_files(reference.model.parameters())
        return self._models[dtype]

    def results(
        self, batches: Sequence[str], case: ParityCase, folder: Path | None
    ) -> tuple[list[Expected], Stepped | None]:
        """Return the reference's results for `batches`, and after a step on the last of them.

        Results are computed once, until :meth:`forget`.

        Args:
            batches: names; the case decides on dtype, lengths, gradients and the step.
            folder: where gradients and parameters are written, so that they take no memory, and
                the model takes none after this call. By default all of them stay in memory.
        """
        expected = [self._results_of(name, case, folder) for name in batches]
        stepped = None
        if case.adamw is not None and not case.freeze:
            stepped = self._results_after_step(expected[-1], case, case.adamw, folder)
        if folder is not None:
            self._models.clear()
            gc.collect()
        return expected, stepped

    def forget(self) -> None:
        """Drop all results, whose files may then be removed."""
        self._expected.clear()
        self._stepped.clear()

    def _results_of(self, batch: str, case: ParityCase, folder: Path | None) -> Expected:
        router_losses = case.router_losses
        key = (batch, case.length_multiple, case.dtype, case.gradients, router_losses)
        if key not in self._expected:
            with computing_in(case.torch_dtype):
                built = build_batch(batch, self.architecture, multiple=case.length_multiple)
            model = self.model(case.torch_dtype, weights_in_files=case.weights_in_files)
            expected = model.compute_expected(
                built, gradients=case.gradients, router_losses=router_losses
            )
            if folder is not None:
                saved = SavedTensors(folder / f"{batch} {case.dtype}", expected.gradients.items())
                expected = replace(expected, gradients=saved)
                model.model.zero_grad(set_to_none=True)
            self._expected[key] = expected
            self._on_pass()
        return self._expected[key]

    def _results_after_step(
        self, expected: Expected, case: ParityCase, adamw: AdamW, folder: Path | None
    ) -> Stepped:
        key = (
            *(expected.batch.name, case.length_multiple, case.dtype, case.router_losses),
            *(adamw, case.overlaps_gather),
        )
        if key not in self._stepped:
            model = self.model(case.torch_dtype, weights_in_files=case.weights_in_files)
            # The step changes the model in place, so the next result loads it again. Its new
            # parameters are not copied, because nothing else holds the model after this.
            del self._models[case.torch_dtype]
            norm = model.step(expected.gradients, adamw)
            logits: tuple[Tensor, ...] = ()
            if case.overlaps_gather:  # the ranks run once more, while they gather new parameters
                logits = model.compute_expected(expected.batch, gradients=False).logits
            parameters: Mapping[str, Tensor] = {n: p.detach() for n, p in model.trained.items()}
            if folder is not None:
                parameters = SavedTensors(folder / "step", parameters.items())
            self._stepped[key] = Stepped(parameters, norm, logits)
        return self._stepped[key]

    def value_counts(self, frozen: Mapping[str, int] | None = None) -> dict[str, int]:
        """Return the number of values of each tensor, expert and factor, without `frozen` ones."""
        counts: Counter[str] = Counter()
        for row in table(self.architecture):
            for source in row.sources:
                counts[source.label] += prod(source.piece_shape)  # a row may have a part of one
        if self.adapter is not None:
            # Of a Counter this is the larger count: a whole tensor of the adapter counts once.
            counts |= {
                name: factor.numel() for name, factor in self.adapter.factor_tensors().items()
            }
        trained = {name: count - (frozen or {}).get(name, 0) for name, count in counts.items()}
        return {name: count for name, count in trained.items() if count}
