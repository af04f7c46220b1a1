"""Adapters, as the tests of their files have them."""

from tests.converters.adapters.conftest import made  # noqa: F401
