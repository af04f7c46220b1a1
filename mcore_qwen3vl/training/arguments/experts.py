"""Checks of Megatron's flags about routers and experts, for models that have them."""

from __future__ import annotations

from collections.abc import Mapping

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.settings.run import ComputeSettings, ParallelSettings
from mcore_qwen3vl.training.arguments.settings import Settings

_BALANCING = "--moe-router-load-balancing-type"
_OTHER_ROUTING = ("sinkhorn", "quantile_balancing")
"""Types that choose other experts than those with the largest logits."""


def check_experts(settings: Settings) -> None:
    """Refuse, with BadInput, what computes another model or ends with an error of Megatron's."""
    compute, parallel = settings.compute, settings.parallel
    _check_balancing(compute, packing=settings.data.packing)
    _check_capacity(compute, parallel)
    # A validation is not packed.
    differ = settings.rows_differ or (settings.data.packing and settings.loop.eval_iters)
    if compute.moe_token_dispatcher_type == "allgather" and differ:
        fixed = ", or give --seq-length N" if settings.data.pad_to_longest else ""
        raise BadInput(
            "--moe-token-dispatcher-type allgather takes rows of one length from all ranks, and "
            f"these differ in length: use alltoall, the default{fixed}."
        )
    if compute.moe_routing_trace_path and settings.model.cpu:
        raise BadInput(
            "--moe-routing-trace-path with --cpu: Megatron's tracer asks the CUDA device in each "
            "step. Leave it out."
        )
    if not (compute.fp8 or compute.fp4):
        _refuse(
            "pads the tokens of each expert for FP8 or FP4: add --fp8-format, or leave it out",
            {
                "--moe-router-padding-for-fp8": compute.moe_router_padding_for_fp8,
                "--moe-router-padding-for-quantization": (
                    compute.moe_router_padding_for_quantization
                ),
            },
        )
    if compute.moe_token_dispatcher_type == "flex":
        _check_flex(parallel, compute)


def _check_balancing(compute: ComputeSettings, *, packing: bool) -> None:
    given = compute.moe_router_load_balancing_type
    types = (given,) if isinstance(given, str) else given or ()
    for other in set(types).intersection(_OTHER_ROUTING):
        raise BadInput(
            f"{_BALANCING} {other} sends tokens to other experts than the model of --hf-model, "
            "whose router takes those with the largest logits: use aux_loss, seq_aux_loss, "
            "global_aux_loss or none."
        )
    if packing and "seq_aux_loss" in types:
        raise BadInput(
            f"{_BALANCING} seq_aux_loss with --packing: Megatron takes a pack for one sequence. "
            "Leave --packing out, or use aux_loss, which balances the tokens of a pack together."
        )


def _check_capacity(compute: ComputeSettings, parallel: ParallelSettings) -> None:
    divided = parallel.tensor_model_parallel_size * parallel.context_parallel_size > 1
    factor = compute.moe_expert_capacity_factor
    if factor is not None and divided and compute.moe_token_drop_policy == "position":
        raise BadInput(
            "--moe-token-drop-policy position: the ranks of a TP x CP group each have a part of a "
            "sequence, and would drop the ends of their parts. Use probs, the default."
        )


def _check_flex(parallel: ParallelSettings, compute: ComputeSettings) -> None:
    """Refuse what would end with an assertion of Megatron's or of DeepEP's kernels."""
    flag = "--moe-token-dispatcher-type flex"
    etp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    if parallel.expert_model_parallel_size * etp == 1:
        raise BadInput(f"{flag}: nothing is exchanged: add --expert-model-parallel-size N.")
    if not compute.bf16:
        raise BadInput(f"{flag}: DeepEP's kernels add up experts' outputs in bf16: add --bf16.")


def _refuse(why: str, flags: Mapping[str, bool]) -> None:
    if named := [flag for flag, is_set in flags.items() if is_set]:
        raise BadInput(f"{', '.join(named)} {why}.")
