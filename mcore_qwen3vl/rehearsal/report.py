"""A rehearsal's results: tables on the terminal, and one HTML page with memory over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

from mcore_qwen3vl import console
from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.files import atomic_write
from mcore_qwen3vl.html_pages import templates
from mcore_qwen3vl.rehearsal.command import Command
from mcore_qwen3vl.rehearsal.rehearse import Rehearsal, RoleOutcome
from mcore_qwen3vl.rehearsal.search import NODE, Fit
from mcore_qwen3vl.runtime.gpus import GIB
from mcore_qwen3vl.training.memory import GB, CheckpointSize, Memory

HOST_SYNCS_SHOWN = 8
TRAFFIC_SHOWN = 8


def in_gb(size: float) -> str:
    """Return bytes as text in GB, in the format of the docs and scripts."""
    return f"{size / 1e9:.1f}"


def _print_table(title: str, *columns: str, rows: Iterable[Sequence[str]]) -> None:
    """Print a title, which is not folded to the table's width, and the table below it."""
    table = console.table("", *columns, rows=rows)
    console.output.print(f"[bold]{console.plain(title)}[/]", table, sep="\n")


def heading(rehearsal: Rehearsal) -> str:
    """Return a line with the layout, the GPUs and their memory."""
    device = rehearsal.device
    return (
        f"{rehearsal.command.layout}, {rehearsal.command.gpus} x {device.gpu.name}: "
        f"{in_gb(device.memory_gib * GIB)} GB, of which {in_gb(device.allowance_gib * GIB)} GB are "
        f"taken for context and NCCL (assumed), so that {in_gb(device.usable)} GB are left. "
        "Measured on a simulated GPU:"
    )


def print_rehearsal(rehearsal: Rehearsal) -> None:
    """Print the results to standard output."""
    say = console.output.print
    say(console.plain(heading(rehearsal)))
    for note in rehearsal.notes:
        say(f"  {console.plain(note)}")
    _print_memory(rehearsal)
    _print_work(rehearsal)
    for outcome in rehearsal.outcomes:
        _print_host_syncs(outcome)
        _print_traffic(outcome)
    _print_pipeline(rehearsal)
    _print_step(rehearsal)
    for outcome in rehearsal.outcomes:
        _print_error(outcome)
        for fault, names in outcome.faults.items():
            said = console.plain(f"{outcome.role.name}, {fault}: {', '.join(names)}")
            say(f"[yellow]{said}[/]", soft_wrap=True)
    _print_remedies(rehearsal)
    style = "bold green" if rehearsal.fits else "bold red"
    say(f"[{style}]{console.plain(rehearsal.verdict)}[/]")


def print_fits(fits: Sequence[Fit], command: Command) -> None:
    """Print the rehearsed layouts."""
    mark = ", as given" if command.script is None else ", this script"
    planned = any(fit.rehearsal.tokens is not None for fit in fits)
    skewed = any(fit.skewed is not None for fit in fits)
    rows = [
        (
            console.plain(str(fit.candidate.command.layout)) + mark * fit.candidate.is_requested,
            in_gb(fit.rehearsal.fullest.peak),
            in_gb(fit.rehearsal.fullest.reserved),
            _spare_text(fit.rehearsal.fullest, 1e9),
            *(["" if fit.skewed is None else in_gb(fit.skewed.fullest.reserved)] if skewed else []),
            "" if fit.seconds is None else f"{fit.seconds:.3g}",
            *([_days(fit)] if planned else []),
            "[green]fits[/]" if fit.good else "[red]no[/]",
            console.plain(" ".join(fit.candidate.flags) if fit.good else fit.verdict),
        )
        for fit in fits
    ]
    _print_table(
        f"Layouts on {command.gpus} GPUs: GB of the fullest role, rehearsed; seconds of a step, "
        "modelled",
        *("layout", ">held", ">reserved", ">left"),
        *([">skewed"] if skewed else []),
        ">s a step",
        *([">days"] if planned else []),
        *("", "append"),
        rows=rows,
    )
    if command.script is not None:
        each = NODE if command.gpus % NODE == 0 else command.gpus
        console.say(
            f"To start one: NODES={command.gpus // each} GPUS_PER_NODE={each} bash "
            f"{command.script}, your own flags, and those of its row."
        )


def _days(fit: Fit) -> str:
    training = fit.rehearsal.training
    return "" if training is None else f"{training.days:,.2f}"


