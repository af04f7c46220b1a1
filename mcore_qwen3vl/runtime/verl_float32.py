"""VERL's engine config in float32, which VERL itself refuses."""

from __future__ import annotations

from dataclasses import dataclass

from verl.workers.config import McoreEngineConfig


@dataclass
class Float32EngineConfig(McoreEngineConfig):
    """``megatron._target_`` of a run whose log-probabilities are to be compared exactly."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "dtype", "float32")
