"""The two ways in which PEFT stores the factors of fused experts, told apart by their shapes.

PEFT reads a three-dimensional parameter as (experts, in, out) or (experts, out, in), depending on
the versions of PEFT and transformers. In the *canonical* roles A is applied to the expert's input;
PEFT 0.21 with transformers 5 and PEFT 0.18 with transformers 4.57 write them, and vLLM reads them.
In the *swapped* roles, which the other two combinations write, A and B have exchanged places. The
config does not say which; the shapes do, unless an expert's input is as wide as its output.

    canonical   A (E*r, in)    B (out, r*E)    ΔW_e = s · B[:, e::E] · A[e*r:(e+1)*r]
    swapped     A (E*r, out)   B (in, r*E)     ΔW_e = s · (B[:, e::E] · A[e*r:(e+1)*r])ᵀ
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from mcore_qwen3vl.converters.adapters.peft_model import Slot
from mcore_qwen3vl.converters.storage.boxes import Shape
from mcore_qwen3vl.errors import BadInput

Roles = Literal["canonical", "swapped"]


def swap(a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Convert factors of fused experts to the other roles; exact, and its own inverse.

    Args:
        a: (E*r, n), with the rows of an expert adjacent.
        b: (m, r*E), with the columns of an expert E apart.
        experts: E, the number of experts.

    Returns:
        (E*r, m) and (n, r*E), contiguous.
    """
    rank = a.shape[0] // experts
    new_a = b.reshape(len(b), rank, experts).permute(2, 1, 0).reshape(experts * rank, len(b))
    new_b = a.reshape(experts, rank, a.shape[1]).permute(2, 1, 0).reshape(a.shape[1], -1)
    return new_a.contiguous(), new_b.contiguous()


def swapped_shapes(slot: Slot) -> tuple[Shape, Shape]:
    """Return the shapes of A and B in the swapped roles."""
    return (slot.a_shape[0], slot.b_shape[0]), (slot.a_shape[1], slot.b_shape[1])


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
        found = shapes[slot.a_key], shapes[slot.b_key]
        fits: set[Roles] = set()
        if found == (slot.a_shape, slot.b_shape):
            fits.add("canonical")
        if found == swapped_shapes(slot):
            fits.add("swapped")
        if not fits:
            raise BadInput(_neither(name, slot, found, where))
        possible &= fits
        if not possible:
            raise BadInput(
                f"{where}: the factors of some fused experts have the canonical roles and those of "
                f"others, such as {name}, the swapped ones. The file was put together from two."
            )
    if not fused:
        return wanted or "canonical"
    if wanted is not None:
        if wanted not in possible:
            raise BadInput(f"{where}: the shapes of its expert factors are not the {wanted} roles.")
        return wanted
    if len(possible) > 1:
        raise BadInput(
            f"{where}: an expert's input is as wide as its output, so the shapes do not tell which "
            "roles A and B have. Say it with --from-roles: canonical for PEFT 0.21 with "
            "transformers 5 or PEFT 0.18 with 4.57, else swapped."
        )
    return possible.pop()


def _neither(name: str, slot: Slot, found: tuple[Shape, Shape], where: str) -> str:
    a, b = swapped_shapes(slot)
    return (
        f"{where}: the factors of {name} have shapes {list(found[0])} and {list(found[1])}; rank "
        f"{slot.r} for each expert of this model makes {list(slot.a_shape)} and "
        f"{list(slot.b_shape)}, or {list(a)} and {list(b)} in the swapped roles. The adapter "
        "belongs to another model, or its config to another adapter."
    )
