"""``mcore-qwen3vl data``: look at training data before training on it."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mcore_qwen3vl import console
from mcore_qwen3vl.cli import options, show
from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.config import DataConfig, MediaLimits
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.training.arguments import data_flags

DATA_SETS = (
    "JSONL, JSON or Parquet file, folder of WebDataset tars or Parquet shards, Hugging Face "
    "dataset on disk, mixture file or energon metadataset."
)

DataPath = Annotated[Path, options.data_set(DATA_SETS)]
HfModel = Annotated[
    Path, options.config("Checkpoint of either kind, or hub id, whose processor is used.")
]
SeqLength = Annotated[int, typer.Option(help="Longest sample, and length of a pack, in tokens.")]
Split = Annotated[str, typer.Option(help="Split to read, if the data set has several.")]
Preprocess = Annotated[
    str | None,
    typer.Option(metavar="MODULE:FUNCTION", help=f"{data_flags.PREPROCESS.capitalize()}."),
]

TrustData = Annotated[bool, typer.Option("--trust-data", help=options.help_of("trust_data"))]

app = typer.Typer(help="Look at training data.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Look at training data."""


@app.command("check")
@options.media_flags
def check(
    path: DataPath,
    hf_model: HfModel,
    seq_length: SeqLength = 8192,
    dp: Annotated[
        int,
        typer.Option(min=1, help="Show how evenly this many data-parallel ranks share the work."),
    ] = 1,
    global_batch_size: Annotated[
        int, typer.Option(min=1, help="Number of packs in a step, for --dp.")
    ] = 512,
    packing_buffer: Annotated[int, typer.Option(help=options.help_of("packing_buffer"))] = 128,
    split: Split = "train",
    decode: Annotated[bool, typer.Option(help="Decode every image and video.")] = True,
    limit: Annotated[int | None, typer.Option(help="Stop after this many samples.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write histograms to this PNG (extra: plots).")
    ] = None,
    preprocess: Preprocess = None,
    max_sample_seconds: Annotated[
        float, typer.Option(help=options.help_of("max_sample_seconds"))
    ] = DataConfig.max_sample_seconds,
    max_decoded_pixels: Annotated[
        int, typer.Option(help=options.help_of("max_decoded_pixels"))
    ] = DataConfig.max_decoded_pixels,
    trust_data: TrustData = False,
    distill_temperature: Annotated[
        float | None,
        typer.Option(
            help="Also check the teacher's scores beside the data, for train --loss distill with "
            "this --distill-temperature (1 by default)."
        ),
    ] = None,
    write_clean: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the usable records to this .jsonl file, in the folder of the data. The "
            "exit code is then 0, even if records were left out.",
        ),
    ] = None,
    json: options.Json = False,
    *,
    media: MediaLimits,
) -> None:
    """Read every sample as training would: formats, flaws, lengths, packing, balance of work."""
    console.quiet_libraries()
    from mcore_qwen3vl.converters.mcore.paths import config_folder
    from mcore_qwen3vl.data import load_processor
    from mcore_qwen3vl.data.check import check_data, clean_file, plot_report
    from mcore_qwen3vl.machine import require_extra

    if plot is not None:  # before the data is read
        require_extra("matplotlib", "--plot")
    if write_clean is not None and limit is not None:
        raise BadInput(
            "--write-clean with --limit would leave out all records after the limit: drop one."
        )
    config = DataConfig(
        seq_length,
        packing=True,
        packing_buffer=packing_buffer,
        max_sample_seconds=max_sample_seconds,
        max_decoded_pixels=max_decoded_pixels,
        trust_data=trust_data,
        teacher_temperature=distill_temperature,
        media=media,
    )
    folder = config_folder(hf_model)
    with nullcontext() if write_clean is None else clean_file(write_clean, path) as write:
        report = check_data(
            path,
            load_processor(folder),
            config,
            split=split,
            decode=decode,
            limit=limit,
            preprocess=preprocess,
            architecture=Architecture.from_hf(folder),
            ranks=dp,
            micro_batches=max(1, global_batch_size // dp),
            **({} if write is None else {"usable": write}),
        )
    if plot is not None:
        plot_report(report, plot)
    if json:
        found = {"samples": report.samples, "summary": report.totals(), **asdict(report)}
        console.emit_json(found)
    else:
        show.data_report(report)
        if plot is not None:
            console.say(f"  histograms in {plot}")
        if write_clean is not None and report.tokens:
            console.say(f"  {len(report.tokens):,} usable records in {write_clean}")
    options.require(
        not report.bad or write_clean is not None,
        f"{console.counted(len(report.bad), 'sample')} of {path} cannot be used.",
    )
    options.require(
        bool(report.tokens),
        f"No sample of {path} is usable: all {len(report.overlong)} are longer than {seq_length} "
        "tokens; raise --seq-length.",
    )


@app.command("show")
@options.media_flags
def show_sample(
    path: DataPath,
    number: Annotated[
        int, typer.Argument(min=1, help="Number of the record, from 1; in JSONL, of its line.")
    ],
    hf_model: HfModel,
    out: Annotated[Path, typer.Option(help="HTML page to write.")] = Path("sample.html"),
    seq_length: SeqLength = 8192,
    split: Split = "train",
    preprocess: Preprocess = None,
    trust_data: TrustData = False,
    json: options.Json = False,
    *,
    media: MediaLimits,
) -> None:
    """Write one sample as the model will see it: tokens, what is trained, images after resizing."""
    console.quiet_libraries()
    from mcore_qwen3vl.converters.mcore.paths import config_folder
    from mcore_qwen3vl.data import load_processor
    from mcore_qwen3vl.data.show import read_sample, write_page

    processor = load_processor(config_folder(hf_model))
    config = DataConfig(seq_length, trust_data=trust_data, media=media)
    seen = read_sample(path, number, processor, config, split=split, preprocess=preprocess)
    write_page(seen, out)
    kinds = Counter(one.kind for one in seen.media)
    counts = {"tokens": seen.tokens, "trained": seen.trained, "media": kinds}
    found = {"sample": seen.name, "format": seen.format, **counts, "out": out}
    shown = ", ".join(console.counted(kinds[kind], kind) for kind in sorted(kinds)) or "no images"
    said = (
        f"{seen.name}: {seen.format}, {console.counted(seen.tokens, 'token')}, {seen.trained:,} of "
        f"them trained, {shown}: {out}"
    )
    console.present(json, found, console.say, said)
