"""The trace names mistakes in the code, beyond those of a conversion."""

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model import fusion, qwen3vl
from mcore_qwen3vl.model.decoder import attention, norm
from mcore_qwen3vl.verify.parity.case import Case
from mcore_qwen3vl.verify.trace.tracing import trace
from tests.verify.trace.fault_injection import FaultInjector
from tests.verify.trace.patched import deepstack

patch = mock.patch.object
fuse, forward = fusion.fuse, attention.InterleavedMRoPE.forward


def attend(**changes: Any) -> AbstractContextManager[Any]:
    def changed(*args: Any, **kwargs: Any) -> torch.Tensor:
        return F.scaled_dot_product_attention(*args, **{**kwargs, **changes})

    return patch(attention, "F", SimpleNamespace(scaled_dot_product_attention=changed))


def from_0(self: Any, ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return forward(self, torch.arange(ids.shape[2]).expand_as(ids))


def no_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x


def with_epsilon(self: Any, x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, self.weight.shape, self.weight, 1e-5)


def swapped(embeddings: torch.Tensor, features: torch.Tensor, plan: Any) -> torch.Tensor:
    return fuse(embeddings, features.flip(0), plan)


unrotated = patch(attention, "apply_rotary", lambda x, *_, **__: x)
GRADIENTS, TP2 = {"gradients": True}, {"layout": Layout(tp=2, sp=True)}
SIGMOID = {"moe_router_score_function": "sigmoid"}
IN_CODE: tuple[tuple[str, str, AbstractContextManager[Any], dict[str, Any]], ...] = (
    ("causal mask", "o_proj:input", attend(is_causal=False), {}),
    ("rotary not applied", "layers.0.self_attn.o_proj:input", unrotated, {}),
    ("softmax scale", "o_proj:input", attend(scale=1.0), {}),
    ("position ids", "rotary_emb", patch(attention.InterleavedMRoPE, "forward", from_0), {}),
    ("missing norm", "input_layernorm", patch(norm.RMSNorm, "forward", no_norm), {}),
    ("norm epsilon", "input_layernorm", patch(norm.RMSNorm, "forward", with_epsilon), {}),
    ("features not fused", "inputs_embeds", patch(qwen3vl, "fuse", lambda text, *_: text), {}),
    ("feature order", "inputs_embeds", patch(qwen3vl, "fuse", swapped), {}),
    ("dtype", "inputs_embeds", patch(qwen3vl, "fuse", lambda *a: fuse(*a).bfloat16().float()), {}),
    ("DeepStack layer", "layers.0", deepstack(lambda features: features.flip(0)), {}),
    ("DeepStack order", "layers.0", deepstack(lambda features: features.flip(1)), {}),
    ("missing DeepStack", "layers.1", deepstack(torch.zeros_like, layer=2), TP2),
    ("no gradient", "deepstack_merger_list.2", deepstack(torch.Tensor.detach), GRADIENTS),
    ("router scores", "mlp.gate", nullcontext(), {"config": SIGMOID}),
    ("router scores", "mlp.gate", nullcontext(), {"config": {"moe_router_pre_softmax": True}}),
)


@pytest.mark.parametrize(("kind", "place", "mistake", "how"), IN_CODE)
def test_named(
    injector: FaultInjector, kind: str, place: str, mistake: Any, how: dict[str, Any]
) -> None:
    case = Case(config=how["config"]) if "config" in how else None
    options = {name: value for name, value in how.items() if name != "config"}
    with mistake:
        result = trace(injector.reference(moe=case is not None), case=case, **options)
    assert (result.first.name.endswith(place), result.cause.kind) == (True, kind), result.verdict
    assert result.cause.confirmed
