"""Megatron's legacy format, ``--ckpt-format torch``."""

from mcore_qwen3vl.converters.legacy import to_legacy
from mcore_qwen3vl.converters.legacy.legacy_checkpoint import LegacyCheckpoint, check_run
from mcore_qwen3vl.converters.megatron_checkpoint import Format

FORMAT = Format(
    name="torch",
    title="Megatron's legacy format",
    open=LegacyCheckpoint,
    plan=to_legacy.plan,
    check_run=check_run,
)
