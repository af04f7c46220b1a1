"""``mcore-qwen3vl memory``: the memory that training under a layout takes on each GPU."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mcore_qwen3vl import console
from mcore_qwen3vl.cli import sources
from mcore_qwen3vl.cli.options import Json, layout_flags
from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.mcore.paths import config_folder
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.shapes import SHAPES

if TYPE_CHECKING:
    from mcore_qwen3vl.training.memory import Memory

LABEL = "modelled, not measured"


@layout_flags()
def memory(
    model: Annotated[
        Path,
        sources.config_argument(
            "MODEL",
            "A config.json, a checkpoint directory of either kind, a hub id, or the size of a "
            "published model: 2b, 4b, 8b, 32b, 30b_a3b or 235b_a22b.",
        ),
    ],
    layout: Layout,
    first: Annotated[
        int | None,
        typer.Option(
            "--decoder-first-pipeline-num-layers",
            min=1,
            metavar="N",
            help="Decoder layers of the first pipeline stage; default: an equal share.",
        ),
    ] = None,
    last: Annotated[
        int | None,
        typer.Option(
            "--decoder-last-pipeline-num-layers",
            min=1,
            metavar="N",
            help="Decoder layers of the last pipeline stage; default: an equal share.",
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            "--pipeline-model-parallel-layout",
            metavar="SPLIT",
            help="What each virtual stage holds, as Megatron writes it: 'E|ttt|(tt|)*2tL'.",
        ),
    ] = None,
    seq_length: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens of a sequence or pack, before CP.")
    ] = 8192,
    micro_batch_size: Annotated[
        int, typer.Option(min=1, metavar="N", help="Sequences in a micro-batch; 1 when packed.")
    ] = 1,
    visual_share: Annotated[
        float,
        typer.Option(min=0, max=1, help="Share of the tokens that belong to images and videos."),
    ] = 0.5,
    recompute: Annotated[
        Literal["none", "cheap", "full"],
        typer.Option(
            help="none: --keep-activations; cheap: as train does without flags; full: layers and "
            "vision blocks keep their inputs only."
        ),
    ] = "cheap",
    json: Json = False,
) -> None:
    """Memory of a rank of each pipeline stage in training: modelled, not measured.

    For bf16 weights under the distributed optimizer, with fp32 gradients, main weights and Adam
    moments. Fragmentation, NCCL's buffers and the CUDA context come on top.
    """
    from mcore_qwen3vl.training.memory import Workload, by_stage

    published = SHAPES / f"{model}.json"
    architecture = Architecture.from_hf(published if published.exists() else config_folder(model))
    layout = replace(layout, first=first, last=last, split=split)
    layout.validate(architecture)
    work = Workload(seq_length, micro_batch_size, visual_share)
    stages = by_stage(architecture, layout, work, recompute)
    layers = layout.layers_per_stage(architecture.num_hidden_layers)
    if not json:
        _show(layout, layers, stages)
        return
    listing = [
        {"layers": count, **asdict(stage), "total": stage.total}
        for count, stage in zip(layers, stages, strict=True)
    ]
    found = {"kind": LABEL, "unit": "bytes", "layout": str(layout), "gpus": layout.world_size}
    console.emit_json({**found, **asdict(work), "recompute": recompute, "stages": listing})


def _show(layout: Layout, layers: list[int], stages: list[Memory]) -> None:
    parts = list(asdict(stages[0]))
    ranks = f"{layout.world_size} GPU{'s' if layout.world_size > 1 else ''}"
    lines = console.table(
        f"GB on one GPU of each pipeline stage, {LABEL}: {layout}, {ranks}",
        *(">stage", ">layers", *(f">{part}" for part in parts), ">total"),
    )
    for number, (count, stage) in enumerate(zip(layers, stages, strict=True)):
        sizes = [*(getattr(stage, part) for part in parts), stage.total]
        lines.add_row(str(number), str(count), *(f"{size / 1e9:.1f}" for size in sizes))
    console.output.print(lines)
    console.output.print("Fragmentation, NCCL's buffers and the CUDA context come on top.")
