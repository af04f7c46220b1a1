"""A model card: ``README.md`` with the header that Hugging Face's hub reads, for ``hf upload``.

It depends only on what it is made of, and not on time or machine, and no path of the machine is in
it: folders and files are called by their last name, and models and data sets of the Hugging Face
cache by their hub id.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

from mcore_qwen3vl import __version__
from mcore_qwen3vl.certificate_file import read_to_quote
from mcore_qwen3vl.config import states_vision
from mcore_qwen3vl.console import visible
from mcore_qwen3vl.converters.adapters.config import AdapterConfig
from mcore_qwen3vl.converters.hf.companions import LARGEST, WEIGHTS
from mcore_qwen3vl.converters.identify import (
    HUB_ID,
    CheckpointPlace,
    PathKind,
    identify,
    number_of,
    origin_of,
)
from mcore_qwen3vl.converters.mapping.forms import HEADLESS, HeadForm
from mcore_qwen3vl.converters.offline import manifest
from mcore_qwen3vl.data.config import MEDIA_BUDGETS
from mcore_qwen3vl.flags import flag_of
from mcore_qwen3vl.machine import version_of

FILE = "README.md"
"""The name of a card beside the weights."""
PACKAGES = ("megatron-core", "torch", "transformers")
"""The packages whose versions a card states, beside this one's."""

_GENERATES = ("image-text-to-text", "text-generation")
"""The hub's tags of models that answer, with images and without."""
_OF_THE_LOSS = "settings of the loss"
_SETTINGS: dict[str, tuple[str, ...] | None] = {
    "loss": ("loss", "task"),
    # All that the record has: each loss, of another package too, names its own settings there.
    _OF_THE_LOSS: None,
    "what trains": ("freeze", "trainable"),
    "MTP": ("mtp_num_layers",),
    "length of the run": ("num_epochs", "train_iters", "train_samples"),
    "batch": ("global_batch_size", "step_batch_size_schedule"),
    "row length": ("seq_length",),
    "packs": ("packing", "seq_length"),
    "reading of records": (
        *("preprocess", "train_on", "chat_template_kwargs", "overlong"),
        *MEDIA_BUDGETS,
    ),
    "order": ("seed",),
    "optimizer": ("optimizer",),
    "learning rate": ("lr", "min_lr", "vision_lr_mult", "aligner_lr_mult"),
    "schedule": ("lr_decay_style", "lr_wsd_decay_style"),
    "weight decay": ("weight_decay",),
    "gradient clipping": ("clip_grad",),
    "dropout": ("hidden_dropout", "attention_dropout", "lora_dropout"),
    "precision": ("bf16", "fp16", "fp8", "fp4"),
    "layout": (
        *("tensor_model_parallel_size", "sequence_parallel", "pipeline_model_parallel_size"),
        *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
        "micro_batch_size",
    ),
}
"""What a card says of a run's record, by the rows of its contract; None: the whole row."""
_SAYS_NOTHING = {
    "vision_lr_mult": 1.0, "aligner_lr_mult": 1.0, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "lora_dropout": 0.0, "min_lr": 0.0, "tensor_model_parallel_size": 1, "fp8": None,
    "pipeline_model_parallel_size": 1, "context_parallel_size": 1, "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1, "overlong": "drop",
}  # fmt: skip
"""Values that mean the same as leaving the flag out."""
_OTHERWISE_CALLED = {"fp8": "--fp8-format", "fp4": "--fp4-format"}
_OF_FILES = ("loss", "task", "preprocess")
"""Settings whose value may be a file or a folder, besides those of the loss."""


@dataclass(frozen=True)
class Training:
    """How weights were trained.

    Attributes:
        rows: the record of the run, by the rows of its contract.
        steps: the steps that it has done.
        adapter: the adapter that was trained, if the rest stayed as it was.
    """

    rows: Mapping[str, Mapping[str, Any]]
    steps: int
    adapter: AdapterConfig | None = None


