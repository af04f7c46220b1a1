"""Checkpoints by Hugging Face hub id: the one place that turns a path or hub id into a directory.

The library works on directories; commands and flags pass their values through `resolve`.
huggingface_hub downloads files into its cache, and they are read there.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from mcore_qwen3vl.converters.place import HUB_ID, Kind, identify
from mcore_qwen3vl.errors import BadInput

SMALL = ("*.json", "*.txt", "*.jinja", "*.model")
"""Config, tokenizer, processor and chat template."""

WEIGHTS = ("*.safetensors",)


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
    if named is None or identify(source).kind is not Kind.HUB_ID:
        return Path(source)
    snapshot = _snapshot(named["repo"], named["revision"], weights)
    if weights and not any(snapshot.glob(WEIGHTS[0])):
        raise BadInput(
            f"{source} is in the Hugging Face cache ({snapshot}) without its safetensors weights. "
            f"Run `hf download {named['repo']}` where the hub can be reached."
        )
    return snapshot


def origin_of(path: Path) -> dict[str, str]:
    """Return a checkpoint's origin: hub id and commit of a snapshot in the cache, else its path."""
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
