"""Settings of the data pipeline: data sets, lengths, policies, and budgets of images and videos.

The data sets are those that a command line or a mixture file names; docs/data.md shows such a file.
Imports nothing heavy.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import Any, Literal, get_type_hints

from mcore_qwen3vl.data.record_form import RecordForm
from mcore_qwen3vl.data.records.reading import PLAIN, Reading, parse_template_kwargs
from mcore_qwen3vl.data.sidecar import Sidecar
from mcore_qwen3vl.data.task_inputs import TaskInputs
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import refuse_special_files
from mcore_qwen3vl.flags import flag_of
from mcore_qwen3vl.json_and_yaml import require_spelled_out

_PIL_DECODES = 178_956_970  # twice ``PIL.Image.MAX_IMAGE_PIXELS``


@dataclass(frozen=True)
class MediaLimits:
    """Budgets for one image or one video; None keeps the setting of the checkpoint's processor.

    Pixels are counted after resizing. A token is one merged patch, so a token budget is a pixel
    budget in other units, and the smaller of the two applies. Video budgets cover the whole clip.
    """

    image_min_pixels: int | None = None
    """fewest pixels of an image, after resizing; default: the checkpoint's processor's"""
    image_max_pixels: int | None = None
    """most pixels of an image, after resizing; default: the checkpoint's processor's"""
    image_max_tokens: int | None = None
    """most tokens of an image; the smaller of this and --image-max-pixels holds"""
    video_min_pixels: int | None = None
    """fewest pixels of a whole clip, after resizing; default: the checkpoint's processor's"""
    video_max_pixels: int | None = None
    """most pixels of a whole clip, after resizing; default: the checkpoint's processor's"""
    video_max_tokens: int | None = None
    """most tokens of a whole clip; the smaller of this and --video-max-pixels holds"""
    video_fps: float | None = None
    """number of frames to sample from a second; default: the checkpoint's processor's"""
    video_max_frames: int | None = None
    """most frames to sample from a clip; default: the checkpoint's processor's"""

    def __post_init__(self) -> None:
        for budget in fields(self):
            value = getattr(self, budget.name)
            if value is not None and not 0 < value < inf:
                raise BadInput(f"{flag_of(budget.name)} is {value}; it must be above 0.")

    def over(self, of_run: MediaLimits) -> MediaLimits:
        """Return these budgets of a data set, and the run's where it has none.

        A most of pixels or of tokens replaces both of the run's.
        """
        if self.image_max_pixels or self.image_max_tokens:
            of_run = replace(of_run, image_max_pixels=None, image_max_tokens=None)
        if self.video_max_pixels or self.video_max_tokens:
            of_run = replace(of_run, video_max_pixels=None, video_max_tokens=None)
        return replace(of_run, **{k: v for k, v in asdict(self).items() if v is not None})

    def apply(self, processor: Any) -> None:
        """Set these budgets on an HF ``Qwen3VLProcessor``, in place.

        Raises:
            BadInput: a lower budget exceeds the upper one.
        """
        images, videos = processor.image_processor, processor.video_processor
        token_pixels = (images.patch_size * images.merge_size) ** 2
        _set_size(
            *(images, "image", self.image_min_pixels, self.image_max_pixels),
            self.image_max_tokens and self.image_max_tokens * token_pixels,
        )
        # One video token covers temporal_patch_size frames.
        token_pixels *= videos.temporal_patch_size
        _set_size(
            *(videos, "video", self.video_min_pixels, self.video_max_pixels),
            self.video_max_tokens and self.video_max_tokens * token_pixels,
        )
        if self.video_fps is not None:
            videos.do_sample_frames, videos.num_frames, videos.fps = True, None, self.video_fps
        if (most := self.video_max_frames) is not None:
            if not videos.do_sample_frames:  # all frames, up to the limit
                videos.do_sample_frames, videos.num_frames, videos.fps = True, None, None
            if videos.num_frames is not None:
                videos.num_frames = min(videos.num_frames, most)
            videos.max_frames = most
            videos.min_frames = min(videos.min_frames, most)


MEDIA_BUDGETS = tuple(budget.name for budget in fields(MediaLimits))
"""The names of the fields of :class:`MediaLimits`."""


def _set_size(processor: Any, kind: str, least: int | None, *most: int | None) -> None:
    """Set the pixel budgets of a processor; None keeps its own, if that fits the other budget.

    The smallest of the upper budgets `most` holds.
    """
    upper = min(filter(None, most), default=processor.size["longest_edge"])
    # A budget below the processor's minimum lowers that minimum, unless min_pixels sets it.
    lower = least or min(processor.size["shortest_edge"], upper)
    if lower > upper:
        raise BadInput(
            f"The {kind} budget is empty: at least {lower} but at most {upper} pixels. Lower "
            f"{kind}_min_pixels or raise {kind}_max_pixels (or {kind}_max_tokens)."
        )
    processor.size = type(processor.size)(shortest_edge=lower, longest_edge=upper)


LEAST_PACKING_BUFFER = 128
"""The default of ``--packing-buffer`` for packs of up to 8,192 tokens, and in earlier versions of
all."""


def default_packing_buffer(seq_length: int) -> int:
    """Return the samples of a buffer that fills as many long packs as short ones.

    They are sorted into rows of nearly equal work: with few packs, the last of a row is much
    smaller than its first, for which all ranks wait.
    """
    return max(LEAST_PACKING_BUFFER, LEAST_PACKING_BUFFER * seq_length // 8192)


@dataclass(frozen=True)
class DataConfig:
    """Settings for turning samples into batches; the docstring of a field is its flag's help."""

    seq_length: int
    packing: bool = False
    """put several samples into a sequence (THD); default: one sample a row, padded"""
    micro_batch_size: int = 1
    """Rows of a batch; must be 1 with packing."""
    pad_to_longest: bool = False
    """without --packing: pad rows to the longest of their batch; on by default unless --seq-length
    is given, to which all rows are then padded"""
    length_multiple: int = 1
    """Every packed sample or padded row has a multiple of this length: 2 x CP for context
    parallelism, times TP for sequence parallelism."""
    overlong: Literal["drop", "truncate"] = "drop"
    """samples longer than --seq-length are left out, or their tail is cut, but never inside an
    image"""
    packing_buffer: int | None = None
    """number of samples among which the packer chooses; with --balance, for each data-parallel
    rank; default: 128 for packs of up to 8192 tokens, and in proportion more for longer ones"""
    balance: bool = False
    """make packs of equal work for all data-parallel ranks; measures every sample once, before
    training; default: with --packing, except for preference losses and --task, where each rank
    packs its own part by length"""
    micro_batches: int = 1
    """Micro-batches of a rank in a step; `balance` spreads large and small packs over steps."""
    shuffle: bool = True
    """a new permutation of the samples in each epoch; --no-shuffle: their order"""
    shuffle_buffer: int = 100
    """of tars: number of samples among which the next is drawn"""
    max_bad_fraction: float = 0.05
    """stop when more than this share of the data set is bad"""
    bad_fraction_floor: int = 100
    """count at least this many records for --max-bad-fraction, so that a few bad ones at the start
    do not stop the run"""
    counts_again: bool = False
    """Whether a bad record counts whenever it is read, as in each validation, and not only once."""
    max_sample_seconds: float = 60.0
    """skip a sample as bad if its hook, template or decoding takes longer; 0: no limit"""
    # Decoding takes about 20 bytes a pixel. The default is the size from which PIL warns; PIL
    # itself refuses images of twice as many.
    max_decoded_pixels: int = 89_478_485
    """skip a sample as bad if an image, or a frame of a video, has more pixels in its file, before
    resizing"""
    trust_data: bool = False
    """run the Python code that an energon metadataset or a WebDataset names; default: such data
    sets are refused"""
    document_end: str | None = None
    """token text that ends a pretraining document; default: the tokenizer's pad token, which is
    <|endoftext|> in Qwen's tokenizers"""
    allow_dropped: bool = False
    """use samples although the chat template leaves some of their text out, and name what it leaves
    out; default: such samples are bad"""
    records: RecordForm | None = None
    """How the loss reads records; None: it predicts tokens of conversations and documents."""
    inputs: type[TaskInputs] | None = None
    """What a batch holds for the loss, of what its records give."""
    sidecar: Sidecar | None = None
    """What the loss reads beside each data set; None: nothing."""
    media_limits: MediaLimits = field(default_factory=MediaLimits)

    def __post_init__(self) -> None:
        if self.seq_length < 1 or self.micro_batch_size < 1 or self.length_multiple < 1:
            raise BadInput("seq_length, micro_batch_size and length_multiple must be positive.")
        if self.packing_buffer is not None and self.packing_buffer < 1:
            raise BadInput(f"--packing-buffer is {self.packing_buffer}; it must be at least 1.")
        if not self.max_sample_seconds >= 0:
            raise BadInput(
                f"--max-sample-seconds is {self.max_sample_seconds}; it must be at least 0, which "
                "is no limit."
            )
        if self.seq_length % self.length_multiple:
            raise BadInput(
                f"seq_length {self.seq_length} is not a multiple of {self.length_multiple}, which "
                "the context- and sequence-parallel split needs. Round it."
            )
        if self.packing and self.micro_batch_size != 1:
            raise BadInput(
                f"--micro-batch-size is {self.micro_batch_size} with --packing: a packed "
                "micro-batch is one sequence. Use --micro-batch-size 1 and raise --seq-length."
            )
        if self.balance and not self.packing:
            raise BadInput("--balance needs packing: add --packing, or leave --balance out.")
        if self.packing and self.pad_to_longest:
            raise BadInput("--pad-to-longest has no meaning with --packing: leave one of them out.")
        if self.overlong not in ("drop", "truncate"):
            raise BadInput(f"overlong is {self.overlong!r}; it must be 'drop' or 'truncate'.")
        if self.overlong == "truncate":
            for read in (self.records, self.sidecar):
                if read is not None and read.uncut:
                    raise BadInput(read.uncut)
        if not 0 <= self.max_bad_fraction <= 1:
            raise BadInput(
                f"--max-bad-fraction is {self.max_bad_fraction}; it must be a share from 0 to 1."
            )
        if not 0 < self.max_decoded_pixels <= _PIL_DECODES:
            raise BadInput(
                f"--max-decoded-pixels is {self.max_decoded_pixels:,}; it must be above 0, and at "
                f"most {_PIL_DECODES:,}, since PIL decodes no larger image."
            )

    @property
    def buffer(self) -> int:
        """The number of samples among which the packer chooses."""
        return self.packing_buffer or default_packing_buffer(self.seq_length)

    def padded(self, *lengths: int) -> int:
        """Return the sum of the lengths, each rounded up to a multiple of `length_multiple`."""
        return sum(-(-length // self.length_multiple) for length in lengths) * self.length_multiple


@dataclass(frozen=True)
class Source:
    """A data set, its weight in a blend, and how its records are read."""

    path: Path
    weight: float = 1.0
    epochs: float | None = None
    """How often the data set is read in an epoch of the blend; set for all data sets or none."""
    reading: Reading = field(default_factory=Reading)
    media_root: Path | None = None
    """Folder that relative paths of media start from; None: the data's own folder."""
    limits: MediaLimits = field(default_factory=MediaLimits)
    """Budgets of this data set; those that are set replace the run's. A most of pixels or of tokens
    replaces both of the run's, since a token is so many pixels."""
    max_samples: int | None = None
    """Number of samples to read, from the first; None: all."""
    name: str | None = None
    """Name of this data set's loss in the log; None: the path."""


_TEXTS = ("preprocess", "format", "system", "train_on")
_NUMBERS: dict[str, type] = {"weight": float, "epochs": float, "max_samples": int}
_BUDGETS: dict[str, type] = {
    name: float if hint == float | None else int
    for name, hint in get_type_hints(MediaLimits).items()
}
_LARGEST = 1e300
"""The largest number of a mixture file; an integer above it has no weight in floats."""
_OF_YAML = {"datasets", "splits", "__class__"}
"""Keys of a YAML file, one of which says that it is a mixture file or a metadataset."""
_KEYS = {
    **dict.fromkeys(("path", "name", "media", *_TEXTS), str),
    "chat_template_kwargs": dict,
    **_NUMBERS,
    **_BUDGETS,
}


def parse_sources(words: Sequence[str], defaults: Reading = PLAIN) -> list[Source]:
    """Read ``PATH`` or ``WEIGHT PATH WEIGHT PATH ...``, as in Megatron's ``--data-path``.

    A mixture file among the paths is replaced by its data sets. Hook, turns and arguments of the
    template are those of `defaults` for data sets that name none.

    Raises:
        BadInput: numbers and paths do not alternate, or a mixture file is malformed.
    """
    weights, paths = (["1"], words) if len(words) == 1 else (words[0::2], words[1::2])
    try:
        numbers = [float(weight) for weight in weights]
    except ValueError:
        numbers = []
    if not words or len(numbers) != len(paths) or not all(0 < n < inf for n in numbers):
        raise BadInput(
            f"The data path {' '.join(words)!r} is neither one path nor positive weights and "
            "paths in turn, like '0.3 a.jsonl 0.7 b.jsonl'."
        )
    sources = [
        source
        for path, number in zip(paths, numbers, strict=True)
        for source in _expand_mixture(Path(path), number)
    ]
    if len({source.epochs is None for source in sources}) > 1:
        raise BadInput(
            "Some data sets have epochs and some have weights. Give all of them epochs, or all "
            "of them weights."
        )
    return [replace(source, reading=source.reading.with_defaults(defaults)) for source in sources]


def names_to_log(sources: Sequence[Source]) -> tuple[str, ...]:
    """Return the name of each source in the log; nothing if one name would be for them all."""
    names = tuple(source.name or str(source.path) for source in sources)
    return names if len(set(names)) > 1 else ()


def require_data_set(path: Path) -> Path:
    """Return `path` if it exists; raise BadInput if it does not, or is or holds a pipe or device.

    Only what lies directly in a folder is looked at: its shards, and indexes beside them.
    """
    if not path.exists():
        raise BadInput(f"The data set {path} does not exist; check the path.")
    if not (path.is_file() or path.is_dir()):  # reading one waits, or never ends
        raise BadInput(f"The data set {path} is a pipe or a device; name a file or a folder.")
    refuse_special_files(path, of_data=True)
    return path


def _expand_mixture(path: Path, weight: float) -> list[Source]:
    """Return the data sets of `path`, if it is a mixture file and not data or a metadataset."""
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return [Source(path, weight)]
    content = _read_yaml(path)
    # A file that names code, by a key such as __function__, is refused as such where it is loaded.
    if not isinstance(content, Mapping) or not any(
        key in _OF_YAML or str(key).startswith("__") for key in content
    ):
        raise BadInput(
            f"{path} is neither a mixture file, which has the key datasets, nor an energon "
            "metadataset, which has splits."
        )
    if "datasets" not in content:
        return [Source(path, weight)]
    if other := sorted(set(content) - {"datasets"}):
        raise BadInput(f"{path}: unknown key {other[0]!r}; the only key is datasets.")
    entries = content["datasets"]
    if not isinstance(entries, list) or not entries:
        raise BadInput(f"{path}: datasets must be a list with at least one entry.")
    sources = [
        _parse_source(entry, f"{path}: data set {i}", path) for i, entry in enumerate(entries, 1)
    ]
    total = sum(source.weight for source in sources)
    return [replace(source, weight=weight * source.weight / total) for source in sources]


def _read_yaml(path: Path) -> Any:
    import yaml  # here, because every command imports this module

    try:
        return require_spelled_out(yaml.safe_load(path.read_text(encoding="utf-8")))
    # ValueError: it is no UTF-8, has an integer of thousands of digits, or aliases without end.
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise BadInput(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error


def _parse_source(entry: Any, where: str, file: Path) -> Source:
    """Parse one entry of a mixture file, in whose folder its paths start."""
    if not isinstance(entry, Mapping) or "path" not in entry:
        raise BadInput(f"{where} must be an object with a path.")
    for key, value in entry.items():
        _check_entry_value(key, value, where)
    if "weight" in entry and "epochs" in entry:
        raise BadInput(f"{where} has both weight and epochs; keep one of them.")
    if "format" in entry and (name := entry["format"]) not in (names := _format_names()):
        raise BadInput(f"{where}: format is {name!r}; the formats are {', '.join(names)}.")
    if "preprocess" in entry and "format" in entry:
        raise BadInput(
            f"{where} has both preprocess and format; keep one of them. The keys of the hook's "
            "records show their format."
        )

    try:
        arguments = json.dumps(parse_template_kwargs(entry.get("chat_template_kwargs")))
    except (BadInput, TypeError, ValueError) as error:  # YAML has dates, and objects as keys
        raise BadInput(f"{where}: {error}") from error

    def values_of(keys: Iterable[str]) -> dict[str, Any]:
        return {key: entry[key] for key in keys if key in entry}

    here = file.absolute().parent
    if (inner := here / entry["path"]).suffix in (".yaml", ".yml") and inner.is_file():
        content = _read_yaml(inner)
        if isinstance(content, Mapping) and "datasets" in content:
            raise BadInput(
                f"{where} is a mixture file itself, {entry['path']}: write its data sets here."
            )
    return Source(
        here / entry["path"],
        reading=Reading(
            **values_of(_TEXTS),
            chat_template_kwargs=arguments,
        ).at_folder(here),
        media_root=here / entry["media"] if "media" in entry else None,
        limits=MediaLimits(**values_of(_BUDGETS)),
        name=entry.get("name", entry["path"]),
        **values_of(_NUMBERS),
    )


def _check_entry_value(key: str, value: Any, where: str) -> None:
    """Raise BadInput if a key is unknown, or its value has another type or is not above 0."""
    kind = _KEYS.get(key)
    if kind is None:
        raise BadInput(f"{where}: unknown key {key!r}; the known keys are {', '.join(_KEYS)}.")
    accepted = (int, float) if kind is float else (kind,)
    if not isinstance(value, accepted) or isinstance(value, bool):
        name = "an object" if kind is dict else kind.__name__
        raise BadInput(f"{where}: {key} is {value!r:.60}; {name} is needed.")
    if isinstance(value, int | float) and not 0 < value <= _LARGEST:
        raise BadInput(f"{where}: {key} is {value!r}; it must be above 0, and finite.")


def _format_names() -> list[str]:
    from mcore_qwen3vl.data.records.parse import FORMATS

    return [form.name for form in FORMATS]
