"""A script to list the checkpoint keys of the ``te`` spec, whose modules run on the CPU here.

In the environment of ``make test-te`` (:mod:`tests.model.te.device`)::

    python -m tests.converters.te_keys > tests/converters/te-keys.json
    python -m tests.converters.te_keys ranks > tests/converters/te-rank-keys.json
"""

from __future__ import annotations

import json
import sys
from typing import Any

from mcore_qwen3vl.runtime import cpu
from tests.model.te import extension

extension.install()  # both before anything imports megatron
cpu.install()

from mcore_qwen3vl.config import Architecture  # noqa: E402
from mcore_qwen3vl.layout import Layout  # noqa: E402
from mcore_qwen3vl.runtime.launch import initialize, run_layout  # noqa: E402
from mcore_qwen3vl.tiny import tiny_config  # noqa: E402
from tests.converters.checkpoints import CASES  # noqa: E402

KEY_CASES = ["dense", "dense-tied", "moe", "mixed-listed"]
RANK_CASES = [("dense-tied", "tp2xpp2xvpp2"), ("moe", "tp2xpp2xep2+sp"), ("mixed-listed", "pp2")]


def build(case: str, layout: Layout) -> list[Any]:
    """Build the pipeline chunks of this rank."""
    from mcore_qwen3vl.model.qwen3vl import build_chunks

    initialize(layout)
    options = {k: v for k, v in CASES[case].items() if k not in ("seed", "layout")}
    return build_chunks(Architecture.from_hf(tiny_config(**options)), layout, spec="te")


def keys(case: str) -> dict[str, Any]:
    """Return the names in a ``torch_dist`` checkpoint."""
    from tests.converters.test_load_into_model import stored

    shapes, objects = stored(build(case, Layout()))
    return {
        "tensors": {key: [list(shape), str(dtype)] for key, (shape, dtype) in shapes.items()},
        "objects": sorted(objects),
    }


def rank_keys(case: str, layout: Layout) -> dict[str, Any]:
    """Return the names in this rank's file of a legacy checkpoint, by chunk, without vision's."""
    from megatron.core import parallel_state as mpu

    from mcore_qwen3vl.converters.legacy import ModelParallelRank

    chunks = build(case, layout)
    rank = ModelParallelRank(
        mpu.get_tensor_model_parallel_rank(),
        mpu.get_pipeline_model_parallel_rank(),
        mpu.get_expert_model_parallel_rank(),
    )
    found = {
        f"model{number}" if len(chunks) > 1 else "model": {
            name: None if name.endswith("_extra_state") else list(value.shape)
            for name, value in chunk.state_dict().items()
            if not name.startswith("visual.")
        }
        for number, chunk in enumerate(chunks)
    }
    return {rank.folder_name(layout): found}


if __name__ == "__main__":
    from tests.model.te import device

    device.install()
    listing: dict[str, Any] = {}
    if sys.argv[1:] == ["ranks"]:
        for case, text in RANK_CASES:
            layout = Layout.parse(text)
            ranks = run_layout(rank_keys, layout.world_size, case, layout)
            listing[f"{case} {text}"] = {**ranks[0], **ranks[-1]}  # the others add nothing new
    else:
        listing = {case: run_layout(keys, 1, case)[0] for case in KEY_CASES}
    print(json.dumps(listing, indent=1, sort_keys=True))
