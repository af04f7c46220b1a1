"""Build this rank's part of a model, for every parity check and test."""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state as mpu

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel
from mcore_qwen3vl.model.transformer_config import Spec


def build_chunks(
    architecture: Architecture,
    layout: Layout,
    *,
    spec: Spec = "torch",
    kind: type[Qwen3VLModel] = Qwen3VLModel,
    **overrides: Any,
) -> list[Qwen3VLModel]:
    """Build the pipeline chunks of this rank, with random weights; process groups must exist.

    Args:
        architecture, spec: see :class:`Qwen3VLModel`.
        layout: the layout for which the process groups were created.
        kind: the class of the chunks.
        overrides: further arguments of :meth:`Qwen3VLModel.from_hf_config`, which override the
            layout's.
    """
    return [
        kind.from_hf_config(
            architecture,
            spec=spec,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            vp_stage=stage,
            **{**layout.config_overrides(), **overrides},
        )
        for stage in (range(layout.vpp) if layout.vpp > 1 else [None])
    ]
