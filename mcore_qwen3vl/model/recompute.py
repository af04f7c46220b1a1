"""Recompute cheap activations in the backward pass instead of keeping them.

A linear layer or attention often keeps, for its gradients, the output of a cheap operation: a norm,
SwiGLU or the rotary embedding. The input of that operation is kept anyway. Within
:func:`recomputing` such an output is registered with a recipe, and autograd keeps the recipe in its
place. The kernel and its input are the same both times, and so are the bits, if the kernel is
deterministic.

mcore's own recomputation of norms and activations ("layernorm" and "moe_act" of
``recompute_modules``) covers only grouped experts and norms that are not fused into a linear layer.
In a dense layer there are none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from mcore_qwen3vl.memory_labels import label_module

label_module(__file__, None)

Recipe = Callable[[], Tensor]
"""A function that recomputes a tensor: the same values, shape and strides."""


class _Scope(dict[int, tuple[torch.UntypedStorage, Recipe]]):
    """The recipes of outputs, by the address of their storage.

    Keeps each output's storage alive so that its address, our key, is not reused. It does not keep
    the tensor, which Transformer Engine empties if the weight needs no gradient.
    """

    def add(self, output: Tensor, recipe: Recipe) -> None:
        storage = output.untyped_storage()
        if storage.nbytes():  # all empty tensors have the same address
            self[storage.data_ptr()] = storage, recipe

    def recipe_of(self, output: Tensor) -> Recipe | None:
        known = self.get(output.untyped_storage().data_ptr())
        return None if known is None else known[1]

    def pack(self, saved: Tensor) -> Tensor | Recipe:
        """Return what autograd keeps in place of `saved`: its recipe, or itself if it has none."""
        # Subclasses hold quantized values; the recipe computes others.
        recipe = self.recipe_of(saved) if type(saved) is Tensor else None
        if recipe is None:
            return saved
        view = saved.size(), saved.stride(), saved.storage_offset()
        return lambda: recipe().as_strided(*view)


class _Scopes(threading.local):
    innermost: _Scope | None = None


_scopes = _Scopes()  # thread-local, because recomputation runs in a thread of autograd's


@contextmanager
def recomputing() -> Iterator[None]:
    """Recompute, in the backward pass, the outputs given to :func:`remember` inside this context.

    Autograd keeps their recipes instead of the outputs.
    """
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
        scope.clear()  # packed values refer to the hook, which refers to the scope


@torch.no_grad()
def _unpack(kept: Tensor | Recipe) -> Tensor:
    """Return the tensor for which :meth:`_Scope.pack` has kept this."""
    return kept if isinstance(kept, Tensor) else kept()


def remember(output: Tensor, recipe: Recipe) -> Tensor:
    """Register the recipe of `output`, a whole tensor, and of its views; return `output`.

    The recipe runs without gradients. What it refers to is kept until the backward has run.
    """
    scope = _scopes.innermost
    if scope is not None and torch.is_grad_enabled() and type(output) is Tensor:
        scope.add(output, recipe)
    return output


def recipe_of(output: Tensor) -> Recipe | None:
    """Return the recipe of `output`, or None if none is registered in this scope."""
    return None if _scopes.innermost is None else _scopes.innermost.recipe_of(output)


def compute_keeping_inputs(compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return ``compute(*inputs)``, keeping only the inputs for its backward pass, in any layer.

    For cheap, deterministic functions that work in float32: run as they are written, they would
    keep wide copies. The backward pass runs `compute` again. The output gets it as a recipe too.
    A view among the inputs keeps all of the tensor that it is part of.
    """
    if not torch.is_grad_enabled():
        return compute(*inputs)
    output: Tensor = checkpoint(compute, *inputs, use_reentrant=False, preserve_rng_state=False)
    values = [x.detach() for x in inputs]
    return remember(output, lambda: compute(*values))


def remember_outputs_of(module: nn.Module) -> None:
    """Register a recipe for each output of a deterministic module from one tensor to one tensor.

    If it returns its input too, as some norms do, that comes second. A call without a tensor, for
    the module's weights, is left alone.
    """
    module.register_forward_pre_hook(_copy_view)
    module.register_forward_hook(_remember_output)


def _copy_view(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Copy an input that is part of a larger tensor, because keeping it would keep all of that."""
    return tuple(x.contiguous() for x in inputs)


def _remember_output(
    module: Any, inputs: tuple[Tensor, ...], output: Tensor | tuple[Tensor, Tensor]
) -> None:
    if not inputs:
        return
    x = inputs[0].detach()
    output = output[0] if isinstance(output, tuple) else output
    # Calls `forward` and not the module, because Megatron's hooks are for the forward pass alone.
    # Without gradients it returns the output alone.
    remember(output, lambda: module.forward(x))


def remember_fused_norms() -> None:
    """Register recipes for the norm's output inside Transformer Engine's ``LayerNormLinear``.

    That output is not visible outside and is kept for the weight's gradient, so this replaces the
    function with which the forward normalises. In FP8 the output is quantized, and still kept.
    """
    from transformer_engine.pytorch.module import layernorm_linear

    normalise = layernorm_linear.apply_normalization
    if hasattr(normalise, "remembers"):
        return

    def apply_normalization(x: Tensor, output: None, *arguments: Any) -> tuple[Any, ...]:
        normed, *rest = normalise(x, output, *arguments)
        scope, inputs = _scopes.innermost, x.detach()
        if scope is not None and type(normed) is Tensor:  # inside autograd's forward
            scope.add(normed, lambda: normalise(inputs, None, *arguments)[0])
        return normed, *rest

    apply_normalization.remembers = True  # type: ignore[attr-defined]
    layernorm_linear.apply_normalization = apply_normalization
