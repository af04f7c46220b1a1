"""A case of the search: a run of training in full, as data that can be drawn, changed and pasted.

Everything that a run depends on is in its case, so two equal cases are one run, and what a case
says in a shell (:func:`paste`) is what was run.
"""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.verification.search import data_files
from mcore_qwen3vl.verification.search.data_files import Form

Flag = tuple[str, ...]
"""A flag of the command line with its values."""

OTHER = "{other}"
"""What stands in a flag for the path of a second model, of the same kind with other weights."""

ADAPTER = "{adapter}"
"""What stands in a flag for the path of a PEFT adapter of the case's model."""

How = Literal["saved", "killed", "SIGTERM", "disk full"]
"""How a run ends early: it saves and leaves (``--exit-interval``), all of its ranks are killed one
step after a checkpoint, they get SIGTERM, or they can write no large file from then on."""

Behind = Literal["score", "generate"]
"""A command that reads the export of a run."""

Start = Literal[
    "published", "transformers", "fp8", "megatron", "megatron-bridge", "ms-swift", "hybrid"
]
"""Where the weights come from: the model as it is published, as transformers writes it once it has
loaded it, in FP8, or its conversion to Megatron-Core, with this package's keys or another's."""

Device = Literal["cpu", "cuda"]

BASE: tuple[Flag, ...] = (
    ("--seq-length", "256"), ("--lr", "1e-3"), ("--lr-decay-style", "constant"),
    ("--num-workers", "0"), ("--log-interval", "1"), ("--micro-batch-size", "1"),
)  # fmt: skip
"""What every run has, unless its case has the same flag."""


@dataclass(frozen=True)
class Stop:
    """An early end of a run, after some steps, and how it goes on.

    Attributes:
        how: how it ends.
        after: the number of steps that a checkpoint certainly holds.
        layout: the layout under which it goes on; None: the same one.
        flags: flags with which it goes on, in place of those of the same name.
    """

    how: How
    after: int
    layout: str | None = None
    flags: tuple[Flag, ...] = ()


@dataclass(frozen=True)
class Case:
    """A run of training.

    Attributes:
        model: options of ``mcore-qwen3vl tiny``, which writes the model; or the path of a model.
        records: the lines of the data, JSON each; pictures in them are named as
            :func:`.data_files.picture` reads it.
        flags: flags besides :data:`BASE`, without paths.
        layout: as :meth:`.Layout.parse` reads it.
        batch: the global batch.
        steps: ``--train-iters``.
        stop: an early end, after which the run goes on.
        validates: whether the records are validation data too, for a validation at the end, and
            before it as ``--eval-interval`` says.
        form: what the data are.
        start: the form of the model with which the run begins.
        behind: with a validation, a command that reads the run's export.
        media: the folder in which the media of the records lie; None: beside them.
        device: what computes the run; ranks share the GPUs of a machine with fewer.
    """

    model: tuple[str, ...] = ()
    records: tuple[str, ...] = ()
    flags: tuple[Flag, ...] = ()
    layout: str = "single"
    batch: int = 2
    steps: int = 2
    stop: Stop | None = None
    validates: bool = False
    form: Form = "jsonl"
    start: Start = "published"
    behind: Behind | None = None
    media: str | None = None
    device: Device = "cpu"

    def has(self, flag: str) -> bool:
        """Return whether the case gives this flag."""
        return any(name == flag for name, *_ in self.flags)

    def value(self, flag: str, otherwise: str = "") -> str:
        """Return the first value of a flag of the case or of :data:`BASE`."""
        given = {name: values for name, *values in (*BASE, *self.flags)}
        return (given.get(flag) or [otherwise])[0]

    def without(self, flag: str) -> Case:
        """Return the case with each of its flags of another name."""
        return replace(self, flags=tuple(one for one in self.flags if one[0] != flag))

    @property
    def is_moe(self) -> bool:
        if path := path_of(self.model):
            return Architecture.from_hf(path).is_moe
        return "--moe" in self.model

    @property
    def has_vision(self) -> bool:
        """Whether the model has a vision tower."""
        if path := path_of(self.model):
            return Architecture.from_hf(path).has_vision
        return "--text-only" not in self.model

    @property
    def parsed(self) -> list[dict[str, Any]]:
        """The records."""
        return [json.loads(line) for line in self.records]

    @property
    def starts_converted(self) -> bool:
        """Whether the run begins with a checkpoint of Megatron-Core."""
        return self.start not in ("published", "transformers", "fp8")

    @property
    def conversion(self) -> dict[str, str]:
        """The options of the conversion with whose checkpoint the run begins."""
        return {} if self.start == "megatron" else {"dialect": self.start}

    @property
    def data(self) -> str:
        """The name of what ``--data-path`` names."""
        return data_files.named(self.form, self.media)

    @property
    def names(self) -> list[str]:
        """What training calls each record: its file and its number there."""
        return data_files.names_of_records(self.form, len(self.records))

    @property
    def by_name(self) -> dict[str, dict[str, Any]]:
        """The records by what training calls them."""
        return dict(zip(self.names, self.parsed, strict=True))

    @property
    def trains_adapter(self) -> bool:
        return self.has("--lora-rank") or self.has("--lora-init")

    def to_json(self) -> str:
        """Return the case as text, which :meth:`of_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: str) -> Self:
        """Read what :meth:`to_json` wrote."""
        held = json.loads(text)
        stop = held.pop("stop")
        if stop is not None:
            stop = Stop(**{**stop, "flags": tuple(map(tuple, stop["flags"]))})
        lists = {key: tuple(held[key]) for key in ("model", "records")}
        return cls(**{**held, **lists, "flags": tuple(map(tuple, held["flags"])), "stop": stop})


def path_of(model: tuple[str, ...]) -> str | None:
    """Return the path of a case's model; None for options of ``mcore-qwen3vl tiny``."""
    return model[0] if model and not model[0].startswith("--") else None


