"""The flags that reach a run, from the parser itself, with values at and beyond their borders."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cache
from random import Random

from mcore_qwen3vl.training.arguments.megatron_flags import Sorting
from mcore_qwen3vl.training.arguments.settings import add_arguments
from mcore_qwen3vl.training.contract.table import owner_of, reasons_for_no_row
from mcore_qwen3vl.verification.search.case import Flag

SAME = "it chooses where and how the same is computed"
WRITTEN = ("it says what is written", "it looks for errors", "it decides what is measured")
"""Beginnings of reasons for which a flag has no row in the contract of a run."""

_OF_THE_CASE = {
    "hf_model", "load_hf", "load", "save", "save_hf", "data_path", "train_data_path",
    "valid_data_path", "test_data_path", "log_json", "cpu", "train_iters", "num_epochs",
    "train_samples", "global_batch_size", "micro_batch_size", "seq_length", "num_workers",
    "packing", "balance", "pad_to_longest", "loss", "task", "exit_interval", "log_interval",
    "exit_signal_handler", "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size",
    "sequence_parallel", "num_virtual_stages_per_pipeline_rank", "shuffle", "eval_interval",
}  # fmt: skip
"""What other axes draw, or the case itself says."""

_SIDE_EFFECTS = {
    "exit_duration_in_mins", "exit_signal", "run_workload_inspector_server", "local_rank",
    "distributed_timeout_minutes", "verbose", "trust_data", "preprocess", "fault_injector_seed",
}  # fmt: skip
"""What would end a run by the clock, open a port or run code of the data set."""


@dataclass(frozen=True)
class DrawnFlag:
    """A flag that reaches a run.

    Attributes:
        values: what stands behind it, at and beyond the borders of its type.
        row: the row of the contract that owns it, or the reason why none does.
    """

    name: str
    values: tuple[tuple[str, ...], ...]
    row: str

    def draw(self, rng: Random) -> Flag:
        return (self.name, *rng.choice(self.values))


@cache
def drawable() -> tuple[DrawnFlag, ...]:
    """Return the flags that reach a run and take no path."""
    from megatron.training.arguments import add_megatron_arguments

    ours, theirs = (argparse.ArgumentParser(allow_abbrev=False) for _ in range(2))
    add_arguments(ours)
    add_megatron_arguments(theirs)
    reaching, reasons = Sorting.for_installed().reaching, reasons_for_no_row()
    actions = [*ours._actions, *(a for a in theirs._actions if reaching & {*a.option_strings})]
    found = []
    for action in actions:
        if action.dest in _OF_THE_CASE | _SIDE_EFFECTS or action.dest == "help":
            continue
        row = owner_of(action.dest)
        why = row.name if row else reasons.get(action.dest, "")
        if values := _values(action):
            found.append(DrawnFlag(action.option_strings[0], values, why))
    return tuple(found)


def _values(action: argparse.Action) -> tuple[tuple[str, ...], ...]:
    """Return values for a flag; none if it takes a path or a text of its own."""
    if action.nargs == 0:
        return ((),)
    if action.choices:
        return tuple((str(choice),) for choice in action.choices)
    default = action.default if isinstance(action.default, int | float) else 1
    if action.type is int:
        return tuple((str(value),) for value in dict.fromkeys((0, 1, 2, 3, int(default), -1)))
    if action.type is float:
        some = (0.0, 0.1, 0.5, 1.0, 2.0, float(default), -1.0)
        return tuple((f"{value:g}",) for value in dict.fromkeys(some))
    return ()


@cache
def reasons() -> dict[str, str]:
    """Return the row of the contract, or the reason for none, by the name of a flag."""
    return {flag.name: flag.row for flag in drawable()}


def computes_the_same(name: str) -> bool:
    """Return whether a flag says where and how the same is computed, or what is written."""
    return reasons().get(name, "").startswith((SAME, *WRITTEN))
