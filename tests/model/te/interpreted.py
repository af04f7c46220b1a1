"""``TRITON_INTERPRET=1 python -m tests.model.te.interpreted``: TE's Triton kernels checked.

Triton's interpreter runs them on the CPU, and their results are compared with the references'.
It is a separate program because Triton reads the variable when it is first imported.
Prints the largest differences as JSON.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from mcore_qwen3vl.runtime import cpu
from tests.model.te import extension


def main() -> None:
    extension.install()
    cpu.install()
    from transformer_engine.pytorch.triton import permutation as own

    from tests.model.te.kernels import permutation as reference

    for kernel in vars(own).values():
        if hasattr(kernel, "configs"):
            kernel.configs = kernel.configs[:1]  # there is nothing to tune without a GPU
    torch.manual_seed(0)
    print(json.dumps({**_to_experts(own, reference), **_chunks(own, reference)}))


def _difference(own: Any, reference: Any) -> float:
    pairs = [(a, b) for a, b in zip(own, reference, strict=True) if a is not None or b is not None]
    return max(float((a - b).abs().max()) for a, b in pairs)


def _to_experts(own: Any, reference: Any) -> dict[str, float]:
    tokens, experts, hidden, top = 13, 12, 48, 3
    routing = torch.zeros(tokens, experts, dtype=torch.bool)
    for token in range(tokens):
        routing[token, torch.randperm(experts)[:top]] = token != 4  # token 4 has no expert
    count = int(routing.sum())
    row_map = own.make_row_id_map(routing, tokens, experts)
    expected = reference.make_row_id_map(routing, tokens, experts)
    used = expected != reference.UNUSED
    x, probs = torch.randn(tokens, hidden), torch.rand(tokens, experts)
    rows, of_rows = torch.randn(count, hidden), torch.rand(count)
    sizes = (tokens, experts, hidden)
    arguments: dict[str, tuple[Any, ...]] = {
        "permute_with_mask_map": (
            x, row_map, probs, None, None, tokens, experts, count, hidden, None,
        ),
        "unpermute_with_mask_map": (rows, row_map, probs, of_rows, None, *sizes),
        "unpermute_with_mask_map_bwd_with_merging_probs": (
            x, row_map, rows, probs, None, tokens, experts, count, hidden,
        ),
    }  # fmt: skip
    return {
        "make_row_id_map": _difference([row_map[used]], [expected[used]]),
        **{
            name: _difference(getattr(own, name)(*given), getattr(reference, name)(*given))
            for name, given in arguments.items()
        },
    }


def _chunks(own: Any, reference: Any) -> dict[str, float]:
    sizes, order = torch.tensor([3, 0, 7, 5]), torch.tensor([2, 0, 3, 1])
    sort_map = own.make_chunk_sort_map(sizes, order, 15, 4)
    expected = reference.make_chunk_sort_map(sizes, order, 15, 4)
    given = (torch.randn(15, 48), sort_map, torch.rand(15), 15, 48)
    sorted_, back = (
        _difference(own.sort_chunks_by_map(*given, way), reference.sort_chunks_by_map(*given, way))
        for way in (True, False)
    )
    return {
        "make_chunk_sort_map": _difference([sort_map], [expected]),
        "sort_chunks_by_map": max(sorted_, back),
    }


if __name__ == "__main__":
    main()