def model_card(
    *,
    base: str | None,
    config: Path,
    head: HeadForm,
    training: Training | None = None,
    quotes: Sequence[str] = (),
) -> bytes:
    """Return the content of a card.

    Args:
        base: what `name_of_model` returns for the first weights of training, or for the converted
            weights; None: not known, or none.
        config: folder of the base's config. If its own card is there, the licence is taken from it.
        head: the head of the weights beside the card.
        quotes: what `quote` returns of certificates.
    """
    from huggingface_hub import ModelCard, ModelCardData

    adapter = training.adapter if training else None
    of_base, data = _header_of(config), _data_of(training)
    relation = "adapter" if adapter else "finetune" if training else None
    header = ModelCardData(
        base_model=base if base and _is_hub_id(base) else None,
        base_model_relation=relation,
        datasets=[name for name, _ in data if _NAME_ON_HUB.fullmatch(name)] or None,
        library_name="peft" if adapter else "transformers",
        license=of_base.get("license"),
        license_name=of_base.get("license_name"),
        license_link=of_base.get("license_link"),
        pipeline_tag=_pipeline_tag(of_base.get("pipeline_tag"), config, head),
        tags=["mcore-qwen3vl", "megatron-core", *(["lora"] if adapter else [])],
    )
    sections = [
        f"# {_title(base, relation)}",
        _facts(base, training),
        _data_section(training, data),
        _table("Training", _settings(training)) if training else "",
        "\n".join(["## Verification", "", *quotes]) if quotes else "",
        _table("Versions", _versions()),
    ]
    body = "\n\n".join(filter(None, sections))
    return f"{ModelCard(f'---\n{header.to_yaml()}\n---\n\n{body}')}\n".encode()


def name_of_model(source: str | Path) -> str:
    """Return a checkpoint's hub id, or its folder's name; that of its source for a conversion."""
    place = identify(source)
    if place.kind is PathKind.HUB_ID:
        named = HUB_ID.fullmatch(str(source))
        assert named is not None
        return named["repo"]
    if hub_id := origin_of(place.path).get("hub_id"):
        return hub_id
    path = place.path.resolve()
    return name_of_source(place) or (path.name if number_of(path) is None else path.parent.name)


def name_of_source(place: CheckpointPlace) -> str | None:
    """Return the name of what a checkpoint was converted from, if it is a conversion of ours."""
    is_ours = place.kind is PathKind.MEGATRON and not isinstance(place.iteration, int)
    made = manifest.find(place.folder) if is_ours else None
    if made is None:
        return None
    origin = manifest.read(made)["source"]
    return origin.get("hub_id") or Path(origin["path"]).name


def note_on_base(base: str | None) -> str | None:
    """Return a sentence on what the header lacks to name the base; None if it lacks nothing."""
    if base is None:
        return f"{FILE} names no base model, since none is known: add it before you upload."
    if _is_hub_id(base):
        return None
    return (
        f"{FILE} has no base_model in its header, since {base} is a folder's name and no hub id: "
        "add it before you upload."
    )


_NAME_ON_HUB = re.compile(r"([\w-]+/)?[\w.-]+", re.ASCII)


def _is_hub_id(name: str) -> bool:
    return HUB_ID.fullmatch(name) is not None


def _header_of(config: Path) -> dict[str, str]:
    """Return what the card in a model's folder says in its header; what is no text is left out."""
    from huggingface_hub import ModelCard

    file = config / FILE
    if not file.is_file() or file.stat().st_size > LARGEST:
        return {}
    try:
        found = ModelCard(file.read_text("utf-8"), ignore_metadata_errors=True).data.to_dict()
    except Exception:  # any error of a parser, since the file is a stranger's
        return {}
    names = ("license", "license_name", "license_link", "pipeline_tag")
    return {n: found[n] for n in names if isinstance(found.get(n), str)}


def _pipeline_tag(of_base: str | None, config: Path, head: HeadForm) -> str:
    if head.is_language_model:
        return of_base or _GENERATES[0 if states_vision(config) else 1]
    # The base may answer, and its tag be of that.
    if of_base is not None and of_base not in _GENERATES:
        return of_base
    return "feature-extraction" if head.kind == HEADLESS else "text-classification"


def _title(base: str | None, relation: str | None) -> str:
    name = visible((base or "a model").rpartition("/")[2])
    words = {"adapter": f"A LoRA adapter of {name}", "finetune": f"{name}, trained further"}
    return words.get(relation or "", name if base else "A converted model")


def _facts(base: str | None, training: Training | None) -> str:
    said = [
        f"Base model: {_linked(base)}." if base else "The base model is not known.",
        "Made with mcore-qwen3vl, on Megatron-Core.",
    ]
    if training is None:
        said[1] = "Converted from Megatron-Core's format to Hugging Face's with mcore-qwen3vl."
    elif training.adapter is not None:
        config = training.adapter
        where = config.target_modules or config.target_parameters or ()
        targets = where if isinstance(where, str) else ", ".join(where)
        said.append(
            f"The adapter has rank {config.r} and alpha {config.lora_alpha:g}"
            + (f", on `{_cell(targets)}`." if targets else ".")
        )
    return " ".join(said)


def _linked(base: str) -> str:
    return f"[{base}](https://huggingface.co/{base})" if _is_hub_id(base) else f"`{_cell(base)}`"


