"""cuDNN's fused attention, ``fused_attn_fwd`` and ``fused_attn_bwd``: sbhd, bshd and thd.

The backward pass uses the given output and log-sum-exp, and recomputes neither: under context
parallelism they cover all keys, of which one call sees a part. It computes in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformer_engine_torch as tex
from torch import Tensor

_PADDED = (
    tex.NVTE_Mask_Type.NVTE_PADDING_MASK,
    tex.NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK,
    tex.NVTE_Mask_Type.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK,
)
_UNMASKED = (tex.NVTE_Mask_Type.NVTE_NO_MASK, tex.NVTE_Mask_Type.NVTE_PADDING_MASK)


@dataclass(frozen=True)
class _Sample:
    """Where one sample lies: index tuples into q and k, and into the log-sum-exp."""

    queries: tuple[Any, ...]
    keys: tuple[Any, ...]
    stats: tuple[Any, ...]


@dataclass(frozen=True)
class _Call:
    """The arguments that forward and backward share."""

    layout: Any
    mask: Any
    scale: float
    bottom_right: bool
    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    cu_seqlens_q_padded: Tensor | None
    cu_seqlens_kv_padded: Tensor | None

    @property
    def form(self) -> str:
        """``sbhd``, ``bshd`` or ``thd``; whether q, k and v share memory does not matter here."""
        name = self.layout.name.removeprefix("NVTE_")
        return "thd" if name.startswith("T") else "sbhd" if name.startswith("SB") else "bshd"

    def samples(self, q: Tensor, k: Tensor) -> Iterator[_Sample]:
        lengths_q = self.cu_seqlens_q.diff().tolist()
        lengths_k = self.cu_seqlens_kv.diff().tolist()
        if self.form == "thd":
            starts_q = _given(self.cu_seqlens_q_padded, self.cu_seqlens_q).tolist()
            starts_k = _given(self.cu_seqlens_kv_padded, self.cu_seqlens_kv).tolist()
            for i, (n, m) in enumerate(zip(lengths_q, lengths_k, strict=True)):
                rows = slice(starts_q[i], starts_q[i] + n)
                keys = slice(starts_k[i], starts_k[i] + m)
                assert rows.stop <= len(q)
                assert keys.stop <= len(k)
                yield _Sample((rows,), (keys,), (rows, slice(None), 0))
            return
        tokens = 0 if self.form == "sbhd" else 1
        for i in range(q.shape[1 - tokens]):
            n, m = (
                (lengths_q[i], lengths_k[i])
                if self.mask in _PADDED
                else (q.shape[tokens], k.shape[tokens])
            )
            at = (lambda n, i=i: (slice(n), i)) if tokens == 0 else (lambda n, i=i: (i, slice(n)))
            yield _Sample(at(n), at(m), (i, slice(None), slice(n), 0))

    def stats(self, q: Tensor, longest: int) -> Tensor:
        """Make room for the log-sum-exp, filled with NaN: what no sample covers is undefined."""
        heads = q.shape[-2]
        shape = (
            (len(q), heads, 1)
            if self.form == "thd"
            else (q.shape[1 if self.form == "sbhd" else 0], heads, longest, 1)
        )
        return torch.full(shape, torch.nan, dtype=torch.float32)

    def of_stats(self, stats: Tensor, sample: _Sample) -> Tensor:
        """Return the log-sum-exp of one sample, (heads, queries)."""
        part = stats[sample.stats]
        return part.T if self.form == "thd" else part

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Return (heads, queries, keys) scores, minus infinity where a query may not look."""
        scores = torch.einsum("qhd,khd->hqk", q, _repeated(k, q)) * self.scale
        if self.mask in _UNMASKED:
            return scores
        queries, keys = scores.shape[1:]
        last = torch.arange(queries) + (keys - queries if self.bottom_right else 0)
        return scores.masked_fill(torch.arange(keys) > last[:, None], -torch.inf)


def _given(padded: Tensor | None, plain: Tensor) -> Tensor:
    return plain if padded is None else padded


