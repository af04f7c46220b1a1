"""What a path is: the one answer to whether it is a checkpoint, whose, and where its parts are.

:func:`identify` judges by the names of files and by the tracker. It opens no weights and imports no
torch. `RULES` is its order of precedence.

The library works on directories. A path may also be a Hugging Face hub id: commands and flags pass
their values through :func:`resolve`, the one place that turns either into a directory.
huggingface_hub downloads files into its cache, and they are read there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import refuse_special_files

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
CHECKPOINT_CONFIG = "metadata.json"
"""The file that Megatron writes last into an iteration's folder, in the format `torch_dist`."""
HF_FOLDER = "hf"
LORA_FOLDER = "lora"
"""Folder in a LoRA run's checkpoint directory that holds the adapter's config."""
LONGEST_ITERATION = 18
"""Most digits in an iteration's number, which megatron keeps in 64 bits."""
_LONGEST_TRACKER = 100  # characters, with spaces around the number
VERL_HF_FOLDER = "huggingface"
VERL_FOLDERS = ("dist_ckpt", "model/dist_ckpt", "actor/dist_ckpt", "actor/model/dist_ckpt")
"""Where VERL saves Megatron's weights, below ``global_step_N`` or its ``actor`` folder.

Since 0.9 they are in ``model``. `VERL_HF_FOLDER` is beside each. VERL 0.9 makes both folders in
every save and leaves one empty unless it was told to save both kinds of weights.
"""

HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?")
"""``owner/name`` or ``owner/name@revision``, where the revision is a branch, tag or commit."""


class FormatFiles(NamedTuple):
    """How one of Megatron's formats is recognised, and the module whose ``FORMAT`` reads it."""

    pattern: str  # of a file below an iteration's folder
    module: str


FORMATS = {
    "torch": FormatFiles("mp_rank_*/model_optim_rng.pt", "mcore_qwen3vl.converters.legacy"),
    "torch_dist": FormatFiles(".metadata", "mcore_qwen3vl.converters.torch_dist"),
}
"""By the value of Megatron's ``--ckpt-format``. To drop one, remove its module and its line."""
DEFAULT_FORMAT = "torch_dist"


class PathKind(StrEnum):
    """What can be done with a path."""

    HUB_ID = "hub id"
    MISSING = "missing"
    ADAPTER = "adapter"
    MEGATRON = "megatron"
    HUGGINGFACE = "huggingface"
    ELSEWHERE = "elsewhere"  # the checkpoint is in a folder below
    CONFIG = "config"
    UNKNOWN = "unknown"


class PathRule(NamedTuple):
    """One form that a path may have.

    Attributes:
        form: its name.
        find: returns the folder of the weights or of the adapter if a path has this form.
        refusal: why it is no whole checkpoint and what to do, with ``{path}`` and ``{folder}``.
    """

    form: str
    kind: PathKind
    find: Callable[[Path], Path | None]
    refusal: str = ""


