"""Activations that the backward pass makes again instead of keeping them.

What a linear layer or attention keeps for its gradients is often the output of something cheap, a
norm, SwiGLU or the rotary embedding, whose own input is kept anyway. Within :func:`remaking` such
an output is told how to be made, and whoever keeps it for the backward keeps that instead. The
kernel and its input are the same both times, and so are the bits, if the kernel is deterministic.

mcore's own recomputation of norms and activations ("layernorm" and "moe_act" of
``recompute_modules``) does so for norms that no linear layer has fused and for grouped experts
only, which leaves nothing in a dense layer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

Recipe = Callable[[], Tensor]
"""Makes a tensor again: the same values, shape and strides."""


class _Scope:
    """Outputs with their recipes, by address.

    Their memory is held, so that no other tensor takes it: not by the tensor, which Transformer
    Engine empties where it needs no gradient of the weight.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[torch.UntypedStorage, Recipe]] = {}

    def add(self, output: Tensor, recipe: Recipe) -> None:
        storage = output.untyped_storage()
        if storage.nbytes():  # all empty tensors have the same address
            self._known[storage.data_ptr()] = storage, recipe

    def recipe(self, output: Tensor) -> Recipe | None:
        known = self._known.get(output.untyped_storage().data_ptr())
        return None if known is None else known[1]

    def forget(self) -> None:
        self._known.clear()

    def pack(self, saved: Tensor) -> Tensor | Recipe:
        # Subclasses are quantized: not the values that the recipe makes.
        recipe = self.recipe(saved) if type(saved) is Tensor else None
        if recipe is None:
            return saved
        view = saved.size(), saved.stride(), saved.storage_offset()
        return lambda: recipe().as_strided(*view)


class _Scopes(threading.local):
    innermost: _Scope | None = None


_scopes = _Scopes()  # recomputation runs in a thread of autograd's


@contextmanager
def remaking() -> Iterator[None]:
    """Inside, outputs that :func:`remember` knows are not kept for the backward pass."""
    if not torch.is_grad_enabled():
        yield
        return
    outer, scope = _scopes.innermost, _Scope()
    _scopes.innermost = scope
    try:
        with saved_tensors_hooks(scope.pack, _unpack):
            yield
    finally:
        _scopes.innermost = outer
        scope.forget()  # what was packed refers to the hook, which refers to the scope


@torch.no_grad()
def _unpack(kept: Tensor | Recipe) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept()


def remember(output: Tensor, recipe: Recipe) -> Tensor:
    """Say how `output` is made; it holds for all of its storage.

    Args:
        output: a whole tensor, not a part of one.
        recipe: run without gradients; what it refers to is kept until the backward has run.

    Returns:
        `output`.
    """
    scope = _scopes.innermost
    if scope is not None and torch.is_grad_enabled() and type(output) is Tensor:
        scope.add(output, recipe)
    return output


def recipe_of(output: Tensor) -> Recipe | None:
    """How `output` is made, if that is known here."""
    return None if _scopes.innermost is None else _scopes.innermost.recipe(output)


def remember_outputs_of(module: nn.Module) -> None:
    """Let a module without randomness, of one tensor, tell how each of its outputs is made."""
    module.register_forward_pre_hook(_whole)
    module.register_forward_hook(_remember)


def _whole(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """A part of a larger tensor would hold all of it."""
    return (inputs[0].contiguous(),)


def _remember(module: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    x = inputs[0].detach()
    # Not by calling the module: Megatron's hooks are for the forward pass.
    remember(output, lambda: module.forward(x))


def remember_fused_norms() -> None:
    """Let the norm inside of Transformer Engine's ``LayerNormLinear`` tell how it was made.

    Replaces the function by which its forward normalises: the output is known to nobody outside,
    and is kept for the gradient of the weight. In FP8 it is quantized, and is kept.
    """
    from transformer_engine.pytorch.module import layernorm_linear

    normalise = layernorm_linear.apply_normalization
    if hasattr(normalise, "remembers"):
        return

    def apply_normalization(x: Tensor, output: None, *arguments: Any) -> tuple[Any, ...]:
        made = normalise(x, output, *arguments)
        scope, inputs = _scopes.innermost, x.detach()
        if scope is not None and type(made[0]) is Tensor:  # within autograd's own forward
            scope.add(made[0], lambda: normalise(inputs, None, *arguments)[0])
        return tuple(made)

    apply_normalization.remembers = True  # type: ignore[attr-defined]
    layernorm_linear.apply_normalization = apply_normalization
