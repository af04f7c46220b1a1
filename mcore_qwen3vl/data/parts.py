"""Work on a data set in parts, by index, on any machines, and its results in one folder.

Slurm's arrays, Kubernetes' indexed jobs and Ray's tasks all give a process its index. A part is a
run of consecutive samples, and its result a file that appears whole: a line with what the result
depends on, then a line for each sample. Where a part was killed there is no file, and it alone is
done again. A merge reads the files in order, so that what it makes of the values is what one
process would make; it refuses parts that are missing, doubled, or not of one piece of work.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from mcore_qwen3vl import __version__
from mcore_qwen3vl.data.config import DataConfig, Source
from mcore_qwen3vl.data.content import content_of, content_of_file, digest, digest_of_hook
from mcore_qwen3vl.data.processor import settings_of
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import atomic_write
from mcore_qwen3vl.flags import flag_of
from mcore_qwen3vl.part import Part
from mcore_qwen3vl.writer_lock import only_writer

_NAMED = 5  # parts that are missing and named; the others are counted
_FLAGS = (
    *("seq_length", "overlong", "max_sample_seconds", "max_decoded_pixels", "document_end"),
    "allow_dropped",
)
"""Fields of the data config on which depends what a sample is, beside the budgets."""


class Parts:
    """The results of the parts of a piece of work, in a folder that all of them see."""

    def __init__(self, folder: Path, work: str, total: int, depends: Mapping[str, Any]) -> None:
        """
        Args:
            work: the command, such as ``check``; the first word of the files' names.
            total: number of samples of all parts.
            depends: what the results depend on, by its name in messages, as plain data.
        """
        self._folder, self._work, self._total = folder, work, total
        self._depends = json.loads(json.dumps(dict(depends), default=str))

    def file_of(self, part: Part) -> Path:
        """Return the file of a part's result."""
        return self._folder / f"{self._work}-{part.index:05d}-of-{part.count:05d}.jsonl"

    def is_done(self, part: Part) -> bool:
        """Return whether a part's result is there, of this very work."""
        file = self.file_of(part)
        try:
            return file.exists() and self._header(file) == self._header_of(part)
        except BadInput:  # it is damaged, and done again
            return False

    @contextmanager
    def written(self, part: Part) -> Iterator[Callable[[Any], object]]:
        """Yield a function to add the value of the next sample, which is plain data.

        The file appears at the end. What a killed part has left is removed.

        Raises:
            BadInput: the folder cannot be written, or another process does the same part.
        """
        file = self.file_of(part)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(
                f"{self._folder} cannot be made: {error.strerror}. Choose another --parts."
            ) from None
        with only_writer(file):
            for left in file.parent.glob(f".{file.name}.*.tmp"):
                with suppress(OSError):
                    left.unlink()
            with (
                atomic_write(file, "Choose another --parts.") as partial,
                partial.open("w", encoding="utf-8") as lines,
            ):
                lines.write(json.dumps(self._header_of(part)) + "\n")
                yield lambda value: lines.write(json.dumps(value) + "\n")

    def merged(self) -> Iterator[Any]:
        """Yield the values of all samples, in order.

        Raises:
            BadInput: a part is missing, doubled, cut off, or of another piece of work.
        """
        for number, file in enumerate(files := self._ordered()):
            expected = Part(number, len(files)).of(self._total)
            count = -1  # the header
            with file.open(encoding="utf-8") as lines:
                for count, line in enumerate(lines):
                    if count:
                        yield self._parsed(file, line)
            if count != len(expected):
                raise self._damaged(file)

    def _ordered(self) -> list[Path]:
        """Return the files of all parts in order, once they are known to belong together."""
        found: dict[int, Path] = {}
        counts: dict[int, Path] = {}
        for file in sorted(self._folder.glob(f"{self._work}-*.jsonl")):
            header = self._header(file)
            part = Part(header["part"], header["of"])
            self._require_same(file, part, header)
            if part.index in found and part.count in counts:
                raise BadInput(
                    f"{found[part.index]} and {file} are both part {part}: remove one of them."
                )
            found[part.index] = counts[part.count] = file
            if len(counts) > 1:
                some = " and ".join(f"of {count} ({file.name})" for count, file in counts.items())
                raise BadInput(
                    f"{self._folder} holds parts {some}: remove those of one division, or name "
                    "another folder for each."
                )
        if not found:
            raise BadInput(
                f"{self._folder} holds no part of data {self._work}: do them first, with --part "
                "0/N and so on."
            )
        (count,) = counts
        missing = [str(Part(index, count)) for index in range(count) if index not in found]
        if missing:
            more = f" and {len(missing) - _NAMED:,} more" if len(missing) > _NAMED else ""
            raise BadInput(
                f"{self._folder} lacks {len(missing):,} of {count:,} parts: do --part "
                f"{', '.join(missing[:_NAMED])}{more}, and merge again."
            )
        return [found[index] for index in range(count)]

    def _require_same(self, file: Path, part: Part, header: Mapping[str, Any]) -> None:
        """Raise BadInput if a part's result depends on something else than this merge says."""
        now = self._header_of(part)["depends"]
        then = header["depends"]
        other = [name for name in {**now, **then} if now.get(name) != then.get(name)]
        if other:
            raise BadInput(
                f"{file} and this command differ in {other[0]}: do --part {part} again with the "
                "flags and the data of this command, or give the flags that it was made with."
            )

    def _header_of(self, part: Part) -> dict[str, Any]:
        depends = {**self._depends, "the number of samples": self._total}
        return {"part": part.index, "of": part.count, "depends": depends}

    def _header(self, file: Path) -> dict[str, Any]:
        with file.open(encoding="utf-8") as lines:
            header = self._parsed(file, lines.readline())
        if not isinstance(header, dict) or header.keys() != {"part", "of", "depends"}:
            raise self._damaged(file)
        return header

    def _parsed(self, file: Path, line: str) -> Any:
        try:
            return json.loads(line)
        except ValueError:
            raise self._damaged(file) from None

    def _damaged(self, file: Path) -> BadInput:
        return BadInput(
            f"{file} is damaged or cut off: remove it, do its part again, and merge again."
        )