def _data_of(training: Training | None) -> list[tuple[str, float]]:
    """Return the names of the data sets, and their shares; earlier versions recorded no names."""
    names = training.rows.get("data sets", {}).get("names") if training else None
    if training is None or not names:
        return []
    shares = training.rows.get("mixture", {}).get("shares") or [1 / len(names)] * len(names)
    return list(zip(names, shares, strict=False))


def _data_section(training: Training | None, data: Sequence[tuple[str, float]]) -> str:
    if training is None or not data:
        return ""
    lines = ["## Data", ""]
    alone = len(data) == 1
    lines += [f"- `{_cell(name)}`{'' if alone else f', {share:.3%}'}" for name, share in data]
    validated = training.rows.get("validation", {}).get("names", [])
    lines += [f"- `{_cell(name)}`, for validation" for name in validated]
    return "\n".join(lines)


def _settings(training: Training) -> Iterator[tuple[str, str]]:
    yield "steps done", f"{training.steps:,}"
    for row, names in _SETTINGS.items():
        values = training.rows.get(row, {})
        named = ((name, values.get(name)) for name in (values if names is None else names))
        said = [spelt for name, value in named if (spelt := _spelt(row, name, value))]
        if row == "precision" and values and not said:
            said = ["float32"]
        if said:
            yield row, " ".join(f"`{_cell(each)}`" for each in said)


def _spelt(row: str, name: str, value: Any) -> str:
    """Return a setting of a row as a command line has it; nothing for one that was not given."""
    if value in (None, False, []) or (name in _SAYS_NOTHING and value == _SAYS_NOTHING[name]):
        return ""
    flag = _OTHERWISE_CALLED.get(name) or flag_of(name)
    values = [] if value is True else value if isinstance(value, list) else [value]
    if row == _OF_THE_LOSS or name in _OF_FILES:
        values = [_without_folders(str(each)) for each in values]
    return " ".join([flag, *map(str, values)])


def _without_folders(value: str) -> str:
    """Return the last name of a file, a folder or a file's function; a hub id as it is."""
    path, colon, function = value.partition(":")
    is_hub_id = _is_hub_id(path) and not Path(path).exists()
    return value if is_hub_id or "/" not in path else f"{Path(path).name}{colon}{function}"


def quote(file: str | Path) -> str:
    """Return what a certificate says: what was compared, the weights, and the reference.

    Args:
        file: ``report.json`` of ``verify --report``.

    Raises:
        BadInput: it cannot be read, or its findings do not say what its verdict does.
    """
    return "\n".join(_lines_of_quote(Path(file)))


def _lines_of_quote(file: Path) -> Iterator[str]:
    held = read_to_quote(file)
    command = held["command"].split()
    at = command.index("verify") if "verify" in command else len(command)
    kind = " ".join(command[at : at + 2]) or "a comparison in Python"
    environment = held["environment"]
    where = [f"{name} {environment[name]}" for name in ("layout", "spec", "dtype", "device")
             if environment.get(name)]  # fmt: skip
    yield f"- `{_cell(kind)}`: {_cell(held['verdict'])}{_worst(held['findings'])}"
    if where:
        yield f"  - computed with {_cell(', '.join(where))}"
    for one in held["certificate"]["inputs"]:
        hashes = [
            f"`{_cell(name)}` {_cell(str(digest))}"
            for name, digest in one["files"].items()
            if Path(name).suffix in WEIGHTS
        ]
        yield f"  - of `{_cell(name_of_model(one['path']))}`, SHA-256: {'; '.join(hashes)}"
    versions = [f"{n} {environment[n]}" for n in ("mcore-qwen3vl", *PACKAGES) if n in environment]
    yield f"  - with {_cell(', '.join(versions))}"


def _worst(findings: Iterable[Mapping[str, Any]]) -> str:
    """Return the error that is nearest to its limit, if anything was compared to a tolerance."""
    rounded = [f for f in findings if f["tolerance"] and not isinstance(f["relative_error"], str)]
    if not rounded:
        return ""
    worst = max(rounded, key=lambda each: each["relative_error"] / each["tolerance"])
    return (
        f" Nearest to its limit: {_cell(worst['name'])}, off by {worst['relative_error']:.1e} "
        f"(limit {worst['tolerance']:.0e})."
    )


def _versions() -> Iterator[tuple[str, str]]:
    yield "mcore-qwen3vl", __version__
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            yield package, version_of(package)


def _table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"| {name} | {text} |" for name, text in rows]
    return "\n".join([f"## {title}", "", "| | |", "|---|---|", *lines])


def _cell(text: str) -> str:
    """Return a name for a line of Markdown, in which it neither ends code nor a table's cell."""
    return visible(text).replace("`", "'").replace("|", "\\|").replace("\n", " ")
