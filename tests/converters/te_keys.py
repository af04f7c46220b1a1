"""A script that lists the checkpoint keys of the ``te`` spec on a machine without CUDA.

Transformer Engine's Python code is enough to build the model on the meta device; its compiled
extension is replaced by a stand-in that only has the enumerations. `te-keys.json` was made so:

    pip install --no-deps --target DIR transformer_engine einops onnx onnxscript onnx_ir ml_dtypes
    python -m tests.converters.te_keys DIR > tests/converters/te-keys.json
    python -m tests.converters.te_keys DIR ranks > tests/converters/te-rank-keys.json
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

from tests.converters.checkpoints import CASES

KEY_CASES = ["dense", "dense-tied", "moe", "mixed-listed"]
RANK_CASES = [("dense-tied", "tp2xpp2xvpp2"), ("moe", "tp2xpp2xep2+sp"), ("mixed-listed", "pp2")]


class Anything:
    """An object with any attribute, callable, and 0 as a number: a stand-in for enumerations."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *args: object, **kwargs: object) -> Anything:
        return self

    def __int__(self) -> int:
        return 0

    __index__ = __int__


def stand_in(packages: Path) -> types.ModuleType:
    """Make the extension, with the two enumerations whose members Python mirrors and checks."""
    module = types.ModuleType("transformer_engine_torch")
    anything = Anything()
    mirrored = {"DType": "constants.py", "NVTE_Fused_Attn_Backend": "cpp_extensions/fused_attn.py"}
    for name, file in mirrored.items():
        source = (packages / "transformer_engine" / "pytorch" / file).read_text()
        members = re.findall(rf"^    \w+ = int\((?:tex\.)?{name}\.(\w+)\)", source, re.MULTILINE)
        setattr(module, name, enum.IntEnum(name, members, start=0))

    def attribute(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return anything

    module.__getattr__ = attribute  # type: ignore[method-assign]
    return module


def prepare(packages: Path) -> None:
    """Make Transformer Engine importable and its modules constructible."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    sys.path.insert(0, str(packages))
    sys.modules["transformer_engine_torch"] = stand_in(packages)
    import torch
    import transformer_engine.common as common

    common.load_framework_extension = lambda framework: None
    from mcore_qwen3vl.runtime import cpu

    cpu.install()
    properties = types.SimpleNamespace(major=9, minor=0, multi_processor_count=1)
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_properties = lambda device=None: properties
    from megatron.core.tensor_parallel import random

    random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()


def build(case: str, layout: str = "single", vp_stage: int | None = None) -> Any:
    """Build one pipeline chunk of this rank, without memory for its parameters."""
    import torch
    from megatron.core import parallel_state as mpu

    from mcore_qwen3vl.config import Architecture
    from mcore_qwen3vl.layout import Layout
    from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel
    from mcore_qwen3vl.tiny.tiny_checkpoint import tiny_config

    options = {k: v for k, v in CASES[case].items() if k not in ("seed", "layout")}
    with torch.device("meta"):
        return Qwen3VLModel.from_hf_config(
            Architecture.from_hf(tiny_config(**options)),
            spec="te",
            init_model_with_meta_device=True,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            vp_stage=vp_stage,
            **Layout.parse(layout).config_overrides(),
        )


def keys(case: str) -> dict[str, Any]:
    """Return the names in a ``torch_dist`` checkpoint."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    from mcore_qwen3vl.layout import Layout
    from mcore_qwen3vl.runtime.launch import initialize

    initialize(Layout())
    state = build(case).sharded_state_dict()
    apply_factories(state)
    tensors = [v for v in nested_values(state) if isinstance(v, ShardedTensor)]
    objects = [v for v in nested_values(state) if not isinstance(v, ShardedTensor)]
    return {
        "tensors": {t.key: [list(t.global_shape), str(t.dtype)] for t in tensors},
        "objects": sorted(o.unique_key for o in objects),
    }


def rank_keys(case: str, layout_text: str) -> dict[str, Any]:
    """Return the names in this rank's file of a legacy checkpoint, by chunk, without vision's."""
    from megatron.core import parallel_state as mpu

    from mcore_qwen3vl.converters.legacy import Rank
    from mcore_qwen3vl.layout import Layout
    from mcore_qwen3vl.runtime.launch import initialize

    layout = Layout.parse(layout_text)
    initialize(layout)
    rank = Rank(
        mpu.get_tensor_model_parallel_rank(),
        mpu.get_pipeline_model_parallel_rank(),
        mpu.get_expert_model_parallel_rank(),
    )
    folder = rank.folder_name(layout)
    chunks = {}
    for vp in range(layout.vpp):
        state = build(case, layout_text, vp if layout.vpp > 1 else None).state_dict()
        chunks[f"model{vp}" if layout.vpp > 1 else "model"] = {
            name: None if name.endswith("_extra_state") else list(value.shape)
            for name, value in state.items()
            if not name.startswith("visual.")
        }
    return {folder: chunks}


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
    from mcore_qwen3vl.layout import Layout
    from mcore_qwen3vl.runtime.launch import run_layout

    listing: dict[str, Any] = {}
    if sys.argv[2:] == ["ranks"]:
        for case, layout in RANK_CASES:
            ranks = run_layout(rank_keys, Layout.parse(layout).world_size, case, layout)
            first_and_last = {**ranks[0], **ranks[-1]}  # the others add nothing new
            listing[f"{case} {layout}"] = first_and_last
    else:
        listing = {case: run_layout(keys, 1, case)[0] for case in KEY_CASES}
    print(json.dumps(listing, indent=1, sort_keys=True))
