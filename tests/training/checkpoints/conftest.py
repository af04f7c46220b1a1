"""The converters' tiny checkpoints."""

from tests.converters.conftest import tiny  # noqa: F401