@dataclass(frozen=True)
class CheckpointPlace:
    """What a path is, by the first of `RULES` that fits it.

    It has no `PathRule`: ranks on GPUs are started with a pickled place, and a lambda has no
    pickle.

    Attributes:
        form, kind, refusal: those of the rule; the last names this path.
        folder: the folder of the weights or of the adapter. Of a run it is the folder that its
            tracker names; this may be missing. For `Kind.ELSEWHERE` it is the one to name instead.
        hf: the folder with the model's ``config.json`` and the files beside it, or that file if
            `path` is one; None if there is none.
        iteration: that of `folder`, or `RELEASE`; None if the folder's name does not tell.
        format: a key of `FORMATS`; None unless the kind is `Kind.MEGATRON`.
        flaw: what is wrong with the tracker; empty if nothing is.
    """

    path: Path
    form: str
    kind: PathKind
    refusal: str
    folder: Path
    hf: Path | None
    iteration: int | str | None
    format: str | None
    flaw: str

    @property
    def is_checkpoint(self) -> bool:
        """Whether it looks like a Megatron or a Hugging Face checkpoint."""
        return self.kind in (PathKind.MEGATRON, PathKind.HUGGINGFACE) and not self.flaw

    def config(self, *, flag: str = "--hf-config") -> Path:
        """Return the folder where config, tokenizer and processor are, or should be.

        Raises:
            BadInput: a Megatron checkpoint has none; the message names the option, `flag`, that
                names another.
        """
        if self.hf is None and self.kind is PathKind.MEGATRON:
            self.weights()  # if the tracker is wrong, that is the cause
            raise BadInput(
                f"{self.path} has no {HF_FOLDER}/{CONFIG}, so the model's shape is "
                "not known. Name a directory with the Hugging Face config and tokenizer: "
                f"{flag} DIR."
            )
        return self.hf or self.path

    def weights(self) -> Path:
        """Return the folder of the weights.

        Raises:
            BadInput: the tracker is unreadable or names an iteration that does not exist, or the
                folder holds a special file.
        """
        if self.flaw:
            raise BadInput(self.flaw)
        refuse_special_parts(self.folder)
        self.require_directory()
        if not self.folder.is_dir():
            raise BadInput(
                f"{self.path / TRACKER} names {self.folder.name}, but {self.folder} does not "
                "exist. Name another iteration's folder, or correct the tracker."
            )
        return self.folder

    def require_megatron(
        self, *, instead: str = "`mcore-qwen3vl convert hf-to-mcore` makes one of it"
    ) -> None:
        """Raise BadInput if it is known to be something else; the message ends in `instead`."""
        self.require_whole()
        if self.kind is PathKind.HUGGINGFACE:
            raise BadInput(
                f"{self.path} is a Hugging Face checkpoint, but a Megatron-Core one is needed "
                f"here: {instead}."
            )

    def require_huggingface(
        self, *, instead: str = "`mcore-qwen3vl convert mcore-to-hf` makes one of it"
    ) -> None:
        """Raise BadInput if it is known to be something else; the message ends in `instead`."""
        self.require_whole()
        if self.kind is PathKind.MEGATRON:
            raise BadInput(
                f"{self.path} is a Megatron-Core checkpoint, but a Hugging Face one is needed "
                f"here: {instead}."
            )

    def require_whole(self, *, or_config: bool = False) -> None:
        """Raise BadInput for what is no whole checkpoint; the message says what to name or do.

        What looks like an incomplete one passes, since its reader says what is missing; so does,
        with `or_config`, any folder that has a config.
        """
        if self.flaw:
            raise BadInput(self.flaw)
        self.require_directory()
        if self.refusal:
            raise BadInput(self.refusal)
        if self.is_checkpoint or (self.kind is PathKind.CONFIG and or_config):
            return
        readable = (f for f in sorted(self.path.iterdir()) if os.access(f, os.R_OK | os.X_OK))
        if inside := [f for f in readable if identify(f).is_checkpoint]:
            raise BadInput(
                f"{self.path} holds no weights itself. Name a checkpoint in it, such as "
                f"{inside[-1]}."
            )
        if self.hf is None:
            raise BadInput(
                f"{self.path} is neither a Hugging Face checkpoint, nor a Megatron-Core one, nor a "
                f"{CONFIG}. Check the path."
            )

    def require_directory(self) -> Path:
        """Return the path; raise BadInput if it is not a directory."""
        if not self.path.is_dir():
            raise BadInput(f"{self.path} is not a directory. Check the path.")
        return self.path

    def require_base(self) -> None:
        """Raise BadInput if it is a LoRA run, or an iteration of one, which can only be resumed."""
        for folder in (self.folder, self.folder.parent):
            if (folder / LORA_FOLDER / ADAPTER_CONFIG).is_file():
                raise BadInput(
                    f"{folder} is a LoRA run, and its checkpoints hold no base weights. Run the "
                    "command that trained it again with --save-hf DIR to write the adapter, then "
                    "use `generate BASE --lora ADAPTER` or `lora merge BASE ADAPTER OUT`."
                )


def refuse_special_parts(folder: Path) -> None:
    """Raise BadInput if an iteration's folder, or a rank's in it, holds a pipe or a device.

    Megatron looks into the ranks' folders whatever the format is, and opening a pipe never ends.
    """
    for part in (folder, *folder.glob("mp_rank_*")):
        refuse_special_files(part)


