"""The rank's side of a parity case: Megatron's own schedule, compared slice by slice.

Every rank is forked from the process that holds the reference. So it compares its values with its
slice of the reference, and sends back numbers only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import megatron.core.models.mimo  # noqa: F401  # or each forked rank imports it for its optimizer
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor

from mcore_qwen3vl.config import Architecture, ExpertLayout
from mcore_qwen3vl.converters.adapters.adapter import Adapter
from mcore_qwen3vl.converters.identify import identify
from mcore_qwen3vl.converters.live import (
    Values,
    factor_parts,
    gradient,
    hf_parts,
    load_weights,
    unwrap,
)
from mcore_qwen3vl.model import pointwise
from mcore_qwen3vl.model.freeze import Freezing
from mcore_qwen3vl.model.lora import adapt
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel, build_chunks
from mcore_qwen3vl.runtime.launch import initialize, tell
from mcore_qwen3vl.training.optimizer import use_multi_tensor
from mcore_qwen3vl.verification.measurement import FROZEN, Measurement, Measurements, measure, merge
from mcore_qwen3vl.verification.parity.case import AdamW, MicroBatch, ParityCase, computing_in
from mcore_qwen3vl.verification.parity.reference import AFTER_STEP, Expected, Stepped, move_to_files

IN_MEMORY: ExpertLayout = "v5"
"""The layout of experts in memory under transformers 5, whatever the checkpoint has."""

BUCKET_VALUES = 20_000
"""DDP's bucket size: small, so that even a tiny model reduces its gradients in several buckets."""

SLICE_VALUES = 1 << 24
"""Values of a parameter that the optimizer has states of at a time: 128 MiB of states."""

HEAD_CHUNK = 7
"""Tokens whose logits the head holds at a time: few, so that there are several chunks."""


def measure_on_rank(
    path: Path,
    case: ParityCase,
    batches: list[Expected],
    stepped: Stepped | None,
    adapter: Adapter | None,
    mcore: Path | None,
) -> list[Measurements]:
    """Run `case` on this rank and compare; every rank of the layout calls this.

    Args:
        path: Hugging Face checkpoint directory.
        batches: the reference of each batch.
        stepped: the reference's parameters after an optimizer step on the last batch.
        adapter: LoRA adapter, if any, which is then the only thing trained.
        mcore: Megatron-Core checkpoint to take the weights from instead.

    Returns:
        This rank's measurements of each batch.
    """
    initialize(case.layout)
    uneven = any(b.batch.uneven for b in batches)
    with computing_in(case.torch_dtype):
        engine = Engine(path, case, uneven=uneven, mcore=mcore, adapter=adapter)
        if case.overlap:
            # In its first batch DDP counts gradients, and does not overlap.
            engine.forward_backward(batches[0])
        measured = []
        for batch in batches:
            measured.append(engine.measure(batch))
            if dist.get_rank() == 0:
                tell(batch.batch.name)
        if stepped is not None and case.adamw is not None:
            after_step = engine.measure_step(case.adamw, stepped, batches[-1])
            measured[-1] = merge([measured[-1], after_step])
    return measured


@dataclass(frozen=True)
class _Output:
    """What the last stage computed for one micro-batch."""

    number: int
    rows: Tensor  # (s,): this rank's tokens of each sequence
    losses: Tensor  # (B, s)
    logits: Tensor  # (B, s, V / tp)


