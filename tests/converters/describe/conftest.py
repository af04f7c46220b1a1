"""The fixture of adapters, shared with the tests of adapter files."""

from tests.converters.adapters.conftest import made  # noqa: F401
