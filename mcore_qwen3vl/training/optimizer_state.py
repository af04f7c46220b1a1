"""The optimizer's state, as it is saved and loaded.

The distributed optimizer's state is saved and loaded so that each rank handles only what it owns.
mcore's "fully reshardable" format stores float32 weights and moments under the parameters' own keys
and shapes, so that any layout can read them. Its writer gathers the data-parallel ranks' shards on
the first of them, and its reader makes every rank read all of it. Neither is needed. A rank owns a
range of the flattened parameter, which is a few boxes of the tensor, and torch's distributed
checkpoints can hold and read any boxes. We declare those boxes, as views of the training state.
Keys, shapes and values are mcore's, so mcore's reader and ours can each read both writers' files.

mcore gives experts an optimizer of their own if EP divides them, and otherwise one optimizer to all
parameters. A checkpoint holds the parameter groups of each optimizer. A group's values (learning
rates, weight decay, step) do not depend on that, nor do the tensors' places in the checkpoint. So a
run with expert parallelism can resume from one without it, and the other way round.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
)
from torch import Tensor, nn

from mcore_qwen3vl.converters.storage.boxes import Extent, Shape, boxes_of_flat_range, overlap
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.memory_labels import label_module
from mcore_qwen3vl.training.optimizer import chained_optimizers, with_adam

label_module(__file__, "optimizer, temporary")

log = logging.getLogger(__name__)

SAVE = "sharded_param_state_fully_reshardable"
LOAD = "load_parameter_state_from_fully_reshardable"
USED = (
    SAVE,
    LOAD,
    "_get_main_param_and_optimizer_states",
    "_set_main_param_and_optimizer_states",
    "_is_distopt_quantized_param",
)
"""Methods of mcore's ``DistributedOptimizer`` that we replace (the first two) or call."""

HALVES = (torch.bfloat16, torch.float16)


def make_resumable(optimizer: Any) -> bool:
    """Let torch's Adam save and load its state exactly.

    mcore supports this for Transformer Engine's and Apex's Adam. With torch's Adam, its distributed
    optimizer makes three mistakes: it reads the state before that exists, it shares one ``step``
    tensor among all parameters, each of which then advances it, and it expects ``step`` in formats
    that store it elsewhere. Under any optimizer a rank without a trained parameter has no ``step``
    to save, so it counts the steps itself.

    Returns:
        Whether a distributed optimizer holds a torch's Adam.
    """
    changed = False
    for part, adam in with_adam(optimizer):
        if not any(group["params"] for group in adam.param_groups):
            _count_steps(adam)
        if isinstance(part, DistributedOptimizer):
            _start_states(adam)
            adam.register_load_state_dict_post_hook(_separate_steps)
            _tolerate_missing_step(part)
            changed = True
    return changed


