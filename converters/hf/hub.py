"""Checkpoints by Hugging Face hub id: the one place that turns what a user names into a directory.

The library works on directories; commands and flags pass what they are given through `resolve`.
Files are downloaded by huggingface_hub into its cache and read there.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from mcore_qwen3vl.errors import BadInput

HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?")
"""``owner/name`` or ``owner/name@revision``, the revision a branch, tag or commit."""

SMALL = ("*.json", "*.txt", "*.jinja", "*.model")
"""Config, tokenizer, processor and chat template."""

WEIGHTS = ("*.safetensors",)


def resolve(source: str | Path, *, weights: bool = True) -> Path:
    """The directory that `source` means.

    Args:
        source: a path, which wins if it exists, or a hub id: ``Qwen/Qwen3-VL-2B-Instruct``, or
            ``...@revision``.
        weights: fetch the weights too; else only what is beside them.

    Returns:
        `source` itself unless it is a hub id; then the snapshot in huggingface_hub's cache, whose
        files are links. Files that are in the cache are not fetched again, and with
        ``HF_HUB_OFFLINE=1`` no others are.

    Raises:
        BadInput: a hub id that cannot be had.
    """
    path = Path(source)
    named = HUB_ID.fullmatch(str(source))
    if named is None or path.exists():
        return path
    snapshot = _snapshot(named["repo"], named["revision"], weights)
    if weights and not any(snapshot.glob(WEIGHTS[0])):
        raise BadInput(
            f"{source} is in the Hugging Face cache ({snapshot}) without its safetensors weights. "
            f"Run `hf download {named['repo']}` where the hub can be reached."
        )
    return snapshot


def identity(path: Path) -> dict[str, str]:
    """Where a checkpoint comes from: hub id and commit for a snapshot in the cache, else a path."""
    path = path.resolve()
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        hub_id = repository.removeprefix("models--").replace("--", "/")
        return {"hub_id": hub_id, "revision": path.name}
    return {"path": str(path)}


def _snapshot(repo: str, revision: str | None, weights: bool) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    patterns = [*SMALL, *(WEIGHTS if weights else ())]
    offline = constants.HF_HUB_OFFLINE
    # Unless told, huggingface_hub 1 looks up on the hub even what names a commit in the cache.
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
        # What goes wrong on the network has many classes, of several libraries.
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
