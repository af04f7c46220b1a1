"""``mcore-qwen3vl data``: look at training data before training on it."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict, fields
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mcore_qwen3vl import console
from mcore_qwen3vl.cli import options
from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.config import DataConfig
from mcore_qwen3vl.data.records.reading import Reading
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.unused.fields import as_json

if TYPE_CHECKING:
    from mcore_qwen3vl.data.inspection import DataReport
    from mcore_qwen3vl.data.measuring import Measured
    from mcore_qwen3vl.data.showing import Seen
    from mcore_qwen3vl.part import Part

PROBLEMS_SHOWN = 20
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
    typer.Option(metavar="MODULE:FUNCTION", help=options.help_of("preprocess")),
]
TrainOn = Annotated[str | None, typer.Option(metavar="TURNS", help=options.help_of("train_on"))]
ChatTemplateKwargs = Annotated[
    str | None,
    typer.Option(metavar="JSON", help=options.help_of("chat_template_kwargs")),
]

Workers = Annotated[
    int | None, typer.Option(min=1, help="Processes that read; default: one for each core.")
]
_PARTS = "Parts, on any number of machines"
WhichPart = Annotated[
    str | None,
    typer.Option(
        metavar="I/N",
        help="Do only part I of N, from 0 to N - 1, as Slurm's --array=0-15 and Kubernetes' "
        "indexed jobs count: $SLURM_ARRAY_TASK_ID/16, $JOB_COMPLETION_INDEX/16. A part that is "
        "done already stays.",
        rich_help_panel=_PARTS,
    ),
]
PartsFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Folder for the results of the parts, which all of them see; needed by --part and "
        "--merge.",
        rich_help_panel=_PARTS,
    ),
]
Merge = Annotated[
    bool,
    typer.Option(
        "--merge",
        help="Make the result of the whole from all parts in --parts; the other flags are those "
        "of the parts.",
        rich_help_panel=_PARTS,
    ),
]

app = typer.Typer(help="Look at training data.", no_args_is_help=True)


@app.command("check")
@options.data_flags(
    *("packing_buffer", "max_sample_seconds", "max_decoded_pixels"),
    *("allow_dropped", "trust_data", "overlong"),
)
def check(
    path: DataPath,
    hf_model: HfModel,
    reading: dict[str, Any],
    *,
    seq_length: SeqLength = 8192,
    dp: Annotated[
        int,
        typer.Option(min=1, help="Show how evenly this many data-parallel ranks share the work."),
    ] = 1,
    global_batch_size: Annotated[
        int, typer.Option(min=1, help="Number of packs in a step, for --dp.")
    ] = 512,
    split: Split = "train",
    decode: Annotated[bool, typer.Option(help="Decode every image and video.")] = True,
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after this many samples.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write histograms to this PNG (extra: plots).")
    ] = None,
    preprocess: Preprocess = None,
    train_on: TrainOn = None,
    chat_template_kwargs: ChatTemplateKwargs = None,
    loss: Annotated[
        str | None,
        typer.Option(
            metavar="'NAME FLAGS'",
            help="Check for training with this --loss or --task: records of another form are bad, "
            "and so are those for which the file that it reads beside the data has nothing. Its "
            "own flags, and those of LoRA, follow the name.",
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
    workers: Workers = None,
    part: WhichPart = None,
    parts: PartsFolder = None,
    merge: Merge = False,
    json: options.Json = False,
) -> None:
    """Read every sample as training would: formats, flaws, lengths, packing, balance of work."""
    console.quiet_libraries()
    from mcore_qwen3vl.converters.identify import identify
    from mcore_qwen3vl.data import load_processor
    from mcore_qwen3vl.data.inspection import Check, check_data, check_part, plot_report
    from mcore_qwen3vl.data.rewriting import clean_writer
    from mcore_qwen3vl.losses.registry import detected_form
    from mcore_qwen3vl.machine import require_extra, usable_cores
    from mcore_qwen3vl.training.arguments.loss_reads import reads_of_loss
    from mcore_qwen3vl.unused.folder import unused_of

    which, folder_of_parts = _parts_of(part, parts, merge)
    if which is not None and (plot or write_clean):
        flag = "--plot" if plot else "--write-clean"
        raise BadInput(f"{flag} with --part: a part reports nothing; give it to --merge.")
    if plot is not None:  # before the data is read
        require_extra("matplotlib", "--plot")
    if write_clean is not None and limit is not None:
        raise BadInput(
            "--write-clean with --limit would leave out all records after the limit: drop one."
        )
    folder = identify(hf_model).config()
    read: dict[str, Any] = {"records": detected_form()}
    if loss is not None:
        of_run = ["--hf-model", str(folder), "--data-path", str(path)]
        of_run += ["--preprocess", preprocess] if preprocess else []
        of_run += ["--trust-data"] if reading["trust_data"] else []
        read = reads_of_loss(loss, of_run)
    config = DataConfig(seq_length, packing=True, **read, **reading)
    reads: dict[str, Any] = {
        "split": split,
        "decode": decode,
        "limit": limit,
        "defaults": Reading(
            preprocess=preprocess, train_on=train_on, chat_template_kwargs=chat_template_kwargs
        ),
        "architecture": Architecture.from_hf(folder),
    }
    processor, processes = load_processor(folder), workers or usable_cores()
    if which is not None and folder_of_parts is not None:
        one = Check(path, processor, config, **reads)
        _present_part(json, which, *check_part(one, which, folder_of_parts, processes))
        return
    with nullcontext() if write_clean is None else clean_writer(write_clean, path) as write:
        report = check_data(
            path,
            processor,
            config,
            **reads,
            processes=processes,
            unused=unused_of(folder),
            ranks=dp,
            micro_batches=max(1, global_batch_size // dp),
            usable=write,
            merge=folder_of_parts,
        )
    if plot is not None:
        plot_report(report, plot)
    if json:
        whole = {field.name: getattr(report, field.name) for field in fields(report)}
        facts = {"samples": report.samples, "summary": report.totals(), **whole}
        console.emit_json(facts)
    else:
        show_report(report)
        if plot is not None:
            console.say(f"  histograms in {plot}")
        if write_clean is not None and report.tokens:
            written = console.counted(len(report.tokens), "usable record")
            console.say(f"  {written} in {write_clean}")
    options.require(
        not report.bad or write_clean is not None,
        f"{console.counted(len(report.bad), 'sample')} of {path} cannot be used.",
    )
    long = f"{len(report.overlong)} are longer than {seq_length} tokens; raise --seq-length."
    reason = f"{len(report.bad)} are bad, and {long}" if report.bad else f"all {long}"
    if not report.overlong:
        reason = "all are bad."
    options.require(bool(report.tokens), f"No sample of {path} is usable: {reason}")


def _parts_of(
    part: str | None, parts: Path | None, merge: bool
) -> tuple["Part | None", Path | None]:
    """Return which part to do, if one, and the folder of parts; BadInput if flags do not fit."""
    from mcore_qwen3vl.part import Part

    if part is not None and merge:
        raise BadInput("--part does a part and --merge joins all of them: give one of the two.")
    flag = "--merge" if merge else "--part"
    if parts is None and (part is not None or merge):
        raise BadInput(f"{flag} needs --parts DIR, the folder of the parts' results.")
    if parts is not None and part is None and not merge:
        raise BadInput(f"--parts {parts} does nothing alone: give --part I/N, or --merge.")
    return Part.parse(part) if part is not None else None, parts


def _present_part(json: bool, part: "Part", file: Path, samples: int) -> None:
    """Say that a part is done. Its exit code is 0: whether samples are bad, the merge says."""
    facts = {"part": part.index, "of": part.count, "samples": samples, "out": file}
    said = f"part {part}: {console.counted(samples, 'sample')} in {file}"
    console.present(json, facts, console.say, said)


@app.command("measure")
@options.data_flags(
    *("max_sample_seconds", "max_decoded_pixels", "document_end"),
    *("allow_dropped", "trust_data", "overlong"),
)
def measure(
    path: DataPath,
    hf_model: HfModel,
    reading: dict[str, Any],
    *,
    seq_length: SeqLength = 8192,
    preprocess: Preprocess = None,
    train_on: TrainOn = None,
    chat_template_kwargs: ChatTemplateKwargs = None,
    workers: Workers = None,
    part: WhichPart = None,
    parts: PartsFolder = None,
    merge: Merge = False,
    json: options.Json = False,
) -> None:
    """Measure every sample for balanced work, into the cache, so that training starts at once.

    Training finds the sizes if its flags for the data are the same, and its cache.
    """
    console.quiet_libraries()
    from mcore_qwen3vl.converters.identify import identify
    from mcore_qwen3vl.data import load_processor
    from mcore_qwen3vl.data.measuring import Measuring
    from mcore_qwen3vl.machine import usable_cores

    which, folder_of_parts = _parts_of(part, parts, merge)
    folder = identify(hf_model).config()
    measuring = Measuring(
        path,
        load_processor(folder),
        DataConfig(seq_length, packing=True, balance=True, **reading),
        Architecture.from_hf(folder),
        Reading(
            preprocess=preprocess, train_on=train_on, chat_template_kwargs=chat_template_kwargs
        ),
    )
    if which is not None and folder_of_parts is not None:
        done = measuring.measure_part(which, folder_of_parts, workers or usable_cores())
        _present_part(json, which, *done)
        return
    if folder_of_parts is not None:
        measured = measuring.merge(folder_of_parts)
    else:
        measured = measuring.measure(workers or usable_cores())
    console.present(json, {"data_sets": list(map(asdict, measured))}, _show_measured, measured)


def _show_measured(measured: "list[Measured]") -> None:
    for one in measured:
        flaws = {"bad": one.bad, "over-long": one.overlong}
        said = "".join(f", {count:,} of them {what}" for what, count in flaws.items() if count)
        console.say(f"{one.path}: {console.counted(one.samples, 'sample')}{said}: {one.out}")


_MUCH = 10
"""How many times as large as its source a file of turns is when its size is said."""


@app.command("turns")
def turns(
    path: Annotated[Path, options.data_set("JSONL or JSON file of conversations.")],
    out: Annotated[Path, typer.Option(help="JSONL file to write, in the folder of the data.")],
    json: options.Json = False,
) -> None:
    """Write one record for each trained turn, of the turns up to it, as Thinking models need.

    Their template leaves the reasoning of earlier turns out, so each turn has a prompt of its own.
    """
    console.quiet_libraries()
    from mcore_qwen3vl.data.rewriting import write_turns

    read, written = write_turns(path, out)
    sizes = {"bytes_read": path.stat().st_size, "bytes_written": out.stat().st_size}
    said = f"{console.counted(written, 'record')} of {console.counted(read, 'record')} in {out}"
    if sizes["bytes_written"] > _MUCH * sizes["bytes_read"]:
        before, after = (size / 1e6 for size in sizes.values())
        said += f"; {after:,.1f} MB of {before:,.1f} MB, since each has all turns before it"
    facts = {"out": out, "read": read, "written": written, **sizes}
    console.present(json, facts, console.say, said)


@app.command("show")
@options.data_flags("allow_dropped", "trust_data")
def show_sample(
    path: DataPath,
    number: Annotated[
        int, typer.Argument(min=1, help="Number of the record, from 1; in JSONL, of its line.")
    ],
    hf_model: HfModel,
    reading: dict[str, Any],
    *,
    out: Annotated[Path, typer.Option(help="HTML page to write.")] = Path("sample.html"),
    tokens: Annotated[
        bool,
        typer.Option(
            "--tokens",
            help="Also print every token: place, id, text, and the weight it is trained with; with "
            "--json as runs of tokens between two boundaries.",
        ),
    ] = False,
    seq_length: SeqLength = 8192,
    split: Split = "train",
    preprocess: Preprocess = None,
    train_on: TrainOn = None,
    chat_template_kwargs: ChatTemplateKwargs = None,
    json: options.Json = False,
) -> None:
    """Write one sample as the model will see it: tokens, what is trained, images after resizing."""
    console.quiet_libraries()
    from mcore_qwen3vl.converters.identify import identify
    from mcore_qwen3vl.data import load_processor
    from mcore_qwen3vl.data.showing import read_sample, write_page

    processor = load_processor(identify(hf_model).config())
    config = DataConfig(seq_length, **reading)
    defaults = Reading(
        preprocess=preprocess, train_on=train_on, chat_template_kwargs=chat_template_kwargs
    )
    seen = read_sample(path, number, processor, config, split=split, defaults=defaults)
    write_page(seen, out)
    kinds = Counter(item.kind for item in seen.media)
    counts = {"tokens": seen.tokens, "trained": seen.trained, "media": kinds}
    facts = {"sample": seen.name, "format": seen.format, **counts, "out": out}
    facts["unused"] = as_json(seen.unused)
    if tokens:
        facts["runs"] = [asdict(run) for run in seen.runs]
    shown = ", ".join(console.counted(kinds[kind], kind) for kind in sorted(kinds)) or "no images"
    said = (
        f"{seen.name}: {seen.format}, {console.counted(seen.tokens, 'token')}, {seen.trained:,} of "
        f"them trained, {shown}: {out}"
    )
    if tokens and not json:
        print_tokens(seen)
    console.present(json, facts, console.say, said)
    if not json:
        console.print_unused(seen.unused)


def print_tokens(seen: "Seen") -> None:
    """Print a line for each token, and one for the placeholders of a run, with lines between runs.

    A line between two runs is where training begins or ends, or placeholders do.
    """
    for run in seen.runs:
        weight = f"{run.weight:g}" if run.weight else "-"
        console.output.print(f"  -- {console.plain(run.kind)}, weight {weight}", style="dim")
        if run.kind == "text":
            lines = enumerate(zip(run.token_ids, run.texts, strict=True), run.start)
        else:
            text = f"{run.texts[0]} x {run.count:,}"
            lines = enumerate([(run.token_ids[0], text)], run.start)
        for place, (token, text) in lines:
            quoted = console.plain(dumps(text, ensure_ascii=False))
            console.output.print(f"{place:>8,} {token:>8} {weight:>6}  {quoted}", soft_wrap=True)


def show_report(report: "DataReport") -> None:
    """Print what a data set holds, and the first of its flaws."""
    rows = [(console.plain(name), console.plain(amount)) for name, amount in report.summary()]
    console.output.print(console.table(str(report.path), "what", ">how much", rows=rows))
    if any(left.samples for left in report.unused):  # what samples hold, and not files beside them
        console.say("  --preprocess MODULE:FUNCTION can use what is not used, or take it out.")
    for flaws in (report.bad, report.overlong):
        for flaw in flaws[:PROBLEMS_SHOWN]:
            console.say(f"  {flaw.sample}: {flaw.reason}")
        if len(flaws) > PROBLEMS_SHOWN:
            console.say(f"  and {len(flaws) - PROBLEMS_SHOWN} more; --json lists them all")