def print_estimate(
    command: Command,
    architecture: Architecture,
    stages: Sequence[Memory],
    checkpoint: CheckpointSize,
    *,
    disk_gb_per_s: float | None,
    json: bool,
) -> None:
    """Print the modelled memory of a rank of each pipeline stage, and the size of checkpoints.

    With the speed of the file system, for all ranks together, it says the time they take.
    """
    layout, kind = command.layout, "modelled, not measured"
    layers = layout.layers_per_stage(architecture.num_hidden_layers)
    if json:
        listing = [
            {"layers": count, **asdict(stage), "total": stage.total}
            for count, stage in zip(layers, stages, strict=True)
        ]
        heads = {"kind": kind, "unit": "bytes", "layout": str(layout), "gpus": command.gpus}
        sizes: dict[str, Any] = asdict(checkpoint)
        if disk_gb_per_s is not None:
            sizes |= {f"{name}_seconds": _seconds(x, disk_gb_per_s) for name, x in sizes.items()}
        console.emit_json({**heads, "stages": listing, "checkpoint": sizes})
        return
    _print_table(
        f"GB on one GPU of each pipeline stage, {kind}: {layout}, GPUs: {command.gpus}",
        *(">stage", ">layers", *(f">{part}" for part in asdict(stages[0])), ">total"),
        rows=[
            (str(number), str(count), *map(in_gb, [*asdict(stage).values(), stage.total]))
            for number, (count, stage) in enumerate(zip(layers, stages, strict=True))
        ],
    )
    console.output.print("Fragmentation, NCCL's buffers and the CUDA context come on top.")
    saved, loaded = (
        f"{in_gb(size)} GB"
        + ("" if disk_gb_per_s is None else f" ({_seconds(size, disk_gb_per_s):,.0f} s)")
        for size in (checkpoint.saved, checkpoint.loaded)
    )
    console.output.print(
        f"All ranks together write {saved} for a checkpoint, and read {loaded} at a start."
    )


def _seconds(size: float, gb_per_s: float) -> float:
    return size / GB / gb_per_s


def _print_memory(rehearsal: Rehearsal) -> None:
    """Print one column for each role, so that the holders of memory can be compared."""
    outcomes = rehearsal.outcomes
    small = max(outcome.reserved for outcome in outcomes) < 1e9
    unit, scale = ("MB", 1e6) if small else ("GB", 1e9)
    columns = [f">{outcome.role.name}" for outcome in outcomes]
    console.output.print(f"[bold]{unit} on one GPU at the moment of the peak, by holder[/]")
    table = console.table("", "", *columns)
    names = dict.fromkeys(name for outcome in outcomes for name in outcome.by_holder)
    largest = {name: max(o.by_holder.get(name, 0) for o in outcomes) for name in names}
    for name, size in sorted(largest.items(), key=lambda item: -item[1]):
        if size >= 0.05 * scale:
            sizes = (o.by_holder.get(name, 0) / scale for o in outcomes)
            table.add_row(console.plain(name), *(f"{size:.1f}" if size else "" for size in sizes))
    table.add_section()
    table.add_row("peak of tensors", *(f"{o.peak / scale:.1f}" for o in outcomes))
    table.add_row("allocator's reserve", *(f"{o.reserved / scale:.1f}" for o in outcomes))
    table.add_row("left", *(_spare_text(o, scale) for o in outcomes))
    console.output.print(table)


def _spare_text(outcome: RoleOutcome, scale: float) -> str:
    """Return the spare bytes in units of `scale`, or why there is no such number, as markup."""
    if outcome.out_of_memory:
        return "[red]out of memory[/]"
    if outcome.error:
        return "[red]error[/]"
    text = f"{outcome.spare / scale:,.1f} ({outcome.spare / outcome.usable:.0%})"
    return f"[yellow]{text}[/]" if outcome.tight else text


def _print_work(rehearsal: Rehearsal) -> None:
    rows = []
    for outcome in rehearsal.outcomes:
        iteration = outcome.iteration
        numbers = ["", "", "", ""]
        if iteration is not None:
            flops = (iteration.flops.get(kind, 0) / 1e12 for kind in ("gemm", "attention"))
            counts = (iteration.counters["launches"], outcome.host_sync_count)
            numbers = [*(f"{count:,}" for count in counts), *(f"{n:,.1f}" for n in flops)]
        parameters = f"{sum(outcome.measured['parameters'].values()) / 1e9:.2f} G"
        role, seconds = outcome.role, f"{outcome.seconds:.0f}"
        rows.append((role.name, str(role.rank), parameters, *numbers, seconds))
    count = rehearsal.command.rehearsed_micro_batches
    _print_table(
        f"One iteration of {count} micro-batch{'es' * (count > 1)}; FLOPs in TFLOP, recomputed "
        "work included; seconds of the rehearsal",
        *("role", ">rank", ">parameters", ">launches", ">host syncs", ">GEMM", ">attention"),
        ">seconds",
        rows=rows,
    )


