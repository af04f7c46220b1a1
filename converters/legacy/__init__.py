"""Megatron's legacy format, ``--ckpt-format torch``."""

from mcore_qwen3vl.converters.legacy import to_legacy
from mcore_qwen3vl.converters.legacy.files import check_run
from mcore_qwen3vl.converters.legacy.layout import FILE
from mcore_qwen3vl.converters.legacy.legacy_checkpoint import LegacyCheckpoint
from mcore_qwen3vl.converters.mcore.formats import Format

FORMAT = Format(
    name="torch",
    title="Megatron's legacy format",
    recognises=lambda folder: any(folder.glob(f"mp_rank_*/{FILE}")),
    open=LegacyCheckpoint,
    plan=to_legacy.plan,
    check_run=check_run,
)
