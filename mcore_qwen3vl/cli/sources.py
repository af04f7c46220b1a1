"""Arguments and options that name a checkpoint: a path, or a Hugging Face hub id."""

from pathlib import Path
from typing import Any

import typer


def argument(metavar: str, help: str) -> Any:
    """A checkpoint; its weights are downloaded if need be."""
    return typer.Argument(metavar=metavar, help=help, parser=_checkpoint)


def config_argument(metavar: str, help: str) -> Any:
    """A config, or what holds one; no weights are downloaded."""
    return typer.Argument(metavar=metavar, help=help, parser=_config)


def option(help: str) -> Any:
    """A checkpoint of which config, tokenizer and processor are wanted, not the weights."""
    return typer.Option(metavar="DIR", help=help, parser=_config)


def adapter_option(help: str) -> Any:
    """A PEFT adapter; it is downloaded if need be."""
    return typer.Option(metavar="ADAPTER", help=help, parser=_checkpoint)


def _checkpoint(name: str) -> Path:
    from mcore_qwen3vl.converters.hf.hub import resolve

    return resolve(name)


def _config(name: str) -> Path:
    from mcore_qwen3vl.converters.hf.hub import resolve

    return resolve(name, weights=False)
