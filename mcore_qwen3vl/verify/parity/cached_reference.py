"""Hugging Face's model and its results, computed once for each batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.read import read_adapter
from mcore_qwen3vl.converters.mcore.formats import require_huggingface
from mcore_qwen3vl.verify.parity.batches import build_batch
from mcore_qwen3vl.verify.parity.case import DTYPES
from mcore_qwen3vl.verify.parity.peft_reference import PeftReference
from mcore_qwen3vl.verify.parity.reference import AdamW, Expected, Reference, Stepped


class CachedReference:
    """A Hugging Face checkpoint and the reference's results, computed once for each batch.

    Args:
        path: checkpoint directory.
        dtype: dtype of the reference.
        lora: PEFT adapter directory; the reference then trains only the adapter.
        passed: called after each pass of the reference over a batch.
    """

    def __init__(
        self,
        path: str | Path,
        dtype: str = "fp32",
        *,
        lora: str | Path | None = None,
        passed: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = Path(path)
        require_huggingface(self.path)
        self.architecture = Architecture.from_hf(self.path)
        self._dtype = DTYPES[dtype]
        self._passed = passed
        self._lora = None if lora is None else Path(lora)
        self.adapter = None if lora is None else read_adapter(lora, self.path)
        self._reference: Reference | None = None
        self._expected: dict[tuple[str, int], Expected] = {}
        self._stepped: dict[tuple[str, int, AdamW], Stepped] = {}

    def expected(self, batch: str, multiple: int, gradients: bool = True) -> Expected:
        """Return the reference for the batch of this name, with lengths of this multiple."""
        found = self._expected.get((batch, multiple))
        if found is None or (gradients and not found.gradients):
            made = build_batch(batch, self.architecture, multiple=multiple)
            found = self.reference.run(made, gradients=gradients)
            self._expected[batch, multiple] = found
            self._passed()
        return found

    def stepped(self, batch: str, multiple: int, adamw: AdamW) -> Stepped:
        """Return the reference's parameters after an optimizer step on this batch."""
        key = (batch, multiple, adamw)
        if key not in self._stepped:
            self._stepped[key] = self.reference.step(self.expected(batch, multiple), adamw)
        return self._stepped[key]

    @property
    def reference(self) -> Reference:
        if self._reference is None:
            if self._lora is None:
                self._reference = Reference(self.path, dtype=self._dtype)
            else:
                self._reference = PeftReference(self.path, self._lora, dtype=self._dtype)
        return self._reference
