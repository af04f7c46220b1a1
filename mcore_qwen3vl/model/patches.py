"""The symbols of Megatron-Core and Transformer Engine that the network replaces in its process.

docs/design.md says what each is for. A run replaces others (training/step.py), and so does the CPU
backend (runtime/cpu.py).
"""

from __future__ import annotations

import os

from megatron.core.tensor_parallel import inference_layers
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.model.decoder.experts import indices_to_multihot
from mcore_qwen3vl.model.recompute import remember_fused_norms
from mcore_qwen3vl.model.transformer_config import Spec
from mcore_qwen3vl.model.weight_gradient import accumulate_in_products


def patch_libraries(config: TransformerConfig, spec: Spec) -> None:
    """Replace what the layers of a model need; a second call changes nothing.

    Raises:
        BadInput: the spec is ``te``, and Transformer Engine is not installed.
    """
    if spec == "te":
        _prepare_transformer_engine()
        remember_fused_norms()
    if config.num_moe_experts is not None:
        token_dispatcher._DeepepManager._indices_to_multihot = indices_to_multihot
    if config.gradient_accumulation_fusion:
        accumulate_in_products()
    if config.mtp_num_layers:
        _make_classes_of_mocks()


def _prepare_transformer_engine() -> None:
    """Set its environment variables, unless they are set; raise BadInput if it is missing."""
    # Transformer Engine limits the tensors of a call over all parameters by this size. Its default
    # of 20 MiB is too small for the adapters of all experts. It reads the size at the first tensor.
    os.environ.setdefault("NVTE_TENSOR_HANDLE_POOL_SIZE_MB", "200")
    # On Hopper one CUTLASS kernel then multiplies all experts of a rank in bf16. Otherwise each
    # expert is a launch, and with 128 of them the step takes twice as long
    # (docs/measurements/h200.md).
    os.environ.setdefault("NVTE_USE_CUTLASS_GROUPED_GEMM", "1")
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if not HAVE_TE:
        raise BadInput(
            "The te spec needs Transformer Engine and a GPU: install mcore-qwen3vl[te] (or use a "
            "container that has it), or choose the torch spec, which also runs on the CPU."
        )


def _make_classes_of_mocks() -> None:
    """Replace two of Megatron's layers, if they are mocks, by classes without instances.

    They are mocks without Transformer Engine. Megatron's main branch asks isinstance of them when
    it builds the MTP layer.
    """
    for name in ("InferenceColumnParallelLinear", "InferenceLayerNormColumnParallelLinear"):
        layer = getattr(inference_layers, name)
        if not isinstance(layer, type):
            # What was wrapped still gives its signature to whoever compares Megatron's versions.
            setattr(inference_layers, name, type(name, (), {"__wrapped__": layer}))
