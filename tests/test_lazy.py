"""A module that is named lazily is imported at the first use of something in it."""

from __future__ import annotations

import sys

import pytest

from mcore_qwen3vl.lazy import Lazy


def test_naming_a_module_does_not_import_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Lazy("colorsys")
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    assert "colorsys" not in sys.modules
    assert module.rgb_to_hsv(1.0, 0.0, 0.0) == (0.0, 1.0, 1.0)
    assert "colorsys" in sys.modules


def test_what_a_module_lacks_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such"):
        _ = Lazy("colorsys").no_such
