"""The state of a loader as plain data, and its redistribution over another number of ranks.

Energon's state is a tree of its own classes, and a restricted unpickler refuses these. In their
place it has dictionaries, lists, numbers, bytes and tensors here, so that
``torch.load(weights_only=True)`` reads it, alone or inside a checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from megatron.energon.flavors.webdataset.sample_loader import SliceState
from megatron.energon.rng import SystemRngState
from megatron.energon.savable_loader import (
    SavableDataLoaderState,
    SavableDatasetCheckpoint,
    SavableDatasetState,
)
from megatron.energon.state import FlexState

from mcore_qwen3vl.console import counted
from mcore_qwen3vl.data.encoding.balanced import SharedPacking
from mcore_qwen3vl.data.order import position_after, states_of
from mcore_qwen3vl.errors import BadInput

_CLASSES: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        SavableDataLoaderState,
        SavableDatasetCheckpoint,
        SavableDatasetState,
        SystemRngState,
        SliceState,
        FlexState,
    )
}
_CLASS = "$class"

RECORDS, SHARED_PACKS, OWN_PACKS, SHARDS = "records", "packs", "parts", "shards"
"""The kinds of loader in their states; see :mod:`.loader_kinds`."""


def to_plain(state: Any) -> Any:
    """Convert energon's state to plain data; raise TypeError for a type that is not known here."""
    if is_dataclass(state) and not isinstance(state, type) and type(state).__name__ in _CLASSES:
        values = {field.name: to_plain(getattr(state, field.name)) for field in fields(state)}
        return {_CLASS: type(state).__name__, **values}
    if isinstance(state, Mapping):
        kind = {_CLASS: "FlexState"} if isinstance(state, FlexState) else {}
        return kind | {key: to_plain(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(to_plain(item) for item in state)
    if isinstance(state, np.ndarray):
        return {_CLASS: "ndarray", "dtype": str(state.dtype), "values": state.tolist()}
    if state is None or isinstance(state, bool | int | float | str | bytes | torch.Tensor):
        return state
    raise TypeError(f"energon's loader state holds a {type(state)}; this version is not supported")


def from_plain(plain: Any) -> Any:
    """Convert plain data back to energon's state: the inverse of :func:`to_plain`."""
    if isinstance(plain, dict):
        values = {key: from_plain(value) for key, value in plain.items() if key != _CLASS}
        name = plain.get(_CLASS)
        if name is None:
            return values
        if name == "ndarray":
            return np.array(values["values"], values["dtype"])
        if name == "FlexState":
            state = FlexState()
            state.update(values)
            return state
        return _CLASSES[name](**values)
    if isinstance(plain, list | tuple):
        return type(plain)(from_plain(item) for item in plain)
    return plain


def redistribute(states: list[dict[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """Distribute the data workers of all ranks over another number of ranks.

    Records that are read by number, one sample a row, have one order for all ranks, and with
    balanced work all ranks share one stream of packs: the new ranks go on where the old ones
    stopped, each with as many workers as before. Otherwise a worker's stream cannot be split, so
    the total number of workers must stay the same: each new rank runs ``total / world_size`` of
    them. No sample is lost or repeated; the order in which the workers' batches form global batches
    changes.

    Raises:
        BadInput: the workers cannot be distributed evenly, or the states were saved without worker
            processes, or are not those of all ranks of one run.
    """
    if [s["rank"] for s in states] != list(range(states[0]["world_size"])):
        raise BadInput(
            f"The loader states are of ranks {[s['rank'] for s in states]}; all "
            f"{states[0]['world_size']} data-parallel ranks of the saved run are needed, in order."
        )
    if world_size == len(states):
        return states
    if states[0].get("balance"):
        return _continue_shared_stream(states[0], world_size)
    if states[0].get("order") == RECORDS:
        return [state_for_rank(states[0], rank, world_size) for rank in range(world_size)]
    workers = states[0]["num_workers"]
    total = workers * len(states)
    if workers == 0 or total % world_size:
        raise BadInput(
            f"The data state was saved by {counted(len(states), 'data-parallel rank')} with "
            f"{counted(workers, 'data worker')} each and cannot be divided over "
            f"{counted(world_size, 'rank')}: the total number of workers must stay the same, with "
            "at least one for each rank. Resume with a data-parallel size that divides it, or "
            "start the data from the beginning: train --load DIR --finetune, and another --save."
        )
    per_rank = total // world_size
    streams = [
        stream for s in states for stream in _loader_state_or_fresh(s, workers)["worker_states"]
    ]
    return [
        {
            **states[0],
            "rank": rank,
            "world_size": world_size,
            "num_workers": per_rank,
            "loader": {
                **_loader_state_or_fresh(states[0], per_rank),
                "worker_states": streams[rank * per_rank : (rank + 1) * per_rank],
                "next_worker_id": 0,
            },
        }
        for rank in range(world_size)
    ]


def state_for_rank(state: dict[str, Any], rank: int, world_size: int) -> dict[str, Any]:
    """Return the state with which a rank of `world_size` goes on where the saved run stopped.

    This is for records that are read by number. `state` may be any rank's, because all have read
    equally many micro-batches.
    """
    start = position_reached(state)
    if state.get("end") is not None:
        start = min(start, state["end"])  # places after the end hold nothing
    changed = {"rank": rank, "world_size": world_size, "rows": None, "start": start, "loader": None}
    return {**state, **changed}


def position_reached(state: Mapping[str, Any]) -> int:
    """Return the position after all records that the ranks of a state have taken."""
    workers = state["loader"]["worker_states"] if state["loader"] else []
    rows = (state["rows"] or 0) * state["world_size"]  # None: nothing was read since `start`
    return position_after(workers, state["start"], rows)


def position_in(state: Mapping[str, Any]) -> int | None:
    """Return a state's position in the one order of all records; None where there is no such order.

    `state` may be any rank's.
    """
    return position_reached(state) if state.get("order") == RECORDS else None


def packing_in(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the state of a rank's packing; None if it has read nothing."""
    return next(states_of(SharedPacking, state["loader"]), None)


def count_packs_taken(state: Mapping[str, Any]) -> int:
    """Return the number of packs taken by a state's ranks, among the packs that it counts."""
    workers = state["loader"]["worker_states"] if state["loader"] else []
    return int(state["start"] + state["world_size"] * sum(map(_count_taken, workers)))


def _continue_shared_stream(state: dict[str, Any], world_size: int) -> list[dict[str, Any]]:
    """Continue the shared stream after the last pack that the old ranks took."""
    state = copy.deepcopy(state)
    workers = state["loader"]["worker_states"] if state["loader"] else []
    if state.get("order") == SHARED_PACKS:
        state["start"] = count_packs_taken(state)
        # All workers read the same stream: they go on from the state that lies furthest back.
        known = [
            (packing, worker) for worker in workers for packing in states_of(SharedPacking, worker)
        ]
        if known:
            packing, worker = min(known, key=lambda each: each[0]["_place"])
            SharedPacking.take_turns_from(packing, state["start"])
            worker |= {"offset": 0} if "offset" in worker else {}
            workers[:] = [copy.deepcopy(worker) for _ in workers]
        state["loader"] = {**state["loader"], "next_worker_id": 0} if known else None
    else:
        for worker in workers:
            taken = _count_taken(worker) * state["world_size"]
            for packing in states_of(SharedPacking, worker):
                SharedPacking.take_turns_from(packing, packing["_base"] + taken)
            if "offset" in worker:  # a state without data workers has none
                worker["offset"] = 0
    return [{**state, "rank": rank, "world_size": world_size} for rank in range(world_size)]


def _count_taken(worker: dict[str, Any]) -> int:
    """Return how many packs a worker has delivered since its ranks took turns anew."""
    packing = next(states_of(SharedPacking, worker), {"_taken": 0, "_giving": False})
    return int(packing["_taken"] + packing["_giving"] + worker.get("offset", 0))


def _loader_state_or_fresh(state: dict[str, Any], workers: int) -> dict[str, Any]:
    """Return a rank's loader state, or the state of `workers` that have read nothing."""
    if state["loader"] is not None:
        return state["loader"]
    # Nothing was read before saving: every worker starts at its beginning.
    fresh = {_CLASS: "SavableDatasetCheckpoint", "state": None, "offset": 0}
    return {
        _CLASS: "SavableDataLoaderState",
        "worker_states": [fresh] * workers,
        "next_worker_id": 0,
        "micro_batch_size": None,
    }