def depends_on(
    sources: Sequence[Source], processor: Any, config: DataConfig, split: str
) -> dict[str, Any]:
    """Return what reading data sets depends on, by its name in messages.

    Data, tokenizer, template, processors and hooks count by their content. The files that records
    name, such as images, are not looked at.

    Args:
        processor: as loaded; its budgets may be set already.
    """
    said: dict[str, Any] = {"the version of mcore-qwen3vl": __version__, "--split": split}
    said |= {flag_of(name): getattr(config, name) for name in _FLAGS}
    limits = config.media_limits
    said |= {flag_of(each.name): getattr(limits, each.name) for each in fields(limits)}
    said["--loss"] = repr(config.records)
    sidecar = config.sidecar
    said |= sidecar.flags() if sidecar is not None else {}
    said["the data sets"] = [str(source.path.absolute()) for source in sources]
    tokenizer = processor.tokenizer.backend_tokenizer
    said["the tokenizer"] = digest(tokenizer.to_str())
    said["the chat template"] = digest(json.dumps(processor.chat_template, sort_keys=True))
    said["the image processor"] = settings_of(processor.image_processor)
    said["the video processor"] = settings_of(processor.video_processor)
    for source in sources:
        hook = source.reading.preprocess
        settings = [repr(source.reading), repr(source.limits), str(source.media_root)]
        said[f"how {source.path} is read"] = [*settings, source.max_samples]
        said[f"the file of {hook}"] = hook and digest_of_hook(hook)
        content = content_of(source.path, split=split, trust=config.trust_data)
        said[f"the content of {source.path}"] = [content.sizes, content.digest]
        if sidecar is not None:
            beside = sidecar.file_of(source.path)
            said[f"the content of {beside}"] = content_of_file(beside).digest
    return said