def identify(source: str | Path) -> CheckpointPlace:
    """Return what a path or hub id is; nothing is fetched."""
    path = Path(source)
    rules = RULES if str(path) == str(source) else RULES[1:]  # ./a/b is no hub id
    rule, folder = next((r, f) for r in rules if (f := r.find(path)) is not None)
    iteration = RELEASE if folder.name == RELEASE else number_of(folder)
    format, flaw, of_run = None, "", iteration is not None
    if rule.kind is PathKind.MEGATRON:
        format, of_run = _format_in(folder) or DEFAULT_FORMAT, True
        try:
            read_tracker(path)
        except BadInput as error:
            flaw = str(error)
    places = [path]
    if rule.kind is not PathKind.HUGGINGFACE:
        places = [path / HF_FOLDER, path, folder / HF_FOLDER, folder]  # Bridge's are in `folder`
        if of_run:
            places += [folder.parent / HF_FOLDER, folder.parent / VERL_HF_FOLDER]
            if (folder.parent / TRACKER).is_file():  # ms-swift's save_safetensors
                places.append(folder.parent)
    there = (place for place in places if (place / CONFIG).is_file())
    hf = path if path.is_file() else next(there, None)
    refusal = rule.refusal.format(path=path, folder=folder)
    return CheckpointPlace(path, rule.form, rule.kind, refusal, folder, hf, iteration, format, flaw)


def read_tracker(path: Path) -> str | int | None:
    """Return what the tracker in `path` names: an iteration, `RELEASE`, or None without a tracker.

    An empty tracker is one of a run that was killed while it wrote it, and names the newest whole
    iteration.

    Raises:
        BadInput: the tracker is unreadable, or names neither an iteration nor `RELEASE`.
    """
    tracker = path / TRACKER
    if not tracker.is_file():
        return None
    try:
        with tracker.open(encoding="ascii") as file:
            said = file.read(_LONGEST_TRACKER).strip()
    except (OSError, ValueError) as error:
        raise BadInput(f"{tracker} cannot be read: {error}. Write the iteration into it.") from None
    if said == RELEASE:
        return RELEASE
    # Megatron empties the file before it writes, once its checkpoint is whole.
    if not said and (newest := _newest_whole_iteration(path)) is not None:
        return newest
    if not said.isdigit() or len(said) > LONGEST_ITERATION:
        raise BadInput(
            f"{tracker} says {said[:40]!r}; a number or 'release' is expected. Write the newest "
            "iteration into it."
        )
    return int(said)


def folder_name(iteration: str | int) -> str:
    """Return the name of the folder of an iteration, or of `RELEASE`."""
    return f"iter_{iteration:07d}" if isinstance(iteration, int) else iteration


def numbered_iterations(path: Path) -> list[int]:
    """Return the numbers of the iterations whose folders are in `path`, in ascending order."""
    numbers = map(number_of, path.glob("iter_*"))
    return sorted(number for number in numbers if number is not None)


def number_of(folder: Path) -> int | None:
    """Return the iteration that a folder's name stands for; None for another name."""
    match = _ITERATION.fullmatch(folder.name)
    return int(match[1]) if match else None


def _newest_whole_iteration(path: Path) -> int | None:
    """Return the newest iteration whose save came to its end; None if there is none."""
    for iteration in reversed(numbered_iterations(path)):
        folder = path / folder_name(iteration)
        format, end = _format_in(folder), folder / CHECKPOINT_CONFIG
        if format and (format != DEFAULT_FORMAT or (end.is_file() and end.stat().st_size)):
            return iteration
    return None


_ITERATION = re.compile(r"iter_(\d+)")


def _finder_of(*names: str) -> Callable[[Path], Path | None]:
    """Return a rule's function: whether a folder directly holds a file of one of these names."""
    return lambda path: path if any((path / name).is_file() for name in names) else None


