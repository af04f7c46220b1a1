"""FlashAttention 3 in place of the FlashAttention 2 that PyTorch has, for packs and images.

PyTorch looks up the kernels of its FlashAttention operators when they are called, and a package can
put its own there. That holds for the whole process: for the variable-length operator of decoder and
vision tower, and for :func:`torch.nn.functional.scaled_dot_product_attention`. It must be done
before the first forward pass, whose sums of exponentials the backward pass reads.
"""

from __future__ import annotations

from importlib.util import find_spec

from mcore_qwen3vl.runtime.gpus import HOPPER, compute_capability

IMPLEMENTATION = "FA3"
PACKAGE = "flash_attn_interface"
"""The module of the package flash_attn_3 that PyTorch imports."""


def why_unavailable() -> str | None:
    """Say why this machine does not compute attention with FlashAttention 3; None if it does."""
    if find_spec(PACKAGE) is None:
        return f"it needs the package flash_attn_3, whose module {PACKAGE} is not installed"
    major = compute_capability()
    if major not in (HOPPER, None):  # of an unknown GPU PyTorch says so itself
        return f"it needs a Hopper GPU (compute capability 9.0), and this one has {major}.x"
    from torch.nn import attention  # takes seconds, and only who asks for it comes here

    if IMPLEMENTATION not in getattr(attention, "list_flash_attention_impls", list)():
        return "this PyTorch cannot call it, but 2.13 can"
    return None


def use_flash_attention_3() -> None:
    """Compute attention in half precision with FlashAttention 3 until the process ends.

    :func:`why_unavailable` says whether it can.
    """
    from torch.nn.attention import activate_flash_attention_impl

    activate_flash_attention_impl(IMPLEMENTATION)