def _start_states(adam: torch.optim.Adam) -> None:
    """Create the state that Adam itself would create in its first step."""
    for group in adam.param_groups:
        for parameter in group["params"]:
            device = parameter.device if group["fused"] else "cpu"
            adam.state[parameter] = {
                "step": torch.zeros((), device=device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


_COUNT = "steps"


def _count_steps(adam: torch.optim.Adam) -> None:
    """Count the steps where no parameter's state does: mcore saves and loads the count.

    A rank has no trained parameter if its pipeline stage has none, such as the later ones of a run
    that trains the vision tower alone. torch keeps states under keys that are no parameters.
    """
    states: dict[Any, Any] = adam.state
    states[_COUNT] = {"step": torch.zeros(())}
    adam.register_step_post_hook(lambda adam, *_: adam.state[_COUNT]["step"].add_(1))


def _separate_steps(adam: torch.optim.Optimizer) -> None:
    """Give each parameter its own ``step``, after mcore has loaded one tensor for all."""
    for state in adam.state.values():
        state["step"] = state["step"].clone()


def _tolerate_missing_step(optimizer: DistributedOptimizer) -> None:
    """Let mcore set states from formats that have ``step`` elsewhere; it looks the key up."""
    set_states = optimizer._set_main_param_and_optimizer_states

    def set_states_but_step(parameter: nn.Parameter, tensors: dict[str, Tensor | None]) -> None:
        set_states(parameter, {"step": None, **tensors})

    optimizer._set_main_param_and_optimizer_states = set_states_but_step


def start_momentum(optimizer: Any) -> None:
    """Let mcore load the state of torch's SGD, for which it has no function to create one."""
    for part in chained_optimizers(optimizer):
        sgd = getattr(part, "optimizer", None)
        if isinstance(sgd, torch.optim.SGD) and part.init_state_fn is None:
            part.init_state_fn = _start_momentum


def _start_momentum(sgd: torch.optim.SGD, config: Any = None) -> None:
    """Create the state that SGD itself would create in its first step, if it has momentum."""
    for group in sgd.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            sgd.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def keep_own_parts(optimizer: Any) -> None:
    """Let each data-parallel rank save and load its own part, where mcore would gather all parts.

    Without the distributed optimizer mcore's way stays; also if the training state is no float32
    tensor on the device, with a warning.

    Raises:
        BadInput: the installed megatron-core lacks one of the methods in :data:`USED`.
    """
    for part in _distributed_parts(optimizer):
        if missing := [name for name in USED if not hasattr(part, name)]:
            raise BadInput(
                f"DistributedOptimizer of the installed megatron-core has no {missing[0]}, so the "
                "optimizer's state cannot be saved in parts. Install the pinned version."
            )
        if (other := _flag_of_other_state(part)) is None:
            parts = _SavedParts(part)
            setattr(part, SAVE, parts.declare)
            setattr(part, LOAD, parts.load)
        elif dist.get_rank() == 0:
            log.warning(
                "%s: checkpoints gather the optimizer's state on the first data-parallel rank, "
                "which takes the host memory of all of it",
                other,
            )


@torch.no_grad()
def check_state_of_weights(optimizer: Any, directory: str) -> None:
    """Refuse float32 weights that do not round to the model's 16-bit weights; a collective.

    mcore's writer gathers the gradient buckets without the padding at their ends, but reads the
    result as if the padding were there. Everything after such an end is stored shifted. A bucket
    is padded if its size is not a multiple of the data-parallel size and of 128.

    Raises:
        BadInput: any rank holds such a weight; raised on every rank.
    """
    device = torch.cuda.current_device()
    wrong, total = torch.zeros((), dtype=torch.int64, device=device), 0
    for part in _distributed_parts(optimizer):
        if _flag_of_other_state(part) is not None:
            continue
        for parameter, span in _owned_ranges(part):
            if parameter.dtype not in HALVES or part._is_distopt_quantized_param(parameter):
                continue
            weight = part._get_main_param_and_optimizer_states(parameter)["param"]
            owned_part = parameter.view(-1)[span.start : span.stop]
            wrong += (weight.to(owned_part.dtype) != owned_part).sum()
            total += len(span)
    counts = torch.stack([wrong, wrong.new_tensor(total)])
    dist.all_reduce(counts)
    differing, total = counts.tolist()
    if differing:
        raise BadInput(
            f"The optimizer's state in {directory} does not belong to the model's weights: "
            f"{differing} of {total} float32 weights do not round to them. Earlier versions "
            "saved such states because of an error in Megatron, when --overlap-grad-reduce "
            "divided the gradients into buckets that needed padding (data-parallel sizes that "
            "are not a power of two). The model's weights are right: continue from them with "
            "--no-load-optim."
        )


def _distributed_parts(optimizer: Any) -> Iterator[DistributedOptimizer]:
    """Yield the distributed optimizers of a chain that have parameters on this rank."""
    for part in chained_optimizers(optimizer):
        if isinstance(part, DistributedOptimizer) and not part.is_stub_optimizer:
            yield part


def _flag_of_other_state(optimizer: DistributedOptimizer) -> str | None:
    """Return the flag that keeps the state in another dtype or off the device; None: neither."""
    if optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
        return "--use-precision-aware-optimizer"
    offloaded = isinstance(optimizer.optimizer, HybridDeviceOptimizer)
    return "--optimizer-cpu-offload" if offloaded else None


class _SavedParts:
    """Stands in for one optimizer's methods named :data:`SAVE` and :data:`LOAD`."""

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self._optimizer = optimizer
        self._asked: list[dict[str, Tensor]] = []

    def declare(
        self,
        model_sharded_state_dict: dict[str, Any],
        is_loading: bool = False,
        metadata: dict[str, Any] | None = None,
    ) -> dict[int, dict[str, list[ShardedTensor]]]:
        """Declare where each box of this rank's state lies in the whole tensors."""
        described, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
        by_parameter = {entry.data: entry for entry in nested_values(described)}
        instance = self._optimizer.distributed_optimizer_instance_id
        state: dict[int, dict[str, list[ShardedTensor]]] = {}
        asked = []
        for number, (parameter, span) in enumerate(_owned_ranges(self._optimizer)):
            if parameter not in by_parameter:
                raise ValueError(f"an optimized parameter {tuple(parameter.shape)} is not saved")
            boxes = list(_boxes(by_parameter[parameter], span, instance))
            tensors = self._state_tensors(parameter)
            state[number] = {
                name: [box.view_of(name, tensor) for box in boxes]
                for name, tensor in tensors.items()
            }
            asked.append(tensors)
        self._asked = asked if is_loading else []
        return state

    @torch.no_grad()
    def load(self, state_dict: Mapping[int, Mapping[str, Any]]) -> None:
        """Put the loaded state into the optimizer, where it was not already loaded in place.

        `state_dict` is the result of :meth:`declare`, without what the checkpoint lacks.
        """
        asked, self._asked = self._asked, []
        for number, (parameter, _) in enumerate(_owned_ranges(self._optimizer)):
            read = {name: asked[number][name] for name in state_dict[number]}
            self._optimizer._set_main_param_and_optimizer_states(parameter, read)

    def _state_tensors(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the weight and moments of a range by their names in checkpoints, each (n,)."""
        states = self._optimizer._get_main_param_and_optimizer_states(parameter)
        names = ("param", *self._optimizer.optimizer_state_keys)
        return {name: states[name].detach().view(-1) for name in names}


def _owned_ranges(optimizer: DistributedOptimizer) -> Iterator[tuple[nn.Parameter, range]]:
    """Yield each parameter that this rank owns a part of, with the range of flattened elements."""
    for buffer in optimizer.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, places in bucket["param_map"].items():
                    yield parameter, range(places["param"].start, places["param"].end)


@dataclass(frozen=True)
class _Box:
    """A box of a stored tensor, and its place in the flat range that a rank owns."""

    place: ShardedTensor  # without data
    first: int  # index in the range of the box's first element
    strides: Shape

    def view_of(self, name: str, tensor: Tensor) -> ShardedTensor:
        """Return the box as a view of `tensor`: one state of the range, (n,)."""
        first = tensor.storage_offset() + self.first
        data = tensor.as_strided(self.place.local_shape, self.strides, first)
        key = f"optimizer.state.{name}.{self.place.key}"
        return replace(self.place, key=key, data=data, dtype=data.dtype)


def _boxes(
    entry: ShardedTensor | ShardedTensorFactory, span: range, instance: int
) -> Iterator[_Box]:
    """Yield the boxes that make up a range of a parameter.

    Elements 2 to 7 of a (4, 3) weight, for example, are column 2 of row 0, row 1, and columns 0 and
    1 of row 2. If the weight is stored as two tensors of two rows each, as SwiGLU's gate and up
    projection are, the first two boxes are in one and the third is in the other.
    """
    base = torch.empty(entry.data.shape, device="meta")
    pieces = [(piece, _extent_of(piece.data, base)) for piece in _stored_pieces(entry, base)]
    for box in boxes_of_flat_range(tuple(base.shape), span.start, span.stop):
        for piece, extent in pieces:
            both = overlap(box, extent)
            if both is None:
                continue
            inside = tuple(part.start for part in both.stored)
            sizes = tuple(part.stop - part.start for part in both.stored)
            at = (a + b for a, b in zip(extent.offsets, inside, strict=True))
            first = sum(a * stride for a, stride in zip(at, base.stride(), strict=True))
            chosen = base.dim() - piece.data.dim()  # axes that select one of several experts
            place = _place_of_box(piece, inside[chosen:], sizes[chosen:], instance)
            stacked = (1,) * piece.prepend_axis_num
            yield _Box(place, first - span.start, (*stacked, *piece.data.stride()))


def _stored_pieces(
    entry: ShardedTensor | ShardedTensorFactory, base: Tensor
) -> list[ShardedTensor]:
    """Return the stored tensors that a parameter is divided into, with views of `base` as data.

    Raises:
        ValueError: the stored tensors are not boxes that together make up the parameter.
    """
    if not isinstance(entry, ShardedTensorFactory):
        return [replace(entry, data=base, dtype=base.dtype)]
    pieces = list(nested_values(entry.build_fn(entry.key, base, entry.replica_id, None)))
    views = all(
        (piece.data is base or piece.data._base is base)
        and piece.data.stride() == base.stride()[base.dim() - piece.data.dim() :]
        for piece in pieces
    )
    if not views or sum(piece.data.numel() for piece in pieces) != base.numel():
        raise ValueError(f"{entry.key} is not stored as boxes of the parameter")
    return pieces


def _extent_of(view: Tensor, base: Tensor) -> Extent:
    """Return the box of row-major `base` that `view` covers; `view` may lack leading axes."""
    rest, corner = int(view.storage_offset()), []
    for stride in base.stride():
        at, rest = divmod(rest, stride)
        corner.append(at)
    return Extent(tuple(corner), (1,) * (base.dim() - view.dim()) + tuple(view.shape))


def _place_of_box(
    piece: ShardedTensor, inside: Shape, sizes: Shape, instance: int
) -> ShardedTensor:
    """Describe the box of `sizes` elements at `inside` of a piece, as part of the stored tensor."""
    stacked = piece.prepend_axis_num
    corner = (0,) * stacked + inside
    pipeline, tensor, _ = piece.replica_id
    return replace(
        piece,
        data=None,
        # For an irregular grid, mcore wants the prepended axes here too.
        local_shape=(1,) * stacked + sizes,
        global_offset=tuple(a + b for a, b in zip(piece.global_offset, corner, strict=True)),
        axis_fragmentations=None,
        # Data-parallel ranks hold copies of the model, but each its own elements of the state.
        replica_id=(pipeline, tensor, instance),
        prepend_axis_num=0,
    )


def accept_other_chains(optimizer: Any) -> None:
    """Let a chain of optimizers load the state of a chain of another length."""
    parts = chained_optimizers(optimizer)
    if all(isinstance(part, FP32Optimizer | Float16OptimizerWithFloat16Params) for part in parts):
        _Regrouped(optimizer).install()
    elif all(isinstance(part, DistributedOptimizer) for part in parts) and len(parts):
        load = optimizer.load_state_dict

        @functools.wraps(load)
        def load_regrouped(state_dict: dict[Any, Any]) -> None:
            load(regroup(state_dict, len(parts)))

        optimizer.load_state_dict = load_regrouped


_MASTER = "fp32_from_fp16_params"  # lists of float32 weights, one for each group
_MASTER_TO_LOAD = "fp32_from_fp16_params_to_load"  # the same as dicts by number


class _Regrouped:
    """The state of a chain without the distributed optimizer, loaded from a chain of any groups.

    Which groups of parameters a rank has depends on the layout, and so do their numbers in
    ``state``. The tensors' places in the checkpoint do not. mcore merges the lists of a request
    with the checkpoint's, so a request here has none, and the groups are this optimizer's own.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._parts = optimizer, chained_optimizers(optimizer)
        self._declare, self._load = optimizer.sharded_state_dict, optimizer.load_state_dict

    def install(self) -> None:
        """Replace the optimizer's methods by those below."""
        self._optimizer.sharded_state_dict = self.declare
        self._optimizer.load_state_dict = self.load

    def declare(self, model: Any, is_loading: bool = False, **more: Any) -> dict[Any, Any]:
        """Declare what is saved, as mcore does; of what is to be loaded, the tensors alone."""
        state: dict[Any, Any] = self._declare(model, is_loading, **more)
        if is_loading:
            for one in (state, *_numbered(state)):
                _groups_and_state(one).pop("param_groups", None)
                if _MASTER in one:
                    weights = [dict(enumerate(of_group)) for of_group in one.pop(_MASTER)]
                    one[_MASTER_TO_LOAD] = dict(enumerate(weights))
        return state

    def load(self, state: dict[Any, Any] | list[Any]) -> None:
        """Load the tensors of :meth:`declare` with the step of the checkpoint's groups."""
        every = [] if isinstance(state, list) else [state, *_numbered(state)]
        saved = [one for one in every if "param_groups" in _groups_and_state(one)]
        groups = [group for one in saved for group in _groups_and_state(one)["param_groups"]]
        if not groups or any("params" in group for group in groups):
            self._load(state)  # a legacy checkpoint has each rank's whole state
            return
        common = _groups_and_state(saved[0])["state"].get("common_step")
        scaler = {key: saved[0][key] for key in ("grad_scaler",) if key in saved[0]}
        own = every[:1] if len(self._parts) == 1 else [every[0][n] for n in range(len(self._parts))]
        chain = {
            number: _with_groups(part, one, groups, common, scaler)
            for number, (part, one) in enumerate(zip(self._parts, own, strict=True))
        }
        self._load(chain[0] if len(chain) == 1 else chain)


def _numbered(state: Mapping[Any, Any]) -> list[dict[Any, Any]]:
    """Return the states of a chain's optimizers, in their order; a single one has no number."""
    return [state[number] for number in sorted(key for key in state if isinstance(key, int))]


def _groups_and_state(state: Mapping[Any, Any]) -> Any:
    """Return what torch's optimizer has of one optimizer's state."""
    return state.get("optimizer", state)


def _with_groups(
    part: Any,
    own: Mapping[Any, Any],
    saved: Sequence[Mapping[str, Any]],
    step: Any,
    scaler: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the state that the optimizer `part` loads, of its `own` tensors and `saved` groups."""
    current = part.optimizer.state_dict()["param_groups"]
    tensors = _groups_and_state(own).get("state", {})
    numbers = [number for group in current for number in group["params"]]
    state: dict[str, Any] = {
        "state": {number: tensors[number] for number in numbers if tensors.get(number)},
        "param_groups": _own_groups(part, saved),
    }
    if step is not None:
        state["state"]["common_step"] = step
        if _COUNT in part.optimizer.state:
            state["state"][_COUNT] = {"step": step.clone()}
    if not isinstance(part, Float16OptimizerWithFloat16Params):
        return state
    # A rank whose pipeline stage trains nothing requested no weights, and has none.
    own_weights = own.get(_MASTER_TO_LOAD, {})
    weights = [list(of_group.values()) for of_group in _in_order(own_weights)]
    return {"optimizer": state, _MASTER: weights, **scaler}


def _in_order(numbered: Mapping[int, Mapping[int, Any]]) -> list[dict[int, Any]]:
    """Return a mapping's values by number, and theirs too."""
    return [dict(sorted(numbered[number].items())) for number in sorted(numbered)]


def regroup(state: dict[Any, Any], parts: int) -> dict[Any, Any]:
    """Rearrange `state` for a chain of `parts` optimizers.

    Args:
        state: one optimizer's state, or the states of several by number. All but ``param_state``
            is as the checkpoint has it; ``param_state`` is as this chain requested it.
        parts: number of optimizers that will load it.
    """
    numbers = sorted(key for key in state if isinstance(key, int))
    saved = [state] if "optimizer" in state else [state[number] for number in numbers]
    if len(saved) == parts:
        return state
    # Megatron looks its groups up by their settings, which include `is_expert_parallel`, and skips
    # the others. Of two that are equal it takes the last, so the saved ones come last.
    groups = [group for part in saved for group in part["optimizer"]["param_groups"]]
    both = [{**group, "is_expert_parallel": flag} for flag in (True, False) for group in groups]
    said = {key: value for key, value in saved[0].items() if key not in (*numbers, "param_state")}
    said |= {"optimizer": {**saved[0]["optimizer"], "param_groups": [*both, *groups]}}
    requested = [state] if parts == 1 else [state.get(number, {}) for number in range(parts)]
    # A rank may own none of a small optimizer's parameters.
    owned = [{key: part[key] for key in ("param_state",) if key in part} for part in requested]
    chain = {number: {**said, **own_part} for number, own_part in enumerate(owned)}
    return chain[0] if parts == 1 else chain


def keep_own_groups(optimizer: Any) -> None:
    """Let a resumed optimizer keep its own parameter groups, with the step of the saved ones.

    mcore takes the saved groups, and with them the hyperparameters of the run that saved, whatever
    this command says. The contract compares those, so that only the number of steps is taken.
    """
    for part in chained_optimizers(optimizer):
        if getattr(part, "optimizer", None) is not None:
            part.load_state_dict = functools.partial(
                _load_with_own_groups, part, part.load_state_dict
            )


def _load_with_own_groups(part: Any, load: Any, state: dict[str, Any]) -> None:
    """Replace ``load_state_dict`` of a `part` of the optimizer, which `load` is."""
    inner = state.get("optimizer", state)
    if saved := inner.get("param_groups"):
        inner["param_groups"] = _own_groups(part, saved)
    load(state)


def _own_groups(part: Any, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the parameter groups of a `part` of the optimizer, with the step of the saved ones."""
    steps = [group["step"] for group in saved if "step" in group]
    step = {"step": max(steps)} if steps else {}
    return [{**group, **step} for group in part.optimizer.state_dict()["param_groups"]]