@dataclass(frozen=True)
class Segment:
    """One command of a case: a run from its beginning or a checkpoint to its end or a stop."""

    flags: tuple[Flag, ...]
    layout: Layout
    kill_after: int | None = None
    terminate_after: int | None = None
    full_after: int | None = None

    def words(self, case: Case, folder: str, model: str, other: str) -> list[str]:
        """Return the command line of the run, which lies in `folder`, without ``--processes``.

        The model of the same kind with `other` weights takes the place of :data:`OTHER`.
        """
        named = {name for name, *_ in self.flags}
        words = ["--hf-model", model]
        if case.device == "cpu":
            words += ["--cpu"]
        else:  # where runs have half precision and Transformer Engine unless they say otherwise
            words += ["--fp32"] * (not named & {"--bf16", "--fp16"})
            words += ["--spec", "torch"] * ("--spec" not in named)
        if case.starts_converted:
            words += ["--pretrained-checkpoint", f"{folder}/converted"]
        else:
            words += ["--load-hf", model]
        data = f"{folder}/{case.data}"
        words += ["--data-path", data, "--log-json", f"{folder}/log.jsonl"]
        paths = {OTHER: other, ADAPTER: f"{folder}/adapter"}
        words += [paths.get(word, word) for flag in self.flags for word in flag]
        words += self.layout.flags(moe=case.is_moe)
        if named & {"--save-interval", "--exit-interval"} or case.stop or case.validates:
            words += ["--save", f"{folder}/save"]
        if case.validates:
            words += ["--valid-data-path", data, "--save-hf", f"{folder}/hf"]
        return words


def segments(case: Case) -> list[Segment]:
    """Return the commands of a case, one or two."""
    flags: dict[str, Flag] = {flag[0]: flag for flag in (*BASE, *case.flags)}
    flags["--global-batch-size"] = ("--global-batch-size", str(case.batch))
    if "--num-epochs" not in flags:
        flags["--train-iters"] = ("--train-iters", str(case.steps))
    if case.validates:
        flags.setdefault("--eval-interval", ("--eval-interval", "1000"))
    layout, stop = Layout.parse(case.layout), case.stop
    if stop is None:
        return [Segment(tuple(flags.values()), layout)]
    early: dict[How, Flag] = {
        "saved": ("--exit-interval", str(stop.after)),
        "killed": ("--save-interval", str(stop.after)),
        "SIGTERM": ("--exit-signal-handler",),
        "disk full": ("--save-interval", "1"),
    }
    first = Segment(
        (*flags.values(), early[stop.how]),
        layout,
        kill_after=stop.after + 1 if stop.how == "killed" else None,
        terminate_after=stop.after if stop.how == "SIGTERM" else None,
        full_after=stop.after + 1 if stop.how == "disk full" else None,
    )
    later = flags | {flag[0]: flag for flag in stop.flags}
    if case.has("--save-retain-interval") and early[stop.how][0] == "--save-interval":
        later = {"--save-interval": early[stop.how], **later}  # it must divide the other
    return [first, Segment(tuple(later.values()), Layout.parse(stop.layout or case.layout))]


def paste(case: Case) -> str:
    """Return the case as commands for a shell, which make its model and data and run it."""
    return "\n".join(_lines(case))


def _lines(case: Case) -> Iterator[str]:
    path = path_of(case.model)
    published = path or "model"
    model = {"transformers": "again", "fp8": "in-fp8"}.get(case.start, published)
    yield "mkdir case && cd case"
    if path is None:
        yield shlex.join(["mcore-qwen3vl", "tiny", "model", *case.model])
    for name in data_files.pictures(case.records):
        yield f"base64 -d > {name} <<< {base64.b64encode(data_files.picture(name)).decode()}"
    for name, text in data_files.texts(case.form, case.records, case.media).items():
        yield f"cat > {name} <<'END'"
        yield text.rstrip("\n")
        yield "END"
    if writer := data_files.WRITERS.get(case.form):
        yield from _call("data_files", writer.__name__, "train.jsonl", case.data)
    if any(OTHER in flag for flag in case.flags):
        yield shlex.join(["mcore-qwen3vl", "tiny", "other", *case.model, "--seed", "1"])
    if case.start == "transformers":
        yield from _call("running", "save_again", published, model)
    if case.start == "fp8":
        yield from _call("fp8", "write_fp8", published, model, "values")
    if any(ADAPTER in flag for flag in case.flags):
        base = "values" if case.start == "fp8" else model
        yield from _call("running", "write_adapter", base, "adapter")
    if case.starts_converted:
        options = [word for name, value in case.conversion.items() for word in (f"--{name}", value)]
        yield shlex.join(["mcore-qwen3vl", "convert", "hf-to-mcore", model, "converted", *options])
    for segment in segments(case):
        words = segment.words(case, ".", model, "other")
        ranks = str(segment.layout.world_size)
        yield shlex.join(["mcore-qwen3vl", "train", "--processes", ranks, *words])
        if segment.kill_after:
            yield f"# kill -9 all ranks in step {segment.kill_after}, before the next checkpoint"
        if segment.terminate_after:
            yield f"# send SIGTERM after step {segment.terminate_after}"
        if segment.full_after:
            yield f"# from the end of step {segment.full_after} on, no file may grow (ulimit -f 16)"


def _call(module: str, function: str, *words: str) -> Iterator[str]:
    """Yield lines of a shell that call a function of this package."""
    yield "python - <<'END'"
    yield f"from {__package__}.{module} import {function}"
    yield f"{function}{words!r}"
    yield "END"
