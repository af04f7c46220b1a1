"""What Hugging Face's model computes at every place, and again under a changed assumption."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mcore_qwen3vl.verify.parity.batches import Batch, MicroBatch
from mcore_qwen3vl.verify.parity.reference import Expected, Reference
from mcore_qwen3vl.verify.trace.places import Place

Call = tuple[tuple[Any, ...], dict[str, Any], Any]
"""Positional arguments, keyword arguments and output of one call of a module."""


@dataclass
class Recording:
    """Values of one micro-batch at every place.

    Attributes:
        micro: the micro-batch.
        values: by place: (B, S, W), zero at padding; (P, W) or (N, W).
        gradients: the same for the loss's gradient; empty where none were asked for.
        expected: logits, losses and gradients of the parameters.
        calls: by module, its calls in order; a sample with images and videos calls the tower twice.
    """

    micro: MicroBatch
    values: dict[str, Tensor]
    gradients: dict[str, Tensor]
    expected: Expected
    calls: dict[str, list[Call]] = field(default_factory=dict)

    def assemble(self, place: Place, outputs: Sequence[Tensor]) -> Tensor:
        """One tensor a call, in the order of :attr:`calls`, as one tensor."""
        return assemble(place, self.micro, outputs)


def record(
    reference: Reference,
    places: Iterable[Place],
    batch: Batch,
    *,
    gradients: bool,
    keep_calls: bool = False,
) -> Recording:
    """Run the reference on `batch`, whose micro-batches are copies of one, and watch the first.

    Args:
        reference: Hugging Face's model.
        places: where to look.
        batch: the input.
        gradients: run the backward too.
        keep_calls: keep every module's arguments, so that a call can be made again.
    """
    micro = batch.micro_batches[0]
    watch = _Watch(len(micro.places), keep_calls)
    with watch.on(reference.model, list(places)):
        expected = reference.run(batch, gradients=gradients)
    # Modules of the tower are called once for the images and once for the videos of a sample.
    made: dict[str, Tensor] = {}
    slopes: dict[str, Tensor] = {}
    for place in watch.places:
        calls = _calls(place, micro)
        if calls and place.name in watch.values:
            made[place.name] = assemble(place, micro, watch.values[place.name][:calls])
            found = watch.gradients.get(place.name, {})
            if found:
                shapes = watch.values[place.name][:calls]
                each = [found.get(i, torch.zeros_like(v)) for i, v in enumerate(shapes)]
                slopes[place.name] = assemble(place, micro, each)
    return Recording(micro, made, slopes, expected, dict(watch.calls))


def assemble(place: Place, micro: MicroBatch, outputs: Sequence[Tensor]) -> Tensor:
    """The values of a micro-batch from those of its samples.

    Visual rows stand images first, then videos, as :class:`VisualInputs` has them.
    """
    if place.rows != "tokens":
        kinds = [kind for at in micro.places for kind in _kinds(at.sample)]
        ordered = sorted(range(len(kinds)), key=lambda i: kinds[i])  # stable
        return torch.cat([outputs[i].flatten(1) for i in ordered])
    width = outputs[0].numel() // len(micro.places[0].sample.input_ids)
    whole = outputs[0].new_zeros(*micro.input_ids.shape, width)
    for at, output in zip(micro.places, outputs, strict=True):
        whole[at.tokens] = output.reshape(-1, width)
    return whole


def valid_tokens(micro: MicroBatch) -> Tensor:
    """(B, S) bool: not padding."""
    valid = torch.zeros(micro.input_ids.shape, dtype=torch.bool)
    for at in micro.places:
        valid[at.tokens] = True
    return valid


def _kinds(sample: Any) -> list[int]:
    """The calls of the vision tower that a sample makes: 0 for its images, 1 for its videos."""
    grids = (sample.image_grid_thw, sample.video_grid_thw)
    return [kind for kind, grid in enumerate(grids) if grid is not None]


def _calls(place: Place, micro: MicroBatch) -> int:
    if place.rows == "tokens":
        return len(micro.places)
    return sum(len(_kinds(at.sample)) for at in micro.places)


class _Watch:
    """Hooks that keep what passes."""

    def __init__(self, samples: int, keep_calls: bool) -> None:
        self.places: list[Place] = []
        self.values: dict[str, list[Tensor]] = defaultdict(list)
        self.gradients: dict[str, dict[int, Tensor]] = defaultdict(dict)
        self.calls: dict[str, list[Call]] = defaultdict(list)
        self._keep_calls = keep_calls

    @contextmanager
    def on(self, model: nn.Module, places: list[Place]) -> Any:
        self.places = places
        watched = dict.fromkeys(place.module for place in places)
        parents = {name.rpartition(".")[0] for name in watched}
        with ExitStack() as stack:
            for place in places:
                hook = model.get_submodule(place.module).register_forward_hook(
                    self._keeper(place), with_kwargs=True
                )
                stack.callback(hook.remove)
            for name in {*watched, *parents} if self._keep_calls else ():
                hook = model.get_submodule(name).register_forward_hook(
                    self._caller(name), with_kwargs=True
                )
                stack.callback(hook.remove)
            yield

    def _keeper(self, place: Place) -> Callable[..., None]:
        def keep(_: Any, args: Any, kwargs: Any, output: Any) -> None:
            value = (
                (args[0] if args else kwargs["hidden_states"])
                if place.side == "input"
                else (output)
            )
            tensor = place.pick(value)
            number = len(self.values[place.name])
            self.values[place.name].append(place.spread(tensor.detach(), value))
            if tensor.requires_grad:

                def keep_gradient(gradient: Tensor) -> None:
                    self.gradients[place.name][number] = place.spread(gradient, value).detach()

                tensor.register_hook(keep_gradient)

        return keep

    def _caller(self, name: str) -> Callable[..., None]:
        def keep(_: Any, args: Any, kwargs: Any, output: Any) -> None:
            self.calls[name].append((args, kwargs, output))

        return keep


@torch.no_grad()
def replay(model: nn.Module, recording: Recording, place: Place, **changed: Tensor) -> Tensor:
    """What `place` would hold if its module's parameters were `changed`, given the same inputs.

    Args:
        changed: by the parameter's name within the module.
    """
    module = model.get_submodule(place.module)
    like = next(iter(module.parameters())).dtype
    parameters = {name: value.to(like) for name, value in changed.items()}
    count = _calls(place, recording.micro)
    outputs = []
    for args, kwargs, _ in recording.calls[place.module][:count]:
        output = torch.func.functional_call(module, parameters, args, kwargs)
        outputs.append(place.spread(place.pick(output), output))
    return recording.assemble(place, outputs)
