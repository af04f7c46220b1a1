"""One flag for each field of the data config that no Megatron flag covers."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any, get_args, get_type_hints

from mcore_qwen3vl.data.config import DataConfig, MediaLimits

# Set by Megatron's own flags, by the layout's needs, or by the loss.
_SET_ELSEWHERE = (
    *("seq_length", "micro_batch_size", "length_multiple", "micro_batches", "media"),
    *("pairs", "labelled", "task", "similarities", "labels", "references", "teacher_temperature"),
)

_DECIDED_LATER = ("balance",)  # if not given, other flags decide
_OF_CHECKPOINT = "default: the checkpoint's processor's"
TEXTS = {
    "packing": "put several samples into a sequence (THD); default: one sample a row, padded",
    "pad_to_longest": "without --packing: pad rows to the longest of their batch; on by default "
    "unless --seq-length is given, to which all rows are then padded",
    "overlong": "samples longer than --seq-length are left out, or their tail is cut",
    "packing_buffer": "number of samples among which the packer chooses; with --balance, for each "
    "data-parallel rank",
    "balance": "make packs of equal work for all data-parallel ranks; measures every sample once, "
    "before training; default: with --packing, except for preference losses and --task, where "
    "each rank packs its own part by length",
    "shuffle": "read the samples in their order; default: a new permutation in each epoch",
    "shuffle_buffer": "of tars: number of samples among which the next is drawn",
    "max_bad_fraction": "stop when more than this share of the data set is bad",
    "bad_fraction_floor": "count at least this many records for --max-bad-fraction, so that a few "
    "bad ones at the start do not stop the run",
    "max_sample_seconds": "skip a sample as bad if its hook, template or decoding takes longer; "
    "0: no limit",
    "max_decoded_pixels": "skip a sample as bad if an image, or a frame of a video, has more "
    "pixels in its file, before resizing",
    "trust_data": "run the Python code that an energon metadataset or a WebDataset names; default: "
    "such data sets are refused",
    "allow_dropped": "use samples although the chat template leaves some of their text out, and "
    "name what it leaves out; default: such samples are bad",
    "document_end": "token text that ends a pretraining document; default: the tokenizer's pad "
    "token",
    "image_min_pixels": f"fewest pixels of an image, after resizing; {_OF_CHECKPOINT}",
    "image_max_pixels": f"most pixels of an image, after resizing; {_OF_CHECKPOINT}",
    "image_max_tokens": "most tokens of an image; the smaller of this and --image-max-pixels holds",
    "video_min_pixels": f"fewest pixels of a whole clip, after resizing; {_OF_CHECKPOINT}",
    "video_max_pixels": f"most pixels of a whole clip, after resizing; {_OF_CHECKPOINT}",
    "video_max_tokens": "most tokens of a whole clip; the smaller of this and --video-max-pixels "
    "holds",
    "video_fps": f"number of frames to sample from a second; {_OF_CHECKPOINT}",
    "video_max_frames": f"most frames to sample from a clip; {_OF_CHECKPOINT}",
}
PREPROCESS = (
    "function, or name of an entry point, that turns a record of any shape into one of a known "
    "format; for data sets that name no function of their own"
)

TRAIN_ON = (
    "turns of the assistant to train on: all, last, or a regular expression that must match in the "
    "turn's text; for data sets that choose none of their own; default: all"
)


def add_data_arguments(group: argparse._ArgumentGroup) -> None:
    """Add a flag for each field of the data config, ``--preprocess`` and ``--train-on``."""
    group.add_argument("--preprocess", metavar="MODULE:FUNCTION", help=PREPROCESS)
    group.add_argument("--train-on", metavar="TURNS", help=TRAIN_ON)
    for owner in (DataConfig, MediaLimits):
        types = get_type_hints(owner)
        for field in fields(owner):
            if field.name not in _SET_ELSEWHERE:
                _add(group, field.name, types[field.name], field.default)


def check_data_arguments(args: argparse.Namespace) -> None:
    """Raise BadInput for values that the data config refuses under every layout."""
    given = {field.name: getattr(args, field.name, None) for field in fields(DataConfig)}
    DataConfig(**{name: value for name, value in given.items() if value is not None})


def media_limits(args: argparse.Namespace) -> MediaLimits:
    """Return the budgets of the command line."""
    return MediaLimits(**{field.name: getattr(args, field.name) for field in fields(MediaLimits)})


def _add(group: argparse._ArgumentGroup, name: str, kind: Any, default: Any) -> None:
    flag, text = name.replace("_", "-"), TEXTS[name]
    if name in _DECIDED_LATER:
        both = argparse.BooleanOptionalAction
        group.add_argument(f"--{flag}", action=both, default=None, help=text)
    elif kind is bool and default:
        group.add_argument(f"--no-{flag}", dest=name, action="store_false", default=True, help=text)
    elif kind is bool:
        group.add_argument(f"--{flag}", action="store_true", help=text)
    else:
        stated = "" if default is None else "; default: %(default)s"
        group.add_argument(f"--{flag}", default=default, help=text + stated, **_value_type(kind))


def _value_type(kind: Any) -> dict[str, Any]:
    """Return a flag's ``type`` or ``choices``, from ``T``, ``T | None`` or ``Literal[...]``."""
    options = [option for option in get_args(kind) if option is not type(None)]
    if options and isinstance(options[0], str):
        return {"choices": options}
    return {"type": options[0] if options else kind, "metavar": "TEXT" if str in options else "N"}