def _repeated(groups: Tensor, heads: Tensor) -> Tensor:
    return groups.repeat_interleave(heads.shape[-2] // groups.shape[-2], dim=-2)


def _check(bias: Any, softmax: Any, window: Any, dropout: float, *nothing: Any) -> None:
    assert bias == tex.NVTE_Bias_Type.NVTE_NO_BIAS
    assert softmax == tex.NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX
    assert tuple(window) in ((-1, -1), (-1, 0))
    assert dropout == 0.0
    assert all(one is None for one in nothing)


def fused_attn_fwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    is_training: bool,
    scale: float,
    dropout: float,
    set_zero: bool,
    layout: Any,
    out_format: Any,
    scale_inv_format: Any,
    bias_type: Any,
    mask: Any,
    softmax_type: Any,
    window: Any,
    bottom_right: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dtype: torch.dtype,
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    page_table_k: Tensor | None,
    page_table_v: Tensor | None,
    s_quantizer: Any,
    o_quantizer: Any,
    bias: Tensor | None,
    softmax_offset: Tensor | None,
    generator: Any,
    rng_elements: int,
    return_max_logit: bool,
    cuda_graph: bool,
) -> list[Tensor]:
    """Return the output, shaped like `q`, the log-sum-exp and an unused random state.

    The log-sum-exp is (tokens, heads, 1) if packed, otherwise (samples, heads, queries, 1).
    """
    _check(bias_type, softmax_type, window, dropout, page_table_k, page_table_v, s_quantizer, bias)
    call = _Call(
        layout,
        mask,
        scale,
        bottom_right,
        cu_seqlens_q,
        cu_seqlens_kv,
        cu_seqlens_q_padded,
        cu_seqlens_kv_padded,
    )
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    stats = call.stats(q, max_seqlen_q)
    for sample in call.samples(q, k):
        queries, keys, values = (
            x.float() for x in (q[sample.queries], k[sample.keys], v[sample.keys])
        )
        assert len(queries) <= max_seqlen_q
        assert len(keys) <= max_seqlen_kv
        scores = call.scores(queries, keys)
        call.of_stats(stats, sample).copy_(scores.logsumexp(-1))
        out[sample.queries] = torch.einsum(
            "hqk,khd->qhd", scores.softmax(-1), _repeated(values, queries)
        )
    return [out, stats, torch.zeros(2, dtype=torch.int64)]


def fused_attn_bwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    scale: float,
    dropout: float,
    set_zero: bool,
    layout: Any,
    out_format: Any,
    grad_format: Any,
    grads_layout: Any,
    scale_inv_format: Any,
    grad_scale_inv_format: Any,
    bias_type: Any,
    mask: Any,
    softmax_type: Any,
    window: Any,
    bottom_right: bool,
    deterministic: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    grad: Tensor,
    dtype: torch.dtype,
    context: list[Tensor],
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    s_quantizer: Any,
    dp_quantizer: Any,
    dqkv_quantizer: Any,
    cuda_graph: bool,
) -> list[Tensor | None]:
    """Return the gradients of q, k and v, and None for two inputs that are not used."""
    _check(bias_type, softmax_type, window, dropout, s_quantizer, dp_quantizer, dqkv_quantizer)
    call = _Call(
        layout,
        mask,
        scale,
        bottom_right,
        cu_seqlens_q,
        cu_seqlens_kv,
        cu_seqlens_q_padded,
        cu_seqlens_kv_padded,
    )
    grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    for sample in call.samples(q, k):
        at_q, at_k = sample.queries, sample.keys
        queries, keys, values = (x.float() for x in (q[at_q], k[at_k], v[at_k]))
        given = grad[at_q].float()
        lse = call.of_stats(context[0], sample)
        weights = (call.scores(queries, keys) - lse[..., None]).exp()  # (heads, queries, keys)
        to_values = torch.einsum("hqk,qhd->khd", weights, given)
        to_weights = torch.einsum("qhd,khd->hqk", given, _repeated(values, queries))
        constant = (given * out[at_q].float()).sum(-1).T  # (heads, queries)
        to_scores = weights * (to_weights - constant[..., None]) * scale
        to_keys = torch.einsum("hqk,qhd->khd", to_scores, queries)
        grads[0][at_q] = torch.einsum("hqk,khd->qhd", to_scores, _repeated(keys, queries))
        grads[1][at_k] = to_keys.unflatten(1, (keys.shape[1], -1)).sum(2)
        grads[2][at_k] = to_values.unflatten(1, (keys.shape[1], -1)).sum(2)
    return [*grads, None, None]
