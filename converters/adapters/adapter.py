"""A LoRA adapter in memory: its factors, their two roles in PEFT's files, and the update s·B·A.

In memory an adapter has Hugging Face's parameter names and one convention for the factors of fused
experts, whatever wrote its file; `files` converts from and to PEFT's directory.

PEFT reads a three-dimensional parameter as (experts, in, out) or (experts, out, in), depending on
the versions of PEFT and transformers. In the *canonical* roles A is applied to the expert's input;
PEFT 0.21 with transformers 5 and PEFT 0.18 with transformers 4.57 write them, and vLLM reads them.
In the *swapped* roles, which the other two combinations write, A and B have exchanged places. The
config does not say which; the shapes do, unless an expert's input is as wide as its output.

    canonical   A (E*r, in)    B (out, r*E)    ΔW_e = s · B[:, e::E] · A[e*r:(e+1)*r]
    swapped     A (E*r, out)   B (in, r*E)     ΔW_e = s · (B[:, e::E] · A[e*r:(e+1)*r])ᵀ

The update equals what PEFT adds within float32 rounding, but not bit for bit: the bits of a product
depend on the processor, the library, the number of rows and where the operands lie in memory. PEFT
multiplies whole weights, which would take 6.4 GB for the experts of one layer of the 235B model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from mcore_qwen3vl.converters.adapters.config import AdapterConfig
from mcore_qwen3vl.converters.adapters.targets import PREFIX, Applied, Slot
from mcore_qwen3vl.converters.hf import hub
from mcore_qwen3vl.converters.offline import manifest
from mcore_qwen3vl.converters.storage.boxes import Shape
from mcore_qwen3vl.converters.storage.dtypes import cast
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.labels import Labels

WEIGHTS = "adapter_model.safetensors"

BASE_LAYER = f"{PREFIX}lm_head.base_layer.weight"
"""Key of the whole head, which PEFT stores beside its factors if the head is a target."""

SHOWN = 3
"""The most names that a message lists."""

CHUNK_VALUES = 2**20
"""Values of a product computed at a time, which stay in the processor's cache until written."""

Roles = Literal["canonical", "swapped"]


@dataclass(frozen=True)
class Factors:
    """The low-rank update of one parameter: ΔW = `scaling` · B · A.

    Attributes:
        a, b: (r, in) and (out, r); for fused experts (E*r, in) and (out, r*E), as above.
        r: rank; for fused experts, the rank of each expert.
        scaling: lora_alpha / r, or lora_alpha / sqrt(r) with rsLoRA.
    """

    a: Tensor
    b: Tensor
    r: int
    scaling: float


@dataclass(frozen=True)
class Adapter:
    """An adapter as it was read.

    Attributes:
        factors: factors by Hugging Face parameter, in the canonical roles.
        saved: whole parameters in the adapter, by name; experts in the layout of transformers 5.
            A parameter that also has factors is the base weight that their product is added to.
        labels: labels of the classifier's head among `saved`; None: it has no such head.
    """

    config: AdapterConfig
    factors: dict[str, Factors]
    saved: dict[str, Tensor]
    roles: Roles = "canonical"
    notes: tuple[str, ...] = ()
    labels: Labels | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return all factors, as ``PARAMETER.lora_A`` and ``PARAMETER.lora_B``."""
        named: dict[str, Tensor] = {}
        for name, factors in self.factors.items():
            named |= {f"{name}.lora_A": factors.a, f"{name}.lora_B": factors.b}
        return named

    def other_base(self, base: Path) -> list[str]:
        """Return a note if the adapter names another model that is on this machine.

        The checkpoint that `base` was converted from is no other model.

        Raises:
            BadInput: its manifest is damaged.
        """
        named = self.config.raw.get("base_model_name_or_path")
        if not isinstance(named, str) or not Path(named).is_dir():
            return []
        converted = manifest.find(base)
        source = manifest.read(converted)["source"] if converted else {}
        if Path(named).samefile(base) or hub.origin_of(Path(named)).items() <= source.items():
            return []
        return [f"The adapter was trained on {named}, and is used with {base}."]


def whole_shape(name: str, applied: Applied) -> Shape:
    """Return the shape of a parameter that is stored whole."""
    return applied.saved[name] if name in applied.saved else applied.slots[name].base


def some(names: list[str]) -> str:
    """Return the first `SHOWN` names and the number of the others, for a message."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(name[:200] for name in names[:SHOWN]) + more


