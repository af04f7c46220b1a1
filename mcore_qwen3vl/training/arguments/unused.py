"""What a run does not use of its command line, and says."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mcore_qwen3vl.data.config import parse_sources
from mcore_qwen3vl.flags import flag_of
from mcore_qwen3vl.training.arguments.command_line import COMMAND_LINE
from mcore_qwen3vl.training.arguments.settings import Settings
from mcore_qwen3vl.unused.fields import Unused


def unused_data_flags(settings: Settings, explicit: Collection[str]) -> list[Unused]:
    """Return what the command line sets, by its ``dest`` names in `explicit`, and no rank uses."""
    from mcore_qwen3vl.data.readers.tables import is_table

    loop, unused = settings.loop, []
    paths = [source.path for source in parse_sources(loop.training_data)]
    if "shuffle_buffer" in explicit and all(
        path.suffix in (".json", ".jsonl") or is_table(path) for path in paths
    ):
        why = "each epoch of these data has a permutation of its own"
        unused.append(Unused(COMMAND_LINE, "--shuffle-buffer", why))
    if not (loop.rampup_batch_size or loop.step_batch_size_schedule):
        batch = loop.global_batch_size or 1
        if left := (loop.train_samples or 0) % batch:
            why = f"a step takes {batch} samples, so the learning rate does not reach its end"
            unused.append(Unused(COMMAND_LINE, f"the last {left} of --train-samples", why))
    held_out = parse_sources(loop.valid_data_path) if loop.valid_data_path else []
    why = "a validation reads each data set once"
    if len({source.weight for source in held_out}) > 1:
        unused.append(Unused("--valid-data-path", "weight", why))
    if {source.epochs for source in held_out} - {None, 1}:
        unused.append(Unused("--valid-data-path", "epochs", why))
    return unused


def unused_rates(replaced: Mapping[str, Any]) -> list[Unused]:
    """Return the flags, by their ``dest`` names, for which the checkpoint's values hold."""
    why = "--use-checkpoint-opt-param-scheduler takes the checkpoint's"
    return [Unused(COMMAND_LINE, f"{flag_of(name)} {v}", why) for name, v in replaced.items()]
