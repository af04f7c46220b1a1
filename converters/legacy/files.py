"""The files of a legacy checkpoint, mapped, and checked against each other and against a run."""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from mcore_qwen3vl.converters.legacy.layout import FILE, Rank, model_key
from mcore_qwen3vl.converters.megatron_checkpoint import require_own_keys
from mcore_qwen3vl.converters.place import RELEASE
from mcore_qwen3vl.converters.storage.archive import (
    STORAGES,
    Sums,
    load,
)
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import refuse_special_files
from mcore_qwen3vl.layout import Layout

_COMPARED = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
)
_COMPARED_IN_MOE = ("expert_model_parallel_size", "expert_tensor_parallel_size")


def saved_arguments(folder: Path) -> Namespace:
    """Return Megatron's arguments of the run that saved the legacy checkpoint in `folder`.

    Raises:
        BadInput: there is no such checkpoint, or it is damaged or holds no arguments.
    """
    path = _rank_files(folder)[0]
    return _arguments(load(path), path)


def _rank_files(folder: Path) -> list[Path]:
    if not (paths := sorted(folder.glob(f"mp_rank_*/{FILE}"))):
        raise BadInput(f"{folder} holds no mp_rank_*/{FILE}; it is not a legacy checkpoint.")
    return paths


@dataclass(frozen=True)
class RankFile:
    """The mapped file of one rank."""

    path: Path
    rank: Rank
    layout: Layout
    models: list[dict[str, Any]]

    def tensor(self, vp: int, name: str) -> Tensor:
        """Return parameter `name` of chunk `vp`."""
        if name not in self.models[vp]:
            raise BadInput(
                f"{self.path} lacks the parameter {name}, which other ranks have. The files do not "
                "belong together."
            )
        value = self.models[vp][name]
        if not isinstance(value, Tensor) or value.dtype not in STORAGES:
            kind = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
            raise BadInput(
                f"{self.path}: {name} is {kind}; it must be a tensor of "
                f"{', '.join(map(str, STORAGES))}."
            )
        return value

    def layers(self, vp: int) -> int:
        """Return the number of decoder layers in chunk `vp`: one more than the highest index."""
        # A larger number is no layer's; it is left over, and refused by its name.
        numbers = (re.match(r"decoder\.layers\.(\d{1,4})\.", name) for name in self.models[vp])
        return max((int(match[1]) + 1 for match in numbers if match), default=0)


def open_ranks(folder: Path, sums: Sums | None = None) -> list[RankFile]:
    """Map every rank's file; note the checksums of its tensors' data in `sums`.

    Raises:
        BadInput: there are no files, one is damaged or missing, or they belong to different
            checkpoints.
    """
    rank_files = []
    for path in _rank_files(folder):
        refuse_special_files(path.parent)
        content = load(path, sums=sums)
        layout = _layout(content, path)
        models = [
            _named_parameters(content, model_key(vp, layout.vpp), path) for vp in range(layout.vpp)
        ]
        rank_files.append(RankFile(path, _rank(path, layout), layout, models))
    for file in rank_files:
        if file.layout != rank_files[0].layout:
            raise BadInput(
                f"{rank_files[0].path} was saved under {rank_files[0].layout} and {file.path} "
                f"under {file.layout}. They are of different checkpoints."
            )
    _require_all_ranks(folder, rank_files)
    return rank_files


def _require_all_ranks(folder: Path, rank_files: list[RankFile]) -> None:
    """Raise BadInput unless the files hold every part of each tensor, and every expert."""
    layout = rank_files[0].layout
    tp = {(file.rank.pp, file.rank.tp) for file in rank_files}
    experts = {(file.rank.pp, file.rank.ep, file.rank.tp % layout.etp) for file in rank_files}
    for pp in range(layout.pp):
        absent = [f"TP rank {n}" for n in range(layout.tp) if (pp, n) not in tp]
        absent += [
            f"EP rank {n}"
            for n in range(layout.ep)
            if not all((pp, n, etp) in experts for etp in range(layout.etp))
        ]
        if absent:
            raise BadInput(
                f"{folder} was saved under {layout} and lacks a file of {absent[0]}, PP rank {pp}. "
                "Copy the checkpoint again."
            )


def _arguments(content: Any, path: Path) -> Namespace:
    args = content.get("args") if isinstance(content, dict) else None
    if not isinstance(args, Namespace):
        raise BadInput(
            f"{path} holds no arguments, so the layout that it was saved under is not known. Load "
            "it in Megatron and save it again."
        )
    return args


