"""The record of a checkpoint's form, kept beside the config in the ``hf`` folder of a Megatron one.

Neither the config nor Megatron's tensors tell names and head of what was converted. A checkpoint in
transformers' own form has no record.
"""

from __future__ import annotations

import json
from pathlib import Path

from mcore_qwen3vl.converters.mapping.forms import CLASSIFIER, HEADS, NAMES, Form, Head
from mcore_qwen3vl.converters.storage.staging import write_durably
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import parse_json

FILE = "checkpoint_form.json"


def write_form(folder: Path, form: Form) -> None:
    """Write the record into `folder`, durably, unless `form` needs none.

    Raises:
        OSError: writing failed.
    """
    if form == Form():
        return
    write_durably(folder / FILE, (json.dumps(form.record, indent=1) + "\n").encode())


def read_form(folder: Path) -> Form:
    """Return the form that the record in `folder` states; without a record, transformers' own.

    Raises:
        BadInput: the record is damaged.
    """
    file = folder / FILE
    if not file.is_file():
        return Form()
    try:
        content = parse_json(file.read_bytes())
        kind, labels, bias = HEADS[content["head"]], content["labels"], content["bias"]
        if (type(labels), type(bias)) != (int, bool) or (labels > 0) != (kind is CLASSIFIER):
            raise ValueError(f"labels {labels!r:.40}, bias {bias!r:.40}")
        return Form(NAMES[content["names"]], Head(kind, labels, bias))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise BadInput(
            f"{file} does not say how the checkpoint's tensors are called ({error!r:.200}). "
            "Restore the file that was written with the checkpoint."
        ) from None
