"""Arguments and options that name a checkpoint or a data set.

A path that does not exist is refused while the command line is read, before torch is imported.
"""

from pathlib import Path
from typing import Any

import typer

from mcore_qwen3vl.errors import BadInput


def argument(metavar: str, help: str) -> Any:
    """Return an argument for a checkpoint, whose weights are downloaded if needed."""
    return typer.Argument(metavar=metavar, help=help, parser=_checkpoint)


def option(help: str) -> Any:
    """Return an option for a checkpoint's config, tokenizer and processor, without its weights."""
    return typer.Option(metavar="DIR", help=help, parser=_config)


def weights_option(metavar: str, help: str) -> Any:
    """Return an option for a checkpoint or an adapter, which is downloaded if needed."""
    return typer.Option(metavar=metavar, help=help, parser=_checkpoint)


def adapter_option(help: str) -> Any:
    """Return an option for a PEFT adapter."""
    return weights_option("ADAPTER", help)


def data_argument(help: str) -> Any:
    """Return an argument for a data set of any kind."""
    return typer.Argument(metavar="DATA", help=help, parser=_data_set)


def _checkpoint(name: str) -> Path:
    return _there(_resolved(name, weights=True))


def _config(name: str) -> Path:
    return _there(_resolved(name))


def _data_set(name: str) -> Path:
    from mcore_qwen3vl.data.loading.sources import require_data_set

    return require_data_set(Path(name))


def _resolved(name: str, *, weights: bool = False) -> Path:
    from mcore_qwen3vl.converters.hf.hub import resolve

    return resolve(name, weights=weights)


def _there(path: Path) -> Path:
    if not path.exists():
        raise BadInput(f"{path} does not exist: check the path, or name a hub id, OWNER/NAME.")
    return path
