"""A checkpoint of another maker, from whose weights a run starts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from mcore_qwen3vl.converters.formats import format_of
from mcore_qwen3vl.converters.identify import PathKind, folder_name, identify
from mcore_qwen3vl.converters.mapping.dialects import HYBRID_NORM, LANGUAGE, dialect_of
from mcore_qwen3vl.converters.mapping.table import EMBEDDING
from mcore_qwen3vl.converters.torch_dist import read_metadata
from mcore_qwen3vl.converters.torch_pickle import METADATA
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.settings.run import CheckpointSettings


@dataclass(frozen=True)
class OtherMaker:
    """A checkpoint of another maker: its iteration's folder, and the maker for messages."""

    folder: Path
    maker: str


def checkpoint_of_other_maker(checkpoints: CheckpointSettings) -> OtherMaker | None:
    """Return the checkpoint that a run starts from, if another maker wrote it.

    Its keys differ, so Megatron cannot load it; `load_checkpoint` of `converters.live` can.

    Raises:
        BadInput: the run would resume it rather than take its weights, or save beside it; or an
            unknown maker wrote it.
    """
    load = checkpoints.load or checkpoints.save  # the default of --load
    sources = [source for source in (load, checkpoints.pretrained_checkpoint) if source]
    source = next((s for s in sources if identify(s).kind is PathKind.MEGATRON), None)
    if source is None:
        return None
    step = checkpoints.ckpt_step if source == load else None
    place = identify(source if step is None else Path(source) / folder_name(step))
    try:
        folder = place.weights()
        if format_of(place).one_layout or not _may_be_other_makers(folder):
            return None
        index = read_metadata(folder)
    except BadInput:
        return None  # `agree_on_older_iteration` says what is wrong with it
    dialect = dialect_of(folder, index.tensors)
    if dialect is None:
        return None
    if checkpoints.save and os.path.realpath(checkpoints.save) == os.path.realpath(source):
        raise BadInput(
            f"{source} holds checkpoints of {dialect.maker}: choose another directory to --save to."
        )
    saved = any(key.startswith(("optimizer", "chained_")) for key in index.tensors)
    if saved and source == load and not checkpoints.finetune:
        raise BadInput(
            f"{folder} was written by {dialect.maker}, whose optimizer state cannot be resumed "
            "here. Add --finetune to start from its weights."
        )
    return OtherMaker(folder, dialect.maker)


def _may_be_other_makers(folder: Path) -> bool:
    """Return whether the metadata names a tensor as other makers do, without parsing it."""
    # The metadata of a large run takes seconds to parse, and every rank asks.
    file = folder / METADATA
    content = file.read_bytes() if file.is_file() else b""
    return any(key.encode() in content for key in (LANGUAGE + EMBEDDING, HYBRID_NORM))
