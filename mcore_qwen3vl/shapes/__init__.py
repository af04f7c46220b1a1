"""``config.json`` of the six published models, for tests, benchmarks and estimates."""

from __future__ import annotations

from pathlib import Path

SHAPES = Path(__file__).parent
"""The folder of 2b.json, 4b.json, 8b.json, 32b.json, 30b_a3b.json and 235b_a22b.json."""