def swap(a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Convert factors of fused experts to the other roles; exact, and its own inverse.

    From `a` (E*r, n) and `b` (m, r*E) they are (E*r, m) and (n, r*E), contiguous.
    """
    rank = a.shape[0] // experts
    new_a = b.reshape(len(b), rank, experts).permute(2, 1, 0).reshape(experts * rank, len(b))
    new_b = a.reshape(experts, rank, a.shape[1]).permute(2, 1, 0).reshape(a.shape[1], -1)
    return new_a.contiguous(), new_b.contiguous()


def find_roles(
    slots: Mapping[str, Slot], shapes: Mapping[str, Shape], wanted: Roles | None, where: str
) -> Roles:
    """Return the roles in which the factors of fused experts are stored.

    Without fused experts, return `wanted`, or else canonical.

    Args:
        shapes: shapes of the tensors in the file, by key; all keys of `slots` are present.
        wanted: roles that the user gave; None: the shapes decide.

    Raises:
        BadInput: a shape fits neither roles, or not the `wanted` ones; parameters contradict each
            other; or all shapes fit both roles and `wanted` is None.
    """
    possible: set[Roles] = {"canonical", "swapped"}
    fused = {name: slot for name, slot in slots.items() if len(slot.base) == 3}
    for name, slot in fused.items():
        a, b = shapes[slot.a_key], shapes[slot.b_key]
        (rank, into), (out, _) = slot.a_shape, slot.b_shape
        fits: set[Roles] = {"canonical"} if (a, b) == (slot.a_shape, slot.b_shape) else set()
        if (a, b) == ((rank, out), (into, rank)):
            fits.add("swapped")
        if not fits:
            raise BadInput(
                f"{where}: the factors of {name} have shapes {list(a)} and {list(b)}; rank "
                f"{slot.r} for each expert of this model makes {list(slot.a_shape)} and "
                f"{list(slot.b_shape)}, or {[rank, out]} and {[into, rank]} in the swapped roles. "
                "The adapter belongs to another model, or its config to another adapter."
            )
        possible &= fits
        if not possible:
            raise BadInput(
                f"{where}: the factors of some fused experts have the canonical roles and those of "
                f"others, such as {name}, the swapped ones. The file was put together from two."
            )
    if wanted is not None and wanted not in possible:
        raise BadInput(f"{where}: the shapes of its expert factors are not the {wanted} roles.")
    if not fused or wanted is not None:
        return wanted or "canonical"
    if len(possible) > 1:
        raise BadInput(
            f"{where}: an expert's input is as wide as its output, so the shapes do not tell which "
            "roles A and B have. Say it with --from-roles: canonical for PEFT 0.21 with "
            "transformers 5 or PEFT 0.18 with 4.57, else swapped."
        )
    return possible.pop()


def product(a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Compute s·B·A in float32: (out, in) from (r, in) and (out, r)."""
    return (b.float() @ a.float()).mul_(scaling)


def of_expert(factors: Factors, index: int) -> tuple[Tensor, Tensor]:
    """Return A (r, in) and B (out, r) of one of the fused experts."""
    rows = slice(index * factors.r, (index + 1) * factors.r)
    experts = factors.a.shape[0] // factors.r
    return factors.a[rows], factors.b[:, index::experts]


def row_chunks(count: int, width: int = 1) -> Iterator[slice]:
    """Split rows 0 to `count`, of `width` values each, into pieces of about `CHUNK_VALUES`."""
    pieces = min(-(-count * width // CHUNK_VALUES), count)
    bounds = [count * piece // pieces for piece in range(pieces + 1)]
    for first, last in itertools.pairwise(bounds):
        yield slice(first, last)


@torch.no_grad()
def add_update(weight: Tensor, factors: Factors, name: str, *, swapped: bool) -> None:
    """Add s·B·A to a weight in place, rounding once to the weight's dtype.

    Args:
        weight: weight of a linear layer, (out, in), or of fused experts, (E, out, in).
        swapped: whether experts are (E, in, out), as published.

    Raises:
        BadInput: a sum is too large for the weight's dtype.
    """
    if weight.ndim == 3:
        experts = weight.mT if swapped else weight
        parts = [(one, *of_expert(factors, index)) for index, one in enumerate(experts)]
    else:
        chunks = row_chunks(*weight.shape)
        parts = [(weight[rows], factors.a, factors.b[rows]) for rows in chunks]
    for part, a, b in parts:
        part.copy_(cast(product(a, b, factors.scaling).add_(part.float()), weight.dtype, name))
