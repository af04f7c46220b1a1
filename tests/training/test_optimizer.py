"""The replacements for Apex's kernels equal plain torch."""

from __future__ import annotations

import pytest
import torch
from megatron.core.optimizer import clip_grads
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale
from torch import Tensor

from mcore_qwen3vl.training import optimizer

FLAG = torch.zeros(1, dtype=torch.int)


def tensors() -> list[Tensor]:
    torch.manual_seed(3)
    return [torch.randn(shape) for shape in [(3, 5), (7,), (2, 3, 4)]]


def test_the_norm_is_that_of_all_values() -> None:
    given = tensors()
    found, _ = optimizer.multi_tensor_l2_norm(0, FLAG, [given], False)
    assert found.shape == (1,)
    whole = torch.cat([tensor.flatten() for tensor in given])
    torch.testing.assert_close(found[0], whole.norm())


@pytest.mark.parametrize("factor", [0.3, torch.tensor([0.3])], ids=["float", "tensor"])
@pytest.mark.parametrize("in_place", [True, False])
def test_scaling(factor: float | Tensor, in_place: bool) -> None:
    given = tensors()
    target = given if in_place else [torch.zeros_like(tensor) for tensor in given]
    optimizer.multi_tensor_scale(0, FLAG, [given, target], factor)
    for found, before, source in zip(target, tensors(), given, strict=True):
        torch.testing.assert_close(found, before * 0.3)
        torch.testing.assert_close(source, before * 0.3 if in_place else before)


def test_clipping_uses_them_where_megatron_has_only_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clip_grads, "l2_norm_impl", local_multi_tensor_l2_norm)
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_impl", local_multi_tensor_scale)
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_tensor_impl", None)
    optimizer.use_multi_tensor()
    assert clip_grads.l2_norm_impl is optimizer.multi_tensor_l2_norm
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *args, **kwargs: None)  # one rank
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    norm = clip_grads.get_grad_norm_fp32([parameter.grad])
    assert float(norm) == 5
    clip_grads.clip_grad_by_total_norm_fp32([parameter], 1.0, norm)
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]))


def test_kernels_of_transformer_engine_and_apex_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs() -> None: ...

    monkeypatch.setattr(clip_grads, "l2_norm_impl", theirs)
    optimizer.use_multi_tensor()
    assert clip_grads.l2_norm_impl is theirs


def test_adam_on_the_cpu_is_fused_and_the_same() -> None:
    class Part:
        def __init__(self, adam: torch.optim.Optimizer) -> None:
            self.optimizer = adam

    results = []
    for fused in (False, True):
        parameters = [torch.nn.Parameter(tensor) for tensor in tensors()]
        adam = torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.2)
        if fused:
            optimizer.use_fused_adam(Part(adam))
            assert [group["fused"] for group in adam.param_groups] == [True]
        for step in range(3):
            for parameter in parameters:
                parameter.grad = parameter.detach().sin() + step
            adam.step()
        results.append([parameter.detach() for parameter in parameters])
    torch.testing.assert_close(results[1], results[0])


def test_weights_are_copied_again_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, frozen = torch.zeros(6, dtype=torch.bfloat16), torch.zeros(2)
    mains = [torch.nn.Parameter(torch.full((size,), 1.0)) for size in (4, 2, 2)]
    targets = [weights[:4], weights[4:], frozen]

    def copy() -> None:
        for target, main in zip(targets, mains, strict=True):
            target.data.copy_(main)

    calls: list[int] = []
    together = torch._foreach_copy_

    def counted(targets: list[Tensor], sources: list[Tensor]) -> None:
        calls.append(len(targets))
        together(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    copies = optimizer.RepeatedCopies(copy)
    with torch.no_grad():
        for value in (1.0, 2.0, 3.0):
            for main in mains:
                main.fill_(value)
            copies()
            assert torch.cat([weights.float(), frozen]).tolist() == [value] * 8
    assert calls == [2, 1] * 2  # by dtype, from the second call on
