"""The vision tower's rows: the same tensors, under ``visual.`` instead of ``model.visual.``."""

from __future__ import annotations

from collections.abc import Iterator

from mcore_qwen3vl.config import VisionArchitecture
from mcore_qwen3vl.converters.mapping.row import Row, same
from mcore_qwen3vl.converters.storage.boxes import Shape


def vision_rows(v: VisionArchitecture) -> Iterator[Row]:
    """Yield the vision tower's rows, in the order of `vision_shapes`."""
    for name, shape in vision_shapes(v).items():
        yield same(f"visual.{name}", f"model.visual.{name}", shape)


def vision_shapes(v: VisionArchitecture) -> dict[str, Shape]:
    """Return the names and shapes of the parameters of HF's ``Qwen3VLVisionModel``."""
    hidden, merged = v.hidden_size, v.hidden_size * v.spatial_merge_size**2
    shapes: dict[str, Shape] = {
        "patch_embed.proj.weight": (
            hidden,
            v.in_channels,
            v.temporal_patch_size,
            v.patch_size,
            v.patch_size,
        ),
        "patch_embed.proj.bias": (hidden,),
        "pos_embed.weight": (v.num_position_embeddings, hidden),
    }
    for block in range(v.depth):
        linears = {
            "attn.qkv": (3 * hidden, hidden),
            "attn.proj": (hidden, hidden),
            "mlp.linear_fc1": (v.intermediate_size, hidden),
            "mlp.linear_fc2": (hidden, v.intermediate_size),
        }
        norms = {"norm1": hidden, "norm2": hidden}
        shapes |= _weights_and_biases(f"blocks.{block}.", norms, linears)
    mergers = {"merger.": hidden}  # its norm precedes the patch merge; the others' follow it
    mergers |= {
        f"deepstack_merger_list.{i}.": merged for i in range(len(v.deepstack_visual_indexes))
    }
    for merger, width in mergers.items():
        linears = {"linear_fc1": (merged, merged), "linear_fc2": (v.out_hidden_size, merged)}
        shapes |= _weights_and_biases(merger, {"norm": width}, linears)
    return shapes


def _weights_and_biases(
    prefix: str, norms: dict[str, int], linears: dict[str, tuple[int, int]]
) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for name, width in norms.items():
        shapes |= {f"{prefix}{name}.weight": (width,), f"{prefix}{name}.bias": (width,)}
    for name, (out, into) in linears.items():
        shapes |= {f"{prefix}{name}.weight": (out, into), f"{prefix}{name}.bias": (out,)}
    return shapes