def _print_host_syncs(outcome: RoleOutcome) -> None:
    lines: Counter[tuple[str, str, str]] = Counter()
    for sync in outcome.iteration.host_syncs if outcome.iteration else ():
        lines[sync.phase, sync.kind, sync.place.split(" < ")[0]] += sync.count
    ordered = lines.most_common()
    rows = [(str(count), *map(console.plain, line)) for line, count in ordered[:HOST_SYNCS_SHOWN]]
    if rest := ordered[HOST_SYNCS_SHOWN:]:
        count = sum(count for _, count in rest)
        rows.append((str(count), "", "", f"{len(rest)} more lines (--json has their callers)"))
    if rows:
        title = f"Host syncs, {outcome.role.name}"
        _print_table(title, ">count", "while", "kind", "line", rows=rows)


def _print_traffic(outcome: RoleOutcome) -> None:
    """Print the `TRAFFIC_SHOWN` largest exchanges; the traffic is sorted by size."""
    done = [] if outcome.iteration is None else outcome.iteration.traffic
    rows = [
        (f"{t.size / 1e9:.3f}", str(t.calls), t.operation, console.plain(t.group))
        for t in done
        if not t.group.endswith("[1]")  # a group of one rank exchanges nothing
    ][:TRAFFIC_SHOWN]
    if rows:
        title = f"Handed to process groups, {outcome.role.name}"
        _print_table(title, ">GB", ">calls", "operation", "group[ranks]", rows=rows)


def _print_pipeline(rehearsal: Rehearsal) -> None:
    pipeline = rehearsal.pipeline
    if pipeline is None:
        return
    each = ", ".join(f"{flops / 1e12:.1f}" for flops in pipeline.flops)
    console.output.print(
        f"Modelled from the FLOPs of the stages ({each} TFLOP a micro-batch): the busiest stage "
        f"has {pipeline.imbalance:.2f} times the mean, and a rank waits {pipeline.bubble:.1%} of "
        f"an iteration of {rehearsal.command.micro_batches} micro-batches for the others."
    )


def _print_step(rehearsal: Rehearsal) -> None:
    step = rehearsal.step
    if step is None:
        return
    unit, scale = step.unit
    rows = []
    for name in dict.fromkeys(name for role in step.roles for name in role.seconds):
        spent = [role.seconds.get(name, 0.0) for role in step.roles]
        shown = (f"{s * scale:.2f} ({s / step.seconds:.0%})" if s else "" for s in spent)
        if max(spent) >= 0.001 * step.seconds:
            rows.append((name, *shown))
    count = rehearsal.command.micro_batches
    _print_table(
        f"Modelled: {unit} of a step of {count} micro-batch{'es' * (count > 1)}, by what they go "
        "to",
        *("", *(f">{role.name}" for role in step.roles)),
        rows=rows,
    )
    console.output.print(
        f"Modelled, with rates measured on one H100: {step.summary(rehearsal.command.gpus)}. "
        "--constants FILE replaces what is assumed.",
        soft_wrap=True,
    )
    if rehearsal.training is not None:
        console.output.print(f"Modelled: {rehearsal.training}.", soft_wrap=True)


def _print_error(outcome: RoleOutcome) -> None:
    error = outcome.error
    if error is None:
        return
    console.output.print(
        f"[bold]{outcome.role.name}: {error['kind']}[/] at {console.plain(error['place'])}\n"
        + console.plain(indent(error["message"], "  "), lines=True),
        soft_wrap=True,
    )


def _print_remedies(rehearsal: Rehearsal) -> None:
    if not rehearsal.remedies:
        return
    rows = [
        (
            console.plain(remedy.change),
            in_gb(remedy.reserved),
            "[green]fits[/]" if remedy.fits else "[red]no[/]",
            console.plain(" ".join(remedy.flags) or f"--gpus {remedy.gpus}") * remedy.fits,
        )
        for remedy in sorted(rehearsal.remedies, key=lambda remedy: not remedy.fits)
    ]
    title = "What would make it fit, rehearsed (all roles)"
    _print_table(title, "with", ">GB", "", "add", rows=rows)
    if not any(remedy.fits for remedy in rehearsal.remedies):
        console.output.print("None of these fits: combine them, or use more or larger GPUs.")


WIDTH, HEIGHT = 1040, 280
LEFT, TOP, BOTTOM = 52, 22, 28
LINE = 15
"""Pixels from one line of labels to the next."""
LETTER = 6.5
"""Approximate width of a letter of a label, in pixels."""
FAR = 10
"""The GPU's memory is in the picture if it is less than this many times the peak."""
SERIES = 9
"""Number of holders with a colour of their own; the smaller ones are drawn together."""
COLOURS = (
    *("#3b6fd4", "#c4320a", "#12805c", "#b54fb0", "#c08a00", "#1796a8", "#7a5af8", "#8a6d3b"),
    *("#5c8a2f", "#98a2b3"),
)


