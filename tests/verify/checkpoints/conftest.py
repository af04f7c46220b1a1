"""The converters' tiny checkpoints, written without waiting for the disk."""

from tests.converters.conftest import _no_fsync, tiny  # noqa: F401
