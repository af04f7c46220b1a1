"""The blocks of the vision tower: Hugging Face's modules, with fewer kernels and less memory.

A block keeps its parameters and their names. Where our kernels run, a norm adds the residual before
it, and its backward pass the residual's gradient; queries and keys are rotated in the output of
their linear; and the backward pass of the second linear computes GELU again beside its gradient.
Elsewhere the block computes as Hugging Face's does.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLVisionAttention,
    Qwen3VLVisionBlock,
    Qwen3VLVisionMLP,
)

from mcore_qwen3vl.kernels import fits, gelu, norm, qkv_rotary
from mcore_qwen3vl.memory_labels import label_module
from mcore_qwen3vl.model.decoder.attention import rotate, rotate_fused
from mcore_qwen3vl.model.recompute import recomputing, remember, remember_outputs_of
from mcore_qwen3vl.model.weight_gradient import linear, weight_gradient

label_module(__file__, "vision tower")


def adapt_block(block: nn.Module, *, lean: bool, fused_rotary: bool = False) -> None:
    """Change a ``Qwen3VLVisionBlock`` in place.

    Args:
        lean: whether to recompute the outputs of norms and activation functions in the backward
            pass. This saves six of the vectors of hidden size that a block would keep for each
            patch.
        fused_rotary: whether to rotate queries and keys with Transformer Engine's kernel, where
            ours do not run.
    """
    classes: dict[str, type[nn.Module]] = {
        "": Block,
        "norm1": Norm,
        "norm2": Norm,
        "attn": FrameAttention,
        "attn.qkv": Linear,
        "attn.proj": Linear,
        "mlp": MLP,
        "mlp.linear_fc1": _FirstLinear,
        "mlp.linear_fc2": _SecondLinear,
    }
    for name, kind in classes.items():
        block.get_submodule(name).__class__ = kind
    block.lean, block.attn.fused = lean, fused_rotary  # type: ignore[assignment, union-attr]
    if lean:
        remember_outputs_of(block.get_submodule("mlp.act_fn"))


class Block(Qwen3VLVisionBlock):
    """HF's block; see :func:`adapt_block`."""

    lean = False

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Apply the block: (P, hidden) -> (P, hidden); for the rest see :class:`FrameAttention`."""
        with recomputing() if self.lean else nullcontext():
            if not norm.fits(hidden_states):
                output: Tensor = super().forward(hidden_states, **kwargs)
                return output
            normed, residual = self.norm1(hidden_states, None)
            attended = self.attn(normed, **kwargs)
            normed, residual = self.norm2(residual, attended)
            output = residual + self.mlp(normed)
            return output


class Norm(nn.LayerNorm):
    """A layer norm, whose output a lean block recomputes in the backward pass."""

    def forward(self, x: Tensor, *residual: Tensor | None) -> Any:
        """Normalise `x` (P, hidden).

        Args:
            residual: one tensor (P, hidden) that is added to `x` first, or None. Then the sum is
                returned too, to be used in place of `x`: the kernel adds the sum's gradient to that
                of the norm.
        """
        if not residual:
            kept = x.detach()
            return remember(super().forward(x), lambda: super(Norm, self).forward(kept))
        normed, total = _AddNorm.apply(x, *residual, self.weight, self.bias, self.eps)
        kept = total.detach()

        def recompute() -> Tensor:
            return norm.normalise(kept, self.weight, self.bias, self.eps)[0]

        return remember(normed, recompute), total


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        normed, statistics, total = norm.normalise(x, weight, bias, eps, added=added)
        total = x if total is None else total
        ctx.save_for_backward(total, weight, statistics)
        return normed, total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, of_total: Tensor) -> tuple[Tensor | None, ...]:
        _, adds, *parameters, _ = ctx.needs_input_grad
        of_total, *of_parameters = norm.norm_gradients(
            gradient, *ctx.saved_tensors, of_x=of_total, of_parameters=any(parameters)
        )
        return of_total, of_total if adds else None, *of_parameters, None


class FrameAttention(Qwen3VLVisionAttention):
    """HF's attention, with one rotary embedding for queries and keys that keeps no inputs."""

    fused = False
    """Whether to rotate with Transformer Engine's kernel."""

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        cu_seqlens: Tensor,
        frame_patches: tuple[int, ...],
        **_: Any,
    ) -> Tensor:
        """Attend within each frame: (P, hidden) -> (P, hidden).

        Args:
            position_embeddings: cosines and sines, (P, head_dim) float32.
            cu_seqlens: (F + 1,) int32 boundaries of the frames.
            frame_patches: number of patches in each of F frames.
        """
        qkv = self.qkv(hidden_states).view(len(hidden_states), 3, self.num_heads, -1)
        query, key, value = self._rotate(qkv, *position_embeddings)
        return self.proj(attend(query, key, value, cu_seqlens, frame_patches).flatten(1))

    def _rotate(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """Return rotated queries, rotated keys, and values, (P, heads, head_dim) each."""
        half = cos.shape[-1] // 2
        if qkv_rotary.fits(qkv):
            parts: tuple[Tensor, ...] = _RotateInPlace.apply(qkv, cos[:, :half], sin[:, :half])
            return parts
        pair, value = qkv.split((2, 1), dim=1)
        if self.fused:
            if not hasattr(cos, "angles"):  # once for all blocks
                cos.angles = torch.atan2(sin, cos)[:, None, None]  # type: ignore[attr-defined]
            turned = rotate_fused(pair, cos.angles)  # type: ignore[attr-defined]
        else:  # in float32, as HF does
            turned = rotate(pair, cos[:, None, None, :half], sin[:, None, None, :half])
        # A copy, because a view of `qkv` would keep all of it for the backward pass.
        return *turned.unbind(1), value.squeeze(1).contiguous()


class _RotateInPlace(torch.autograd.Function):
    """Rotates queries and keys in the output of their linear, which nothing else reads."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        turned = qkv.detach()
        qkv_rotary.rotate_in_place(turned, cos, sin)
        ctx.save_for_backward(cos, sin)
        return turned.unbind(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return qkv_rotary.rotary_gradient(*gradients, *ctx.saved_tensors), None, None


def attend(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, frame_patches: tuple[int, ...]
) -> Tensor:
    """Compute full attention within each frame: (P, heads, head_dim) each, scaled as usual.

    Uses the variable-length kernel where it exists (CUDA, half precision), otherwise SDPA frame by
    frame, with lengths that are known on the host. The frames are those of :class:`FrameAttention`.
    """
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        longest = max(frame_patches)
        attended = varlen_attn(query, key, value, cu_seqlens, cu_seqlens, longest, longest)
        assert isinstance(attended, Tensor)  # no auxiliary output was asked for
        return attended
    tensors = (t.transpose(0, 1).split(frame_patches, dim=1) for t in (query, key, value))
    parts = [F.scaled_dot_product_attention(*frame) for frame in zip(*tensors, strict=True)]
    return torch.cat(parts, dim=1).transpose(0, 1)


class MLP(Qwen3VLVisionMLP):
    """HF's MLP, whose activation the second linear's backward pass computes again."""

    def forward(self, hidden_state: Tensor) -> Tensor:
        """Apply the MLP: (P, hidden) -> (P, hidden)."""
        if not fits(hidden_state):
            output: Tensor = super().forward(hidden_state)
            return output
        inner = self.linear_fc1(hidden_state, bias_has_gradient=False)
        result, _ = self.linear_fc2(inner, self.linear_fc1.bias)
        output = result[0] if isinstance(result, tuple) else result
        return output


class Linear(nn.Linear):
    """A linear whose weight's gradient is added to Megatron's buffer by its product."""

    def forward(self, inputs: Tensor) -> Tensor:
        return linear(inputs, self.weight, self.bias)


class _FirstLinear(nn.Linear):
    """The MLP's first linear, whose bias gets its gradient here or from :class:`_GeluLinear`."""

    def forward(self, inputs: Tensor, *, bias_has_gradient: bool = True) -> Tensor:
        bias = self.bias if bias_has_gradient else self.bias.detach()
        return linear(inputs, self.weight, bias)


class _SecondLinear(nn.Linear):
    """The MLP's second linear, with GELU before it if the first one's bias is given."""

    def forward(self, inputs: Tensor, *bias_before: Tensor) -> Any:
        """Apply it to (P, intermediate); with GELU, return ``((output, activated), None)``.

        That is the form in which an adapter's hook finds the linear's input beside its output.
        """
        if not bias_before:
            return linear(inputs, self.weight, self.bias)
        return _GeluLinear.apply(inputs, *bias_before, self.weight, self.bias), None


class _GeluLinear(torch.autograd.Function):
    """Computes ``linear(gelu(inner))`` and ``gelu(inner)``, keeping `inner` only.

    Gives the gradient of the bias that `inner` has in it already.
    """

    @staticmethod
    def forward(
        ctx: Any, inner: Tensor, bias_before: Tensor, weight: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        activated = F.gelu(inner, approximate="tanh")
        ctx.save_for_backward(inner, weight)
        ctx.parameter = weight
        ctx.set_materialize_grads(False)
        return F.linear(activated, weight, bias), activated

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor, of_activated: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        inner, weight = ctx.saved_tensors
        arriving = gradient @ weight
        if of_activated is not None:
            arriving += of_activated
        of_inner, of_bias_before, activated = gelu.gelu_gradient(arriving, inner)
        _, before, of_weight, of_bias = ctx.needs_input_grad
        return (
            of_inner,
            of_bias_before if before else None,
            weight_gradient(ctx.parameter, gradient, activated) if of_weight else None,
            gradient.sum(0) if of_bias else None,
        )
