"""``mcore-qwen3vl data``: look at training data before training on it."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mcore_qwen3vl import console
from mcore_qwen3vl.cli import show, sources
from mcore_qwen3vl.cli.options import JsonFile, media_flags, require
from mcore_qwen3vl.data.config import MediaLimits

app = typer.Typer(help="Look at training data.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Look at training data."""


@app.command("check")
@media_flags
def check(
    path: Annotated[Path, typer.Argument(help="JSONL, WebDataset folder or energon metadataset.")],
    hf_model: Annotated[
        Path,
        sources.option("Checkpoint of either kind, or hub id, whose processor is used."),
    ],
    seq_length: Annotated[int, typer.Option(help="Longest sample, and length of a pack.")] = 8192,
    split: Annotated[str, typer.Option(help="Part of a WebDataset or metadataset.")] = "train",
    decode: Annotated[bool, typer.Option(help="Decode every image and video.")] = True,
    limit: Annotated[int | None, typer.Option(help="Stop after so many samples.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write histograms to this PNG (extra: plots).")
    ] = None,
    json: JsonFile = None,
    *,
    media: MediaLimits,
) -> None:
    """Read every sample as training would: flaws, lengths, packing efficiency."""
    console.quiet_libraries()
    from mcore_qwen3vl.converters.mcore.paths import config_folder
    from mcore_qwen3vl.data import DataConfig, load_processor
    from mcore_qwen3vl.data.check import check_data, plot_report
    from mcore_qwen3vl.runtime.extras import require_extra

    if plot is not None:  # before the data is read
        require_extra("matplotlib", "--plot")
    config = DataConfig(seq_length=seq_length, packing=True, media=media)
    processor = load_processor(config_folder(hf_model))
    report = check_data(path, processor, config, split=split, decode=decode, limit=limit)
    if plot is not None:
        plot_report(report, plot)
    if not console.emit_json({"samples": report.samples, **asdict(report)}, json):
        show.data_report(report)
        if plot is not None:
            console.output.print(f"  histograms in {plot}")
    require(not report.bad, f"{len(report.bad)} samples of {path} cannot be used.")
    require(
        bool(report.tokens),
        f"No sample of {path} is usable: all {len(report.overlong)} are longer than {seq_length} "
        "tokens; raise --seq-length.",
    )
