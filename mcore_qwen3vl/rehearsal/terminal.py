"""A rehearsal's results as tables on the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from textwrap import indent

from rich.table import Table

from mcore_qwen3vl import console
from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.rehearsal.command import Command
from mcore_qwen3vl.rehearsal.outcome import Rehearsal, RoleOutcome
from mcore_qwen3vl.rehearsal.search import NODE, Fit
from mcore_qwen3vl.runtime.gpus import GIB
from mcore_qwen3vl.training.memory import Memory

HOST_SYNCS_SHOWN = 8
TRAFFIC_SHOWN = 8


def gb(size: float) -> str:
    """Return bytes as text in GB, in the format of the docs and scripts."""
    return f"{size / 1e9:.1f}"


def _table(title: str, *columns: str) -> Table:
    """Print a title, which is not folded to the table's width, and return the table below it."""
    console.output.print(f"[bold]{title}[/]")
    return console.table("", *columns)


def heading(rehearsal: Rehearsal) -> str:
    """Return a line with the layout, the GPUs and their memory."""
    device = rehearsal.device
    return (
        f"{rehearsal.command.layout}, {rehearsal.command.gpus} x {device.gpu.name}: "
        f"{gb(device.memory_gib * GIB)} GB, of which {gb(device.allowance_gib * GIB)} GB are taken "
        f"for context and NCCL (assumed), so that {gb(device.usable)} GB are left. Measured on a "
        "simulated GPU:"
    )


def show(rehearsal: Rehearsal) -> None:
    """Print the results to standard output."""
    say = console.output.print
    say(heading(rehearsal))
    for note in rehearsal.notes:
        say(f"  {console.plain(note)}")
    _memory(rehearsal)
    _work(rehearsal)
    for outcome in rehearsal.outcomes:
        _host_syncs(outcome)
        _traffic(outcome)
    _pipeline(rehearsal)
    _step(rehearsal)
    for outcome in rehearsal.outcomes:
        _error(outcome)
        for fault, names in outcome.faults.items():
            said = console.plain(f"{outcome.role.name}, {fault}: {', '.join(names)}")
            say(f"[yellow]{said}[/]", soft_wrap=True)
    _remedies(rehearsal)
    style = "bold green" if rehearsal.fits else "bold red"
    say(f"[{style}]{console.plain(rehearsal.verdict)}[/]")


def show_fits(fits: Sequence[Fit], command: Command) -> None:
    """Print the rehearsed layouts."""
    table = _table(
        f"Layouts on {command.gpus} GPUs: GB of the fullest role, rehearsed; seconds of a step, "
        "modelled",
        *("layout", ">held", ">reserved", ">left", ">s a step", "", "append"),
    )
    mark = ", as given" if command.script is None else ", this script"
    for fit in fits:
        fullest = fit.rehearsal.fullest
        table.add_row(
            str(fit.candidate.command.layout) + mark * fit.candidate.is_requested,
            gb(fullest.peak),
            gb(fullest.reserved),
            _left(fullest, 1e9),
            "" if fit.seconds is None else f"{fit.seconds:.3g}",
            "[green]fits[/]" if fit.good else "[red]no[/]",
            console.plain(" ".join(fit.candidate.flags) if fit.good else fit.rehearsal.verdict),
        )
    console.output.print(table)
    if command.script is not None:
        each = NODE if command.gpus % NODE == 0 else command.gpus
        console.output.print(
            f"To start one: NODES={command.gpus // each} GPUS_PER_NODE={each} bash "
            f"{command.script}, your own flags, and those of its row.",
            soft_wrap=True,
            markup=False,
        )


