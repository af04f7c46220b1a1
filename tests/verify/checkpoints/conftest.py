"""Tiny checkpoints as the converters' tests have them, written without waiting for the disk."""

from tests.converters.conftest import _no_fsync, tiny  # noqa: F401