class Area(NamedTuple):
    """One holder's share of the plot, an SVG polygon."""

    name: str
    colour: str
    points: str


class Mark(NamedTuple):
    """The beginning of an interval; `y` is the line of its label."""

    x: float
    y: float
    name: str


class Plot(NamedTuple):
    """Memory of one role over its allocations, stacked by holder."""

    areas: list[Area]
    limit: float | None  # y of the memory usable for tensors; None: far above the picture
    ticks: list[tuple[float, str]]
    marks: list[Mark]
    floor: float  # y of zero memory
    height: float


def write_page(rehearsal: Rehearsal, file: Path) -> None:
    """Write the page.

    Raises:
        BadInput: `file` cannot be written.
    """
    environment = templates("mcore_qwen3vl.rehearsal")
    environment.filters["gb"] = lambda size: f"{size / 1e9:.2f}"
    page = environment.get_template("page.html.jinja").render(
        rehearsal=rehearsal,
        command=console.command_line(),
        gib=GIB,
        plots=[make_plot(outcome) for outcome in rehearsal.outcomes],
        width=WIDTH,
        left=LEFT,
        top=TOP,
    )
    with atomic_write(file, "Choose another --report.") as partial:
        partial.write_text(page, "utf-8", "backslashreplace")


def make_plot(outcome: RoleOutcome) -> Plot:
    """Return stacked areas, the largest holder at the bottom; x is the order of allocations."""
    moments: list[dict[str, Any]] = outcome.measured["over time"]
    maxima: dict[str, int] = {}
    for moment in moments:
        for name, size in moment["sizes"].items():
            maxima[name] = max(maxima.get(name, 0), size)
    names = sorted(maxima, key=lambda name: -maxima[name])
    largest, rest = names[:SERIES], names[SERIES:]
    peak = max([m["allocated"] for m in moments] + [1])
    in_sight = outcome.usable < FAR * peak
    top = (max(peak, outcome.usable) if in_sight else peak) * 1.05
    step = (WIDTH - LEFT) / max(len(moments) - 1, 1)

    def y_of(size: float) -> float:
        return HEIGHT - BOTTOM - size / top * (HEIGHT - BOTTOM - TOP)

    areas, below = [], [0.0] * len(moments)
    # There may be fewer holders than colours.
    for name, colour in zip([*largest, "smaller ones"] if rest else largest, COLOURS, strict=False):
        members = rest if name == "smaller ones" else [name]
        above = [
            b + sum(m["sizes"].get(member, 0) for member in members)
            for b, m in zip(below, moments, strict=True)
        ]
        edge = [(LEFT + i * step, y_of(size)) for i, size in enumerate(above)]
        edge += [(LEFT + i * step, y_of(size)) for i, size in reversed(list(enumerate(below)))]
        areas.append(Area(name, colour, " ".join(f"{x:.0f},{h:.1f}" for x, h in edge)))
        below = above
    limit = y_of(outcome.usable) if in_sight else None
    marks = _marks(outcome, moments, step)
    height = max([HEIGHT, *(mark.y + 6 for mark in marks)])
    return Plot(areas, limit, _ticks(top, y_of), marks, y_of(0), height)


def _ticks(top: float, y_of: Any) -> list[tuple[float, str]]:
    """Return the places and labels of up to seven round sizes, from zero to at most `top`."""
    steps = (s * 10**e for e in range(6, 13) for s in (1, 2, 5))
    every = next(s for s in steps if top / s <= 6)
    return [(y_of(n * every), f"{n * every / 1e9:g} GB") for n in range(int(top / every) + 1)]


def _marks(outcome: RoleOutcome, moments: list[dict[str, Any]], step: float) -> list[Mark]:
    """Return where each interval begins; labels that would overlap get other lines."""
    marks: list[Mark] = []
    ends: list[float] = []  # x at which the last label of each line ends
    ended = 0.0
    for interval in outcome.report.intervals[:-1]:  # the last is what follows the run
        start = next((i for i, m in enumerate(moments) if m["seconds"] >= ended), 0)
        x = LEFT + start * step
        line = next((i for i, end in enumerate(ends) if end < x), len(ends))
        # This replaces the end of that line, or appends that of a new one.
        ends[line : line + 1] = [x + LETTER * (len(interval.name) + 2)]
        marks.append(Mark(x, HEIGHT - BOTTOM + LINE * (line + 1), interval.name))
        ended += interval.seconds
    return marks