def show_estimate(
    command: Command, a: Architecture, stages: Sequence[Memory], *, json: bool
) -> None:
    """Print the modelled memory of a rank of each pipeline stage."""
    layout, kind = command.layout, "modelled, not measured"
    layers = layout.layers_per_stage(a.num_hidden_layers)
    if json:
        listing = [
            {"layers": count, **asdict(stage), "total": stage.total}
            for count, stage in zip(layers, stages, strict=True)
        ]
        heads = {"kind": kind, "unit": "bytes", "layout": str(layout), "gpus": command.gpus}
        console.emit_json({**heads, "stages": listing})
        return
    parts = list(asdict(stages[0]))
    title = f"GB on one GPU of each pipeline stage, {kind}: {layout}, GPUs: {command.gpus}"
    table = _table(title, *(">stage", ">layers", *(f">{part}" for part in parts), ">total"))
    for number, (count, stage) in enumerate(zip(layers, stages, strict=True)):
        sizes = [*asdict(stage).values(), stage.total]
        table.add_row(str(number), str(count), *map(gb, sizes))
    console.output.print(table)
    console.output.print("Fragmentation, NCCL's buffers and the CUDA context come on top.")


def _memory(rehearsal: Rehearsal) -> None:
    """Print one column for each role, so that the holders of memory can be compared."""
    columns = [f">{outcome.role.name}" for outcome in rehearsal.outcomes]
    small = max(outcome.reserved for outcome in rehearsal.outcomes) < 1e9
    unit, scale = ("MB", 1e6) if small else ("GB", 1e9)
    table = _table(f"{unit} on one GPU at the moment of the peak, by holder", "", *columns)
    holders = {name: 0 for outcome in rehearsal.outcomes for name in outcome.by_holder}
    for outcome in rehearsal.outcomes:
        for name, size in outcome.by_holder.items():
            holders[name] = max(holders[name], size)
    for name in sorted(holders, key=lambda name: -holders[name]):
        if holders[name] >= 0.05 * scale:
            sizes = (o.by_holder.get(name, 0) / scale for o in rehearsal.outcomes)
            table.add_row(console.plain(name), *(f"{size:.1f}" if size else "" for size in sizes))
    table.add_section()
    table.add_row("peak of tensors", *(f"{o.peak / scale:.1f}" for o in rehearsal.outcomes))
    table.add_row("allocator's reserve", *(f"{o.reserved / scale:.1f}" for o in rehearsal.outcomes))
    table.add_row("left", *(_left(o, scale) for o in rehearsal.outcomes))
    console.output.print(table)


def _left(outcome: RoleOutcome, scale: float) -> str:
    if outcome.out_of_memory:
        return "[red]out of memory[/]"
    if outcome.error:
        return "[red]error[/]"
    text = f"{outcome.spare / scale:,.1f} ({outcome.spare / outcome.usable:.0%})"
    return f"[yellow]{text}[/]" if outcome.tight else text


def _work(rehearsal: Rehearsal) -> None:
    columns = ("rank", "parameters", "launches", "host syncs", "GEMM", "attention", "seconds")
    count = rehearsal.command.rehearsed_micro_batches
    table = _table(
        f"One iteration of {count} micro-batch{'es' * (count > 1)}; FLOPs in TFLOP, recomputed "
        "work included; seconds of the rehearsal",
        *("role", *(f">{name}" for name in columns)),
    )
    for outcome in rehearsal.outcomes:
        iteration = outcome.iteration
        numbers = ["", "", "", ""]
        if iteration is not None:
            flops = (iteration.flops.get(kind, 0) / 1e12 for kind in ("gemm", "attention"))
            counts = (iteration.counters["launches"], outcome.host_syncs)
            numbers = [*(f"{count:,}" for count in counts), *(f"{n:,.1f}" for n in flops)]
        parameters = f"{sum(outcome.measured['parameters'].values()) / 1e9:.2f} G"
        role, seconds = outcome.role, f"{outcome.seconds:.0f}"
        table.add_row(role.name, str(role.rank), parameters, *numbers, seconds)
    console.output.print(table)


