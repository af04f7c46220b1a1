"""The registry's entry for Megatron's legacy format."""

from __future__ import annotations

from mcore_qwen3vl.converters.legacy import to_legacy
from mcore_qwen3vl.converters.legacy.fit import check_run
from mcore_qwen3vl.converters.legacy.layout import FILE
from mcore_qwen3vl.converters.legacy.legacy_checkpoint import LegacyCheckpoint
from mcore_qwen3vl.converters.mcore.formats import Format, PerLayout

FORMAT = Format(
    name="torch",
    title="Megatron's legacy format",
    recognises=lambda folder: any(folder.glob(f"mp_rank_*/{FILE}")),
    open=LegacyCheckpoint,
    per_layout=PerLayout(to_legacy.plan, check_run),
)
