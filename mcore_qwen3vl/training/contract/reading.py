"""The row of how records are read: tokenizer, template, hook and pixels count by their content."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_qwen3vl.data.config import MEDIA_BUDGETS, parse_sources
from mcore_qwen3vl.data.content import digest, digest_of_hook
from mcore_qwen3vl.training.arguments.settings import Settings
from mcore_qwen3vl.training.contract.data_sets import readings_of, sources_of
from mcore_qwen3vl.training.contract.rules import (
    Change,
    Notice,
    Steering,
    Values,
    WithoutPacks,
)

CONTENT = {
    "mixture": "a mixture file with other settings of its data sets",
    "tokenizer": "a tokenizer of other content",
    "template": "a chat template of other content",
    "images": "other settings of the image processor",
    "videos": "other settings of the video processor",
    "hooks": "a --preprocess function whose file has other content",
}
"""What counts by its content, and not by the name of a flag, in words."""


def content_of_reading(settings: Settings) -> Values:
    """Return what decides how records are read, but for the flags."""
    from mcore_qwen3vl.data.processor import load_processor  # imports transformers

    processor = load_processor(settings.model.folder)
    # A folder of a run has the budgets in its files that the run was given as flags.
    settings.data.media_limits.apply(processor)
    tokenizer = json.loads(processor.tokenizer.backend_tokenizer.to_str())
    for passing in ("padding", "truncation"):  # a tokenizer that was used before it was saved
        tokenizer.pop(passing, None)
    hooks = [source.reading.preprocess for source in sources_of(settings)]
    return {
        # Without the flags' values, which are compared by their own names.
        "mixture": readings_of(parse_sources(settings.loop.training_data)),
        "tokenizer": digest(json.dumps(tokenizer, sort_keys=True)),
        "template": digest(json.dumps(processor.chat_template, sort_keys=True)),
        "images": digest(_settings_of(processor.image_processor)),
        "videos": digest(_settings_of(processor.video_processor)),
        "hooks": [hook and digest_of_hook(hook) for hook in hooks],
    }


def _settings_of(processor: Any) -> str:
    """Return what decides the pixels of an image or a video processor, as JSON."""
    from mcore_qwen3vl.data.processor import settings_of

    return json.dumps(settings_of(processor), sort_keys=True, default=str)


@dataclass(frozen=True)
class OtherReading(WithoutPacks):
    """Names a budget by its flag alone, and not the settings too that it changes."""

    def judge(
        self, row: str, changes: Sequence[Change], before: Values, now: Values, steering: Steering
    ) -> Iterator[Notice]:
        if any(change.setting in MEDIA_BUDGETS for change in changes):
            changes = [each for each in changes if each.setting not in ("images", "videos")]
        yield from super().judge(row, changes, before, now, steering)