def _host_syncs(outcome: RoleOutcome) -> None:
    iteration = outcome.iteration
    if iteration is None or not iteration.host_syncs:
        return
    title = f"Host syncs, {outcome.role.name}"
    table = _table(title, ">count", "while", "kind", "line")
    lines: Counter[tuple[str, str, str]] = Counter()
    for sync in iteration.host_syncs:
        lines[sync.phase, sync.kind, sync.place.split(" < ")[0]] += sync.count
    ordered = lines.most_common()
    for line, count in ordered[:HOST_SYNCS_SHOWN]:
        table.add_row(str(count), *map(console.plain, line))
    if rest := ordered[HOST_SYNCS_SHOWN:]:
        count = sum(count for _, count in rest)
        table.add_row(str(count), "", "", f"{len(rest)} more lines (--json has their callers)")
    console.output.print(table)


def _traffic(outcome: RoleOutcome) -> None:
    done = [] if outcome.iteration is None else outcome.iteration.traffic
    traffic = [t for t in done if not t.group.endswith("[1]")]
    if not traffic:
        return
    title = f"Handed to process groups, {outcome.role.name}"
    table = _table(title, ">GB", ">calls", "operation", "group[ranks]")
    for t in traffic[:TRAFFIC_SHOWN]:
        table.add_row(f"{t.size / 1e9:.3f}", str(t.calls), t.operation, console.plain(t.group))
    console.output.print(table)


def _pipeline(rehearsal: Rehearsal) -> None:
    pipeline = rehearsal.pipeline
    if pipeline is None:
        return
    each = ", ".join(f"{flops / 1e12:.1f}" for flops in pipeline.flops)
    console.output.print(
        f"Modelled from the FLOPs of the stages ({each} TFLOP a micro-batch): the busiest stage "
        f"has {pipeline.imbalance:.2f} times the mean, and a rank waits {pipeline.bubble:.1%} of "
        f"an iteration of {rehearsal.command.micro_batches} micro-batches for the others."
    )


def _step(rehearsal: Rehearsal) -> None:
    step = rehearsal.step
    if step is None:
        return
    unit, scale = step.unit
    table = _table(
        f"Modelled: {unit} of a step of {rehearsal.command.micro_batches} "
        f"micro-batch{'es' * (rehearsal.command.micro_batches > 1)}, by what they go to",
        "",
        *(f">{role.name}" for role in step.roles),
    )
    for name in dict.fromkeys(name for role in step.roles for name in role.seconds):
        spent = [role.seconds.get(name, 0.0) for role in step.roles]
        shown = (f"{s * scale:.2f} ({s / step.seconds:.0%})" if s else "" for s in spent)
        if max(spent) >= 0.001 * step.seconds:
            table.add_row(name, *shown)
    console.output.print(table)
    console.output.print(
        f"Modelled, with rates measured on one H100: {step.summary(rehearsal.command.gpus)}. "
        "--constants FILE replaces what is assumed.",
        soft_wrap=True,
    )


def _error(outcome: RoleOutcome) -> None:
    error = outcome.error
    if error is None:
        return
    console.output.print(
        f"[bold]{outcome.role.name}: {error['kind']}[/] at {console.plain(error['place'])}\n"
        + console.plain(indent(error["message"], "  "), lines=True),
        soft_wrap=True,
    )


def _remedies(rehearsal: Rehearsal) -> None:
    if not rehearsal.remedies:
        return
    table = _table("What would make it fit, rehearsed (all roles)", "with", ">GB", "", "add")
    for remedy in sorted(rehearsal.remedies, key=lambda r: not r.fits):
        verdict = "[green]fits[/]" if remedy.fits else "[red]no[/]"
        flags = " ".join(remedy.flags) or f"--gpus {remedy.gpus}"
        flags = console.plain(flags if remedy.fits else "")
        table.add_row(console.plain(remedy.change), gb(remedy.reserved), verdict, flags)
    console.output.print(table)
    if not any(remedy.fits for remedy in rehearsal.remedies):
        console.output.print("None of these fits: combine them, or use more or larger GPUs.")
