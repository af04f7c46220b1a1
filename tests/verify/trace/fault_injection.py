"""Fault injection: checkpoints are converted with a fault, and the trace must name it.

``python -m tests.verify.trace.fault_injection`` prints the table. It needs no GPU and downloads
nothing.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_qwen3vl.converters.convert import hf_to_mcore
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime import cpu
from mcore_qwen3vl.runtime.lifetime import scratch_folder
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from tests.verify.trace.faults import FAULTS, Fault

if TYPE_CHECKING:  # it imports transformers, which is slow
    from mcore_qwen3vl.verify.trace.recording import TraceReference


@dataclass(frozen=True)
class Outcome:
    """The point and the cause that the trace named for a fault."""

    fault: Fault
    point: str
    kind: str
    explanation: str
    confirmed: bool

    @property
    def right(self) -> bool:
        return (self.point, self.kind) == (self.fault.point, self.fault.kind)


class FaultInjector:
    """A maker of correct checkpoints, and of converted ones with a fault, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._references: dict[bool, TraceReference] = {}

    def reference(self, *, moe: bool) -> TraceReference:
        """Return the correct checkpoint in the form that the trace takes."""
        from mcore_qwen3vl.verify.trace.recording import TraceReference

        if moe not in self._references:
            self._references[moe] = TraceReference(self.correct(moe=moe))
        return self._references[moe]

    def correct(self, *, moe: bool) -> Path:
        path = self.folder / ("moe" if moe else "dense")
        if not path.exists():
            write_tiny_checkpoint(path, moe=moe, seed=5)
        return path

    def with_fault(self, fault: Fault) -> Path:
        """Convert the correct checkpoint to Megatron-Core's format with the fault in it."""
        from safetensors.torch import load_file, save_file

        target = self.folder / f"mcore-{FAULTS.index(fault)}"
        if target.exists():
            return target
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            source = Path(shutil.copytree(self.correct(moe=fault.moe), Path(scratch) / "hf"))
            if fault.inject is not None:
                file = source / "model.safetensors"
                tensors = load_file(file)
                fault.inject(tensors)
                save_file(tensors, file, metadata={"format": "pt"})
            hf_to_mcore(source, target)
        if fault.config is not None:
            config = target / "hf" / "config.json"
            content = json.loads(config.read_text("utf-8"))
            fault.config(content)
            config.write_text(json.dumps(content), "utf-8")
        return target

    def trace(self, fault: Fault, layout: Layout | None = None) -> Outcome:
        """Inject the fault and trace it."""
        from mcore_qwen3vl.verify.trace.tracing import trace

        found = trace(self.reference(moe=fault.moe), self.with_fault(fault), layout=layout)
        first, cause = found.first, found.cause
        return Outcome(
            fault,
            first.name if first else "nowhere",
            cause.kind if cause else "none",
            cause.explanation if cause else "",
            bool(cause and cause.confirmed),
        )


def print_table(outcomes: Iterable[Outcome]) -> bool:
    """Print a line for each fault, and return whether all were named correctly."""
    from mcore_qwen3vl import console

    lines = console.table("Injected faults", "fault", "the trace points at", "names", "")
    right = True
    for outcome in outcomes:
        mark = "[green]right[/]" if outcome.right else f"[red]wrong[/]: {outcome.fault.kind}"
        lines.add_row(outcome.fault.name, outcome.point, outcome.kind, mark)
        right = right and outcome.right
    console.output.print(lines)
    return right


def main() -> int:
    """Inject every fault, one at a time; return exit code 1 if one is not named, otherwise 0."""
    cpu.install()
    from mcore_qwen3vl import console

    console.quiet_libraries()
    with scratch_folder() as folder:
        injector = FaultInjector(folder)
        return 0 if print_table([injector.trace(fault) for fault in FAULTS]) else 1


if __name__ == "__main__":
    sys.exit(main())