def _run_of_adapter(path: Path) -> Path | None:
    """Return the adapter's folder above an iteration: ms-swift writes a tracker beside adapters."""
    trained = all((path.parent / name).is_file() for name in (ADAPTER_CONFIG, TRACKER))
    return path.parent if trained and _format_in(path) else None


def _format_in(folder: Path) -> str | None:
    """Return the format of the files in an iteration's folder."""
    return next((name for name, f in FORMATS.items() if any(folder.glob(f.pattern))), None)


def _tracked_iteration(path: Path) -> str | int | None:
    """Return what the tracker names, if it can be read."""
    try:
        return read_tracker(path)
    except BadInput:
        return None


def _newest_verl_step(path: Path) -> Path:
    """Return the newest step's folder if `path` is a run of VERL's; other paths unchanged."""
    newest = _tracked_iteration(path)
    step = path / f"global_step_{newest}"
    return step if isinstance(newest, int) and step.is_dir() else path


def _verl_weights(path: Path) -> Path | None:
    places = [_newest_verl_step(path) / folder for folder in VERL_FOLDERS]
    return next((place for place in places if _format_in(place)), None)


def _verl_huggingface(path: Path) -> Path | None:
    places = [(_newest_verl_step(path) / f).parent / VERL_HF_FOLDER for f in VERL_FOLDERS]
    return next((place for place in places if (place / CONFIG).is_file()), None)


def _tracked_folder(path: Path) -> Path | None:
    """Return the folder that the tracker names; None without one, or beside HF weights alone.

    ms-swift writes a tracker beside Hugging Face weights, with or without Megatron's.
    """
    if not (path / TRACKER).is_file() or _newest_verl_step(path) != path:
        return None
    newest = _tracked_iteration(path)
    # An unreadable tracker still makes a run; `identify` notes the flaw.
    folder = path if newest is None else path / folder_name(newest)
    only_beside = newest is not None and not _format_in(folder) and _finder_of(SINGLE, INDEX)(path)
    return None if only_beside else folder


def _newest_swift_checkpoint(path: Path) -> Path | None:
    named = ((re.fullmatch(r"checkpoint-(\d+)", f.name), f) for f in path.glob("checkpoint-*"))
    steps = {int(match[1]): f for match, f in named if match and (f / TRACKER).is_file()}
    return steps[max(steps)] if steps else None


_ADAPTER = (
    "{path} holds a LoRA adapter, and not the model that it changes. Use both with `generate BASE "
    "--lora {folder}`, or make a whole model of them: `mcore-qwen3vl lora merge BASE {folder} OUT`."
)

RULES = (
    PathRule(
        "a hub id",
        PathKind.HUB_ID,
        lambda path: path if HUB_ID.fullmatch(str(path)) and not path.exists() else None,
    ),
    PathRule("nothing", PathKind.MISSING, lambda path: None if path.exists() else path),
    PathRule("a file", PathKind.CONFIG, lambda path: path if path.is_file() else None),
    PathRule(
        "an adapter beside weights",
        PathKind.ADAPTER,
        lambda path: _finder_of(ADAPTER_CONFIG)(path) and _finder_of(SINGLE, INDEX)(path),
        "{path} holds a whole model and a LoRA adapter, and which is meant is not known. "
        "Move the adapter to a folder of its own.",
    ),
    PathRule("an adapter", PathKind.ADAPTER, _finder_of(ADAPTER_CONFIG), _ADAPTER),
    PathRule("an iteration of an adapter's run", PathKind.ADAPTER, _run_of_adapter, _ADAPTER),
    PathRule("an iteration", PathKind.MEGATRON, lambda path: path if _format_in(path) else None),
    PathRule("a step of VERL's", PathKind.MEGATRON, _verl_weights),
    PathRule("a run, or a conversion", PathKind.MEGATRON, _tracked_folder),
    PathRule("Hugging Face weights", PathKind.HUGGINGFACE, _finder_of(SINGLE, INDEX)),
    PathRule(
        "a step of VERL's without Megatron's weights",
        PathKind.ELSEWHERE,
        _verl_huggingface,
        "{path} was saved by VERL, and its weights are a Hugging Face checkpoint already: name "
        "{folder}.",
    ),
    PathRule(
        "a run of ms-swift's",
        PathKind.ELSEWHERE,
        _newest_swift_checkpoint,
        "{path} is a run of ms-swift's, whose checkpoints are below: name {folder}.",
    ),
    PathRule("a config", PathKind.CONFIG, _finder_of(CONFIG)),
    PathRule("something else", PathKind.UNKNOWN, lambda path: path),
)
"""The forms that a path may have; the first that fits counts.

So a folder with a tracker is a run, even if an export lies in it, unless the tracked iteration has
no Megatron weights."""