class Engine:
    """This rank's part of the model, wrapped as Megatron's training loop wraps it.

    `uneven` says whether micro-batches differ in shape. For the others see `measure_on_rank`.
    """

    def __init__(
        self,
        path: Path,
        case: ParityCase,
        *,
        uneven: bool,
        mcore: Path | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        self.case = case
        if case.compile_pointwise:
            pointwise.compile_pointwise()
        overrides = {
            "calculate_per_token_loss": True,
            "params_dtype": case.torch_dtype,
            "variable_seq_lengths": uneven,
            "head_chunk": HEAD_CHUNK,
            **(_forbid_tf32(case) if case.dtype == "fp32" else {}),
            **({"moe_router_dtype": "fp64"} if case.dtype == "fp64" else {}),
            **case.config,
        }
        self.chunks = build_chunks(
            Architecture.from_hf(path), case.layout, spec=case.spec, **overrides
        )
        for chunk in self.chunks:
            chunk.config.overlap_moe_expert_parallel_comm = case.overlap_experts
        load_weights(self.chunks, identify(mcore or path))
        if case.weights_in_files and case.device == "cpu":
            for chunk in self.chunks:
                move_to_files(chunk.parameters())
        freezing = Freezing(case.freeze) if adapter is None else adapt(self.chunks, adapter)
        for chunk in self.chunks:
            freezing.apply(chunk)
        freezing.check()
        self.model: list[Any] = self.chunks
        if case.gradients:
            self.model = [self._wrap_in_ddp(chunk, i) for i, chunk in enumerate(self.chunks)]
            self._configure_schedule()
        self._logits: Tensor | None = None
        if self.chunks[-1].post_process:
            self.chunks[-1].output_layer.register_forward_hook(self._keep_logits, with_kwargs=True)

    def measure(self, expected: Expected) -> Measurements:
        """Run one pass over a global batch and compare it with the reference."""
        outputs = self.forward_backward(expected)
        measured = [self._measure_output(output, expected) for output in outputs]
        if self.case.gradients:
            if self.case.distributed_optimizer:
                for ddp in self.model:
                    _gather_gradients(ddp)
            measured.append(self._measure_parts("gradients", gradient, expected.gradients))
            measured.append(self._count_frozen())
        return merge(measured)

    def measure_step(self, adamw: AdamW, stepped: Stepped, expected: Expected) -> Measurements:
        """Take one optimizer step from the gradients of the last batch and compare its results.

        If the new parameters are gathered during the following forward pass, that pass is compared
        too: a weight that is read before its gather has ended is still the old one.
        """
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                **asdict(adamw),
                bf16=self.case.dtype == "bf16",
                params_dtype=self.case.torch_dtype,
                use_distributed_optimizer=self.case.distributed_optimizer,
                overlap_param_gather=self.case.overlaps_gather,
            ),
            self.model,
        )
        use_multi_tensor()
        _set_rates_and_decay(optimizer, adamw)
        _step_slice_by_slice(optimizer)
        _, norm, _ = optimizer.step()
        forward: list[Measurements] = []
        if self.case.overlaps_gather:
            forward = [
                {(AFTER_STEP, "all"): self._measure_logits(output, stepped.logits, expected)}
                for output in self.forward_backward(expected)
            ]
            for ddp in self.model:
                ddp.start_param_sync(force_sync=True)
        measured = self._measure_parts("parameters", _trained_values, stepped.parameters)
        norms = torch.tensor(float(norm)), torch.tensor(stepped.grad_norm)
        measured["gradient norm", "all"] = measure(*norms, main=dist.get_rank() == 0)
        return merge([measured, *forward])

    def forward_backward(self, expected: Expected) -> list[_Output]:
        """Run forward and, with gradients, backward over this rank's part of a global batch."""
        micro_batches = expected.batch.micro_batches
        numbers = expected.batch.numbers_of_rank(
            mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        )
        outputs: list[_Output] = []

        def forward_step(
            iterator: Iterator[int], model: Any, return_schedule_plan: bool = False
        ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]:
            number = next(iterator)
            micro = micro_batches[number]
            chunk = unwrap(model)[0]
            call = chunk.build_schedule_plan if return_schedule_plan else model
            result = call(**self._model_arguments(micro))

            def summed_loss(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                assert self._logits is not None
                rows = chunk.local_tokens(micro.input_ids.shape[1], _packed_seq_params(micro))
                # Combined 1F1B frees the losses.
                outputs.append(_Output(number, rows, losses.detach().clone(), self._logits))
                counts = micro.loss_mask[:, rows].to(losses.device)
                return (losses * counts).sum(), counts.sum().int(), {}

            return result, summed_loss

        if self.case.gradients:
            for ddp in self.model:
                ddp.zero_grad_buffer()
        batch_size, length = micro_batches[numbers[0]].input_ids.shape
        with torch.set_grad_enabled(self.case.gradients):
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[iter(numbers) for _ in self.model],
                model=self.model,
                num_microbatches=len(numbers),
                seq_length=length,
                micro_batch_size=batch_size,
                forward_only=not self.case.gradients,
            )
        return outputs

    def _model_arguments(self, micro: MicroBatch) -> dict[str, Any]:
        device = self.case.device
        mask, visual = micro.attention_mask, micro.visual
        return {
            "input_ids": micro.input_ids.to(device),
            "position_ids": micro.position_ids.to(device),
            "attention_mask": None if mask is None else mask.to(device),
            "labels": micro.labels.to(device),
            "visual": None if visual is None else visual.to(device),
            "packed_seq_params": _packed_seq_params(micro),
        }

    def _measure_output(self, output: _Output, expected: Expected) -> Measurements:
        number, rows = output.number, output.rows
        valid = expected.valid[number][:, rows]  # (B, s)
        main = mpu.get_tensor_model_parallel_rank() == 0
        right = expected.losses[number][:, rows][valid]
        return {
            ("logits", "all"): self._measure_logits(output, expected.logits, expected),
            ("loss", "all"): measure(output.losses.cpu()[valid], right, main=main),
        }

    def _measure_logits(
        self, output: _Output, logits: Sequence[Tensor], expected: Expected
    ) -> Measurement:
        number, rows = output.number, output.rows
        valid = expected.valid[number][:, rows]  # (B, s)
        width = output.logits.shape[-1]
        first = mpu.get_tensor_model_parallel_rank() * width
        vocabulary = slice(first, first + width)
        return measure(output.logits.cpu()[valid], logits[number][:, rows, vocabulary][valid])

    def _measure_parts(
        self, kind: str, values: Values, expected: Mapping[str, Tensor]
    ) -> Measurements:
        """Compare every local parameter with its slices of Hugging Face tensors."""
        base = hf_parts(self.chunks, values, expert_layout=IN_MEMORY)
        return merge(
            {(kind, p.label): measure(p.local.cpu(), expected[p.name][p.box], main=p.main)}
            for p in chain(base, factor_parts(self.chunks, values))
        )

    def _count_frozen(self) -> Measurements:
        """Count the frozen values of each tensor, and assert that they have no gradient."""
        for chunk in self.chunks:
            for parameter in chunk.parameters():
                has_gradient = parameter.grad is not None or hasattr(parameter, "main_grad")
                assert parameter.requires_grad or not has_gradient
        parts = hf_parts(self.chunks, lambda p: None if p.requires_grad else p.data)
        return merge(
            {(FROZEN, part.label): Measurement(count=part.local.numel() * part.main)}  # copies: 0
            for part in parts
        )

    def _keep_logits(self, head: Any, inputs: Any, kwargs: Any, outputs: Any) -> None:
        self._logits = logits_of(head, inputs, kwargs, outputs).transpose(0, 1)

    def _wrap_in_ddp(self, chunk: Qwen3VLModel, number: int) -> DistributedDataParallel:
        return DistributedDataParallel(
            chunk.config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=self.case.dtype != "fp64",
                overlap_grad_reduce=self.case.overlap,
                use_distributed_optimizer=self.case.distributed_optimizer,
                overlap_param_gather=self.case.overlaps_gather,
                bucket_size=BUCKET_VALUES,
            ),
            chunk,
            disable_bucketing=number > 0,  # as Megatron's training does
        )

    def _configure_schedule(self) -> None:
        """Set what Megatron's training loop sets before it calls the schedule."""
        config = get_model_config(self.model[0])
        config.finalize_model_grads_func = finalize_model_grads
        if self.case.overlap:
            no_sync = [ddp.no_sync for ddp in self.model]
            sync = [ddp.start_grad_sync for ddp in self.model]
            single = len(self.model) == 1
            config.no_sync_func = no_sync[0] if single else no_sync
            config.grad_sync_func = sync[0] if single else sync


