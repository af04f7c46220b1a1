"""Megatron's combined 1F1B: one micro-batch's exchange of tokens beside another's computation.

``--overlap-moe-expert-parallel-comm`` runs the parts of a layer as nodes on two CUDA streams. Each
node has an autograd graph of its own, whose inputs are detached. Megatron's plan calls neither our
layer nor our model, so this module adds to its nodes what they do around Megatron's own code:

* The pre-process node embeds, encodes and fuses. It also keeps the DeepStack features as a detached
  tensor, to which the layers' nodes add gradients until its own backward takes them.
* The last node of a layer adds the layer's features. In the last layer of a chunk it also appends
  the features that later stages need.
* The post-process node applies the final norm, which comes after the features. Megatron's plan
  applies it in the last layer, and not at all if that layer is dense.
* The first node passes the padding mask to the router, which Megatron's plan leaves out.
* Nodes that compute recompute cheap outputs as the whole layer would
  (:mod:`mcore_qwen3vl.model.recompute`). No such output outlives the node that makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.models.common.model_chunk_schedule_plan import (
    TransformerLayerSchedulePlan,
    TransformerModelChunkSchedulePlan,
)
from megatron.core.models.common.utils import PostProcessNode, PreProcessNode, weak_method
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.utils import NoopScheduleNode
from torch import Tensor

from mcore_qwen3vl.memory_labels import label_module
from mcore_qwen3vl.model.decoder.layer import DeepStackLayer

label_module(__file__, "model, other")

Part = Callable[..., Any]
"""A part of a layer: ``(node, *inputs) -> outputs``."""


class _PreProcess(PreProcessNode):
    """Computes the first layer's input, and the DeepStack features of this chunk and later ones."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.backward_func = weak_method(self._backward_of_both)
        self._features: Tensor | None = None
        self._received: Tensor | None = None
        self._done = False  # Megatron calls the backward pass, also where we have run it earlier

    def forward_impl(self) -> Tensor:
        state = self.chunk_state
        self._received = self.model.decoder.input_tensor  # None on the first stage
        state.decoder_input, features = state.embed()
        state.embed = None  # refers to the pixels
        hidden: Tensor = super().forward_impl()
        if not self.model.decoder.layers:
            # The schedules free a stage's output, which must not be its input itself.
            return self.model.append_carried(hidden.view_as(hidden), features)
        if features is not None:
            self._features = features
            state.features = features.detach().requires_grad_(features.requires_grad)
        return hidden

    def gradient_of_received(self, gradient: Tensor) -> Tensor:
        """Return the gradient of what the previous stage sent, which includes its features'.

        `gradient` is that of the first layer's input, (s_local, B, H).
        """
        if self._received is None:
            return gradient
        self.backward(gradient)
        received, self._received = self._received, None
        assert received.grad is not None
        return received.grad

    def backward(self, output_grad: Any) -> Any:
        """Run the backward pass, unless :meth:`gradient_of_received` has done so."""
        if self._done:
            return None
        self._done = True
        return super().backward(output_grad)

    def _backward_of_both(
        self, outputs: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        """Run the backward pass from the first layer's input, and from features with a gradient."""
        # The layers' nodes have added the features' gradients to the detached copy.
        features, self._features = self._features, None
        if features is not None and self.chunk_state.features.grad is not None:
            outputs = (*outputs, features)
            gradients = (*gradients, self.chunk_state.features.grad)
        self.default_backward_func(outputs, gradients)
        return gradients  # which the caller keeps from being freed too early


class _PostProcess(PostProcessNode):
    """Applies the final norm and the head."""

    def forward_impl(self, hidden_states: Tensor) -> Tensor:
        decoder = self.model.decoder
        if decoder.layers:  # Megatron's applies the norm to a chunk without layers
            hidden_states = decoder.final_layernorm(hidden_states)
        losses: Tensor = super().forward_impl(hidden_states)
        return losses


class _LayerPlan(TransformerLayerSchedulePlan):
    """The nodes of a :class:`DeepStackLayer`."""

    def _build_callable_nodes(self, *args: Any) -> None:
        super()._build_callable_nodes(*args)
        first, layer = self.pre_dispatch_computation, self.layer
        if layer.is_moe_layer:
            first.submodule = partial(_route_without_padding, layer, first.submodule)
        for node in (first, self.mlp):
            node.submodule = partial(_run_with_recompute, layer, node.submodule)
        dense = isinstance(self.moe_combine, NoopScheduleNode)
        last = self.mlp if dense else self.moe_combine
        last.submodule = partial(_run_and_add_features, layer, last.submodule)


def _route_without_padding(layer: DeepStackLayer, part: Part, node: Any, hidden: Tensor) -> Any:
    """Route without counting padding in the router's losses."""
    mask = node.chunk_state.padding_mask  # (B, s_local)
    if mask is None:
        return part(node, hidden)
    padding = mask.transpose(0, 1).bool()
    router = layer.mlp.router
    with router.register_forward_pre_hook(lambda _, inputs: (inputs[0], padding)):
        return part(node, hidden)


def _run_with_recompute(layer: DeepStackLayer, part: Part, node: Any, *inputs: Tensor) -> Any:
    """Run a part of the layer whose cheap outputs are recomputed in the backward pass."""
    with layer.recomputing():
        return part(node, *inputs)


def _run_and_add_features(layer: DeepStackLayer, part: Part, node: Any, *inputs: Tensor) -> Tensor:
    """Add the layer's features to its output, and append those of later stages to the chunk's."""
    state = node.chunk_state
    hidden = layer.add_features(part(node, *inputs), state.features, state.destination)
    if layer is state.model.decoder.layers[-1]:
        hidden = state.model.append_carried(hidden, state.features)
    return hidden


class SchedulePlan(TransformerModelChunkSchedulePlan):
    """The nodes of one micro-batch in one pipeline chunk.

    For the arguments see ``Qwen3VLModel._prepare_forward``. `embed` is called once, on the stream
    that computes.
    """

    LAYER_SCHEDULE_PLAN_CLASS = _LayerPlan
    PRE_PROCESS_NODE_CLASS = _PreProcess
    POST_PROCESS_NODE_CLASS = _PostProcess

    def __init__(
        self,
        model: GPTModel,
        embed: Callable[[], tuple[Tensor | None, Tensor | None]],
        destination: Tensor,
        **arguments: Any,
    ) -> None:
        super().__init__(model, **arguments)
        self.state.embed = embed
        self.state.destination = destination
        self.state.features = None

    @staticmethod
    def run(
        f_schedule_plan: SchedulePlan | None,
        b_schedule_plan: SchedulePlan | None,
        b_grad: Tensor | None = None,
        *,
        post_backward: Callable[..., Any] | None = None,
        **others: Any,
    ) -> Tensor | None:
        """Run one micro-batch's forward beside another's backward pass; see Megatron's."""
        # Megatron's hands it the gradient of the first layer's input, to be sent.
        if b_schedule_plan is not None and post_backward is not None:
            first, send = b_schedule_plan.pre_process, post_backward

            def post_backward(gradient: Tensor, vp_stage: int | None) -> Any:
                return send(first.gradient_of_received(gradient), vp_stage)

        output: Tensor | None = TransformerModelChunkSchedulePlan.run(
            f_schedule_plan, b_schedule_plan, b_grad, post_backward=post_backward, **others
        )
        return output

    def _extra_args_for_layer(self, *args: Any) -> dict[str, Any]:
        # Megatron's last layer would apply the final norm before features are added.
        return {**super()._extra_args_for_layer(*args), "is_last_layer": False}