SMALL = ("*.json", "*.txt", "*.jinja", "*.model")
"""Config, tokenizer, processor and chat template."""


def resolve(source: str | Path, *, weights: bool = True) -> Path:
    """Return the directory that `source` names, downloading it if it is a hub id.

    Args:
        source: a path or a hub id (``Qwen/Qwen3-VL-2B-Instruct``, or ``...@revision``). An
            existing path has precedence.
        weights: whether to fetch the weights too, or only the files beside them.

    Returns:
        `source` itself if it is a path; for a hub id, the snapshot in huggingface_hub's cache,
        whose files are links. Files in the cache are not fetched again, and with
        ``HF_HUB_OFFLINE=1`` nothing is fetched.

    Raises:
        BadInput: the repository of a hub id cannot be fetched and is not in the cache.
    """
    named = HUB_ID.fullmatch(str(source))
    if named is None or identify(source).kind is not PathKind.HUB_ID:
        return Path(source)
    snapshot = _download_snapshot(named["repo"], named["revision"], weights)
    if weights and not any(snapshot.glob("*.safetensors")):
        raise BadInput(
            f"{source} is in the Hugging Face cache ({snapshot}) without its safetensors weights. "
            f"Run `hf download {named['repo']}` where the hub can be reached."
        )
    return snapshot


def origin_of(path: Path) -> dict[str, str]:
    """Return a checkpoint's origin: hub id and commit of a snapshot in the cache, else its path."""
    path = path.resolve()
    hub_id = hub_id_of(path)
    return {"hub_id": hub_id, "revision": path.name} if hub_id else {"path": str(path)}


def hub_id_of(path: Path, kind: Literal["models", "datasets"] = "models") -> str | None:
    """Return the hub id of a snapshot in the Hugging Face cache; None for another folder."""
    path, prefix = path.absolute(), f"{kind}--"
    repository = path.parent.parent.name
    if path.parent.name != "snapshots" or not repository.startswith(prefix):
        return None
    return repository.removeprefix(prefix).replace("--", "/")


def _download_snapshot(repo: str, revision: str | None, weights: bool) -> Path:
    """Return the folder of a hub repository in the cache, after fetching what it lacks."""
    from huggingface_hub import constants, errors, snapshot_download

    patterns = [*SMALL, *(["*.safetensors"] if weights else [])]
    offline = constants.HF_HUB_OFFLINE
    # By default huggingface_hub 1 asks the hub even about a commit that is in the cache.
    download = partial(snapshot_download, local_files_only=offline)
    try:
        return Path(download(repo, revision=revision, allow_patterns=patterns))
    except errors.GatedRepoError:
        why = "its terms must be accepted first: on its page, then log in with `hf auth login`"
    except errors.RepositoryNotFoundError:
        why = (
            "there is no such repository, or it is private: check the spelling, or log in with "
            "`hf auth login`"
        )
    except errors.RevisionNotFoundError:
        why = f"it has no revision {revision}"
    except Exception as error:
        # Network errors have many classes, from several libraries.
        if offline or isinstance(error, errors.LocalEntryNotFoundError):
            why = (
                f"{'HF_HUB_OFFLINE is set' if offline else 'the hub cannot be reached'}, and the "
                f"cache {constants.HF_HUB_CACHE} does not hold all of it. Run `hf download {repo}` "
                "where the hub can be reached"
            )
        else:
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
    at = f"{repo} at {revision}" if revision else repo
    raise BadInput(f"{at} is not a local path, and as a Hugging Face hub id: {why}.")
