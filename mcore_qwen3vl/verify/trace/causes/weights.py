"""A probe point differs because a weight does: which one, and what was done to it."""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_qwen3vl.converters.mapping.row import Row
from mcore_qwen3vl.converters.mapping.table import table
from mcore_qwen3vl.verify.trace.causes.arrangements import Verdict, arrangement
from mcore_qwen3vl.verify.trace.causes.divergence import Divergence
from mcore_qwen3vl.verify.trace.recording import replay
from mcore_qwen3vl.verify.trace.result import Cause

SEARCH_LIMIT = 2000
"""Tensors of the same shape that are looked through for the values that were found."""


def find_weight_cause(divergence: Divergence) -> Cause | None:
    """Weights of the probe point that are not the checkpoint's, and whether they explain it."""
    point = divergence.forward
    if point is None or point.side == "input":
        return None
    changed = {
        name: found
        for name, found in divergence.weights.items()
        if name.startswith(f"{point.module}.") and not torch.equal(found, divergence.stored(name))
    }
    if not changed:
        return None
    verdicts = {name: _verdict(divergence, name, found) for name, found in changed.items()}
    name = min(verdicts, key=lambda n: verdicts[n].kind == "changed values")
    outcome = replay(
        divergence.model, divergence.recording, point, **_in_module(divergence, changed)
    )
    others = f" (as well as {len(changed) - 1} more here)" if len(changed) > 1 else ""
    confirmed = divergence.explains(outcome)
    what = "Hugging Face's module with mcore's weight"
    return Cause(
        verdicts[name].kind,
        f"{name}{others} {verdicts[name].sentence}.",
        divergence.evidence(what, outcome)
        if confirmed
        else f"{what} is still {divergence.distance(outcome):.1e} from mcore's values, so the "
        "weight alone does not explain them.",
        confirmed,
    )


def _in_module(divergence: Divergence, changed: dict[str, Tensor]) -> dict[str, Tensor]:
    """By the names that the module in memory uses, experts in the layout it has."""
    assert divergence.point is not None
    module = divergence.model.get_submodule(divergence.point.module)
    paths = {parameter: path for path, parameter in module.named_parameters()}
    # PEFT's wrappers keep what they adapt one or more levels down.
    bare = {path.replace("base_layer.", ""): path for path in paths.values()}
    inside: dict[str, Tensor] = {}
    for name, value in changed.items():
        swap = value.ndim == 3 and divergence.architecture.expert_layout == "published"
        own = bare.get(name.removeprefix(f"{divergence.point.module}."), "")
        path = paths.get(divergence.trained[name], own) if name in divergence.trained else own
        inside[path] = value.transpose(1, 2) if swap else value
    return inside


def _verdict(divergence: Divergence, name: str, found: Tensor) -> Verdict:
    """What `found` is, told from what `name` should be."""
    expected = divergence.stored(name)
    if name.rpartition(".")[0].endswith(("q_proj", "k_proj", "v_proj")):
        verdict = _qkv(divergence, name)
        if verdict is not None:
            return verdict
    verdict = arrangement(
        name, found, expected, swapped=divergence.architecture.expert_layout == "published"
    )
    if verdict is not None:
        return verdict
    other = _same_values(divergence, name, found)
    if other is not None:
        return other
    different = found != expected
    largest = (found - expected).abs().max().item()
    return Verdict(
        "changed values",
        f"differs in {int(different.sum())} of {found.numel()} values, by at most {largest:.2g}",
    )


def _qkv(divergence: Divergence, name: str) -> Verdict | None:
    """How query, key and value rows were arranged in ``linear_qkv``, if not as mcore reads them."""
    row = next(r for r in table(divergence.architecture) if name in {s.name for s in r.sources})
    names = [source.name for source in row.sources]
    if any(n not in divergence.weights for n in names):
        return None
    found = row.to_mcore(*(divergence.weights[n] for n in names))
    right = [divergence.stored(n) for n in names]
    for sentence, candidate in _qkv_layouts(divergence, row, right):
        if torch.equal(found, candidate):
            return Verdict("permuted QKV", sentence)
    return None


def _qkv_layouts(divergence: Divergence, row: Row, qkv: list[Tensor]) -> list[tuple[str, Tensor]]:
    q, k, v = qkv
    a = divergence.architecture
    size = a.head_dim

    def halves_to_pairs(weight: Tensor) -> Tensor:
        heads = weight.unflatten(0, (-1, 2, size // 2))
        return heads.transpose(1, 2).reshape(weight.shape)

    def pairs_to_halves(weight: Tensor) -> Tensor:
        heads = weight.unflatten(0, (-1, size // 2, 2))
        return heads.transpose(1, 2).reshape(weight.shape)

    layouts = [
        ("is laid out as all queries, all keys, all values instead of group by group", [q, k, v]),
        ("is laid out as all queries, all values, all keys instead of group by group", [q, v, k]),
        ("is laid out as all keys, all values, all queries", [k, v, q]),
    ]
    made = [(sentence, torch.cat(parts)) for sentence, parts in layouts]
    made.append(("has keys and values swapped", row.to_mcore(q, v, k)))
    for sentence, turn in (
        ("has the rotary halves of each head interleaved into pairs", halves_to_pairs),
        ("has rotary pairs of each head taken apart into halves", pairs_to_halves),
    ):
        made += [
            (f"{sentence}, in queries and keys", row.to_mcore(turn(q), turn(k), v)),
            (f"{sentence}, in queries alone", row.to_mcore(turn(q), k, v)),
            (f"{sentence}, in keys alone", row.to_mcore(q, turn(k), v)),
        ]
    for tp in (2, 4, 8):
        if all(len(part) % tp == 0 for part in qkv):
            parts = zip(*(part.chunk(tp) for part in qkv), strict=True)
            whole = torch.cat([torch.cat(part) for part in parts])
            made.append((f"is laid out rank by rank as for TP {tp}, each with q, k, v", whole))
    return made


def _same_values(divergence: Divergence, name: str, found: Tensor) -> Verdict | None:
    """Another tensor of the checkpoint that holds what this one was found to hold."""
    shape = tuple(found.shape)
    alike = [n for n, e in divergence.hf.entries.items() if tuple(e.shape) == shape and n != name]
    for other in alike[:SEARCH_LIMIT]:
        if not torch.equal(divergence.hf.read(other, (slice(1),)).float(), found[:1]):
            continue
        if torch.equal(divergence.stored(other), found):
            return Verdict(_kind_of_mix_up(name, other), f"holds the values of {other}")
    return None


def _kind_of_mix_up(name: str, other: str) -> str:
    pair = {name.split(".")[-2], other.split(".")[-2]}
    if "lm_head" in name and "embed_tokens" in other:
        return "tied head"
    if pair == {"gate_proj", "up_proj"}:
        return "swapped gate and up"
    if name.startswith("model.visual."):
        return "wrong vision weights"
    return "weights of another layer" if pair == {name.split(".")[-2]} else "mixed-up weights"
