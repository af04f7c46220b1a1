"""One role's rehearsal, in the process that acts as its rank on the pretended device."""

from __future__ import annotations

import resource
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mcore_qwen3vl.converters.mapping.parameters import part_of
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.pretended import peak
from mcore_qwen3vl.pretended import rank as this_rank
from mcore_qwen3vl.pretended.device import NOT_THE_CALLER, short_path
from mcore_qwen3vl.rehearsal.rank import holders, train

_PLACES = 3  # Python frames reported for an error


def measure(flags: Sequence[str], progress: Path) -> dict[str, Any]:
    """Train on this rank, and report what held the memory.

    Args:
        progress: file to which the name of each interval is appended when it ends.

    Returns:
        ``peak``, ``refused`` (or None) and ``over time`` (a list): :class:`~.peak.Moment` as
        dictionaries; ``error``: None, or what stopped the run; ``parameters``: their number by
        part; ``retries`` of the allocator; ``host bytes``: peak memory of this process.

    Raises:
        BadInput: the flags or the data cannot be used.
    """
    rank = this_rank.current
    assert rank is not None
    models: list[tuple[list[nn.Module], Any, list[nn.Module]]] = []
    peak.record()
    end_interval = rank.end_interval

    def tell(name: str) -> Any:
        with progress.open("a", encoding="utf-8") as file:
            file.write(f"{name}\n")
        return end_interval(name)

    rank.end_interval = tell  # type: ignore[method-assign]
    error = None
    try:
        train.main(list(flags), lambda *built: models.append(built))
    except BadInput:
        raise
    except BaseException as caught:
        if not isinstance(caught, SystemExit) or caught.code:
            error = _described(caught)
    history = peak.History(holders.holder, _owners(*models[0]) if models else {})
    refused = history.refused() if error else None
    return {
        "peak": vars(history.peak()),
        "refused": None if refused is None else vars(refused),
        "over time": [vars(moment) for moment in history.over_time()],
        "error": error,
        "parameters": by_part(models[0][0]) if models else {},
        "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
        "host bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _described(error: BaseException) -> dict[str, Any]:
    places = [
        f"{short_path(frame.filename)}:{frame.lineno} {frame.name}"
        for frame in reversed(traceback.extract_tb(error.__traceback__))
        if not any(part in frame.filename for part in NOT_THE_CALLER)
    ]
    return {
        "kind": type(error).__name__,
        "message": str(error).strip() or repr(error),
        "place": " < ".join(places[:_PLACES]),
        "out of memory": isinstance(error, torch.OutOfMemoryError),
    }


def _owners(model: list[nn.Module], optimizer: Any, second: list[nn.Module]) -> dict[int, str]:
    """Return the holder of each lasting storage, by its address."""
    owners: dict[int, str] = {}

    def add(tensors: Iterable[Any], name: str) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                owners.setdefault(tensor.untyped_storage().data_ptr(), name)

    parameters = [p for chunk in model for p in chunk.parameters()]
    add(parameters, holders.WEIGHTS)
    add((p for chunk in second for p in chunk.parameters()), holders.FROZEN)
    add((getattr(p, "main_grad", None) for p in parameters), holders.GRADIENTS)
    add((p.grad for p in parameters), holders.GRADIENTS)
    # Megatron's wrapper has an attribute named `buffers`.
    add((b for chunk in model for b in nn.Module.buffers(chunk)), holders.BUFFERS)
    add(_optimizer_tensors(optimizer), holders.OPTIMIZER)
    return owners


def _optimizer_tensors(optimizer: Any) -> Iterator[Any]:
    """Yield the main weights and states of the optimizers that Megatron chains."""
    from mcore_qwen3vl.training.step.optimizer import chained_optimizers

    for part in chained_optimizers(optimizer):
        inner = getattr(part, "optimizer", None)
        for group in getattr(inner, "param_groups", []):
            yield from group["params"]
        for state in getattr(inner, "state", {}).values():
            yield from state.values()


def by_part(model: list[nn.Module]) -> dict[str, int]:
    """Count the parameters of each part, as ``inspect`` names them; an adapter is one more."""
    parts: Counter[str] = Counter()
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            part = "adapter" if "adapter." in name else part_of(name)
            parts[part] += parameter.numel()
    return dict(parts.most_common())