def _layout(content: Any, path: Path) -> Layout:
    args = _arguments(content, path)
    tp = getattr(args, "tensor_model_parallel_size", None)
    sizes: dict[str, Any] = {
        "tp": tp,
        "pp": getattr(args, "pipeline_model_parallel_size", None),
        "vpp": getattr(args, "virtual_pipeline_model_parallel_size", None) or 1,
        "ep": getattr(args, "expert_model_parallel_size", 1),
        "etp": getattr(args, "expert_tensor_parallel_size", None) or tp,
    }
    for value in sizes.values():
        if type(value) is not int or value < 1:
            shown = value if type(value) is int else f"a {type(value).__name__}"
            raise BadInput(
                f"{path}: the arguments give {shown} as a parallel size. Copy the checkpoint again."
            )
    layout = Layout(**sizes)
    if not getattr(args, "num_experts", None):
        return replace(layout, ep=1, etp=1)
    if layout.tp % layout.etp:
        raise BadInput(
            f"{path} was saved under ETP {layout.etp} and TP {layout.tp}. ETP does not divide TP, "
            "and several ranks have written the same file: part of the experts is lost."
        )
    return layout


def _rank(path: Path, layout: Layout) -> Rank:
    """Parse the rank from the folder's name, whose form depends on the layout."""
    pattern = r"mp_rank_(\d{2,})" + r"_(\d{3,})" * ((layout.pp > 1) + (layout.ep > 1))
    match = re.fullmatch(pattern, path.parent.name)
    numbers = [int(number) for number in match.groups()] if match else []
    tp, *others = numbers or [layout.tp]
    pp = others.pop(0) if others and layout.pp > 1 else 0
    ep = others.pop(0) if others else 0
    if tp >= layout.tp or pp >= layout.pp or ep >= layout.ep:
        raise BadInput(
            f"{path}: the arguments say {layout}, but the name of its folder says another layout."
        )
    return Rank(tp, pp, ep)


def _named_parameters(content: dict[str, Any], key: str, path: Path) -> dict[str, Any]:
    state = content.get(key)
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        there = ", ".join(_shorten(name) for name in content)
        raise BadInput(
            f"{path} holds no {key!r} with parameters by their names, but {there:.200}. Copy it "
            "again."
        )
    return state


def check_run(folder: Path, args: Namespace) -> None:
    """Check that the legacy checkpoint in `folder` is for the run that `args` describe.

    Megatron itself exits with code 0 if a rank's file is missing. A virtual stage that is missing
    from the file keeps its random values, and so do parameters that another spec names differently.

    Raises:
        BadInput: the checkpoint is for another layout or layer spec (the message names both
            values), is another maker's, or its optimizer state is for other parameters.
    """
    saved = saved_arguments(folder)
    names = [*_COMPARED, *(_COMPARED_IN_MOE if args.num_experts else ())]
    if getattr(saved, "spec", None) is not None:  # Megatron's own models have none
        names.append("spec")
    different = [
        f"{name} {_shorten(getattr(saved, name))} instead of {getattr(args, name)}"
        for name in names
        if hasattr(saved, name) and getattr(saved, name) != getattr(args, name)
    ]
    if different:
        raise BadInput(
            f"{folder} is a legacy checkpoint, which loads only under its own layout. It was "
            f"saved with {', '.join(different)}. Change the flags, or convert it: mcore-qwen3vl "
            "convert mcore-to-hf, then --load-hf."
        )
    require_own_keys(folder, open_ranks(folder)[0].models[0])
    if folder.name != RELEASE and not (args.finetune or args.no_load_optim):
        # The optimizer's state has no names, only the order of the parameters. Each expert of the
        # torch spec used to be one parameter; now one parameter holds all experts.
        apart = not getattr(saved, "moe_grouped_gemm", True)
        if args.num_experts and args.spec == ["torch"] and apart:
            raise BadInput(
                f"{folder} is a legacy checkpoint in which each expert is a parameter of its own, "
                "so its optimizer state does not fit this version. Continue from its weights with "
                "--no-load-optim."
            )


def _shorten(value: Any) -> str:
    """Shorten a value from a file for a message; only these types are sure to give short text."""
    items = value if isinstance(value, list) else [value]
    plain = all(item is None or isinstance(item, int | str) for item in items)
    return f"{value!s:.80}" if plain else f"a {type(value).__name__}"