def _forbid_tf32(case: ParityCase) -> dict[str, Any]:
    """Keep the operands of float32 products from being rounded to TF32's ten bits from now on.

    PyTorch rounds them in convolutions, and in NVIDIA's containers everywhere.

    Returns:
        ``TransformerConfig`` fields. In any layer spec, Megatron uses Transformer Engine's matmul
        for routers, which is always in TF32 except for float64.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    return {"moe_router_dtype": "fp64"} if case.spec == "torch" and HAVE_TE else {}


def logits_of(head: Any, inputs: Any, kwargs: dict[str, Any], outputs: Any) -> Tensor:
    """Return the logits that a forward hook of the head sees; recompute them if it gave losses.

    Returns:
        Logits (s, B, V / tp), a copy: Megatron's cross entropy works in place.
    """
    if "reduce" not in kwargs:
        return outputs[0].detach().clone()
    with torch.no_grad():
        logits, _ = head.forward(*inputs)
    return logits


def _trained_values(parameter: torch.nn.Parameter) -> Tensor | None:
    """Return the values to compare of a parameter; None, which leaves it out, if it is frozen."""
    return parameter.data if parameter.requires_grad else None


def _packed_seq_params(micro: MicroBatch) -> PackedSeqParams | None:
    """Return the bounds of packed samples; the model completes them for its kernels."""
    if micro.cu_seqlens is None:
        return None
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=micro.cu_seqlens)


def _gather_gradients(ddp: DistributedDataParallel) -> None:
    """Complete gradients that the distributed optimizer left scattered over its DP ranks."""
    for buffer in [*ddp.buffers, *ddp.expert_parallel_buffers]:
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            mine = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, mine, group=group)


def _step_slice_by_slice(optimizer: Any) -> None:
    """Let Megatron's optimizer have the states of a few rows at a time, and then drop them.

    Adam's states of all parameters would take twice the memory of the model. Megatron groups and
    clips as always. Only then it calls the optimizer within, of torch or Transformer Engine, which
    computes each value of a parameter from the values at the same place.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is not None:
            part.optimizer.step = partial(_step_slices, part.optimizer, part.optimizer.step)


def _step_slices(optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> None:
    """Call an optimizer's own `step` for some rows at a time, which are its only parameter then."""
    groups = optimizer.param_groups
    for group in groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            rows = max(1, SLICE_VALUES * len(parameter) // parameter.numel())
            slices = zip(parameter.data.split(rows), parameter.grad.split(rows), strict=True)
            for values, grad in slices:
                values.grad = grad
                optimizer.param_groups = [{**group, "params": [values]}]
                step()
                optimizer.state.clear()  # the one step that is taken needs no moments afterwards
    optimizer.param_groups = groups


def _set_rates_and_decay(optimizer: Any, adamw: AdamW) -> None:
    """Give each parameter group its learning rate and decay, which Megatron's scheduler sets."""
    OptimizerParamScheduler(
        optimizer,
        init_lr=adamw.lr,
        max_lr=adamw.lr,
        min_lr=adamw.lr,
        lr_warmup_steps=0,
        lr_decay_steps=1,
        lr_decay_style="constant",
        start_wd=adamw.weight_decay,
        end_wd=adamw.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
