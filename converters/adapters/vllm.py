"""What vLLM would not serve of an adapter."""

from __future__ import annotations

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.adapter import Adapter, Roles

DEFAULT_RANK = 16
RANKS = (1, 8, DEFAULT_RANK, 32, 64, 128, 256, 320, 512)
"""The values that vLLM's ``--max-lora-rank`` accepts."""


def vllm_notes(
    adapter: Adapter, architecture: Architecture, roles: Roles | None = None
) -> tuple[str, ...]:
    """Return one sentence for each reason why vLLM would not serve the adapter as it is.

    The rules come from vLLM 0.33's sources: ``vllm/lora/peft_helper.py``, ``lora_model.py``,
    ``model_manager.py`` and ``vllm/config/lora.py``. ``tests/vllm/test_lora.py`` checks them with
    vLLM 0.32 on the CPU, except for those on models with experts, which vLLM does not adapt there.

    Args:
        roles: roles of its factors in the file; default: the roles that it was read with.
    """
    notes = []
    rank = max((factors.r for factors in adapter.factors.values()), default=0)
    if rank > RANKS[-1]:
        notes.append(
            f"vLLM refuses the adapter: its largest rank is {rank}, more than {RANKS[-1]}."
        )
    elif rank > DEFAULT_RANK:
        enough = min(size for size in RANKS if size >= rank)
        notes.append(
            f"vLLM needs max_lora_rank {enough} for rank {rank}; its default is {DEFAULT_RANK}."
        )
    if adapter.config.modules_to_save:
        notes.append("vLLM refuses adapters with modules_to_save: merge the adapter.")
    experts = {name.rpartition(".")[2] for name in adapter.factors if ".mlp.experts." in name}
    if len(experts) == 1:
        notes.append(
            f"vLLM refuses the adapter: in the fused experts it adapts only {min(experts)}, and "
            "vLLM needs gate_up_proj and down_proj together, or neither: merge the adapter."
        )
    if experts and (roles or adapter.roles) == "swapped":
        notes.append(
            "vLLM reads the factors of fused experts only in the canonical roles: convert the "
            "adapter with `mcore-qwen3vl lora convert --roles canonical`."
        )
    tower = [name for name in adapter.factors if name.startswith("model.visual.")]
    if tower:
        notes.append(
            f"vLLM ignores the {len(tower)} adapted parameters of vision tower and mergers "
            "unless enable_tower_connector_lora is set."
        )
    if architecture.is_moe and any(name.endswith("attn.qkv.weight") for name in tower):
        notes.append(
            "Even with enable_tower_connector_lora, vLLM ignores attn.qkv in the vision tower of a "
            "MoE model: merge the adapter."
        )
    return tuple(notes)
