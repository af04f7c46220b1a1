"""The bridge between Megatron's weights and Hugging Face's: the three methods that VERL calls."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from mcore_qwen3vl.converters.adapters.adapter import is_adapter
from mcore_qwen3vl.converters.adapters.files import read_adapter
from mcore_qwen3vl.converters.live.adapter import export_merged
from mcore_qwen3vl.converters.live.export import export_hf, save_hf, together
from mcore_qwen3vl.converters.live.load import load_hf
from mcore_qwen3vl.converters.live.sharded import load_factors, unwrap
from mcore_qwen3vl.model.lora.adapt import load_saved, whole_tensors
from mcore_qwen3vl.training.lora.lora_run import LoraRun

Chunks = Sequence[nn.Module]


class Bridge:
    """The weights of a policy or a critic, which VERL loads, exports and saves.

    If the model has an adapter, the trained weights are saved, and merged weights are exported.

    Args:
        source: Hugging Face checkpoint that VERL's ``model.path`` names; its config, tokenizer and
            processor are saved with the weights.
        lora: the adapter, if there is one.
    """

    def __init__(self, source: str | Path, lora: LoraRun | None = None) -> None:
        self._source, self._lora = Path(source), lora
        self.optimizer: Any = None

    def load_weights(self, models: Chunks, path: str | Path, **_: Any) -> None:
        """Fill the chunks of this rank, and the optimizer's float32 copies if there are any.

        A critic that starts from a language model keeps its own head.

        Args:
            models: the chunks of this rank.
            path: a Hugging Face checkpoint, or a PEFT adapter that :meth:`save_weights` wrote.
        """
        if is_adapter(Path(path)):
            adapter = read_adapter(path, self._source)
            load_factors(models, adapter.factors)
            load_saved(unwrap(models), whole_tensors(adapter))
        else:
            load_hf(models, path, spare_value_head=True)
        if self.optimizer is not None:  # VERL does not reload; the next step would undo the loading
            self.optimizer.reload_model_params()

    def export_weights(self, models: Chunks) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors for a rollout; every rank must exhaust it. See :func:`export_hf`.

        Experts are always in the ``published`` layout, which vLLM reads.
        """
        if self._lora is None:
            return export_hf(models, expert_layout="published")
        return export_merged(models, self._lora.targets, expert_layout="published")

    def save_weights(self, models: Chunks, path: str | Path) -> None:
        """Write a Hugging Face checkpoint or an adapter into `path`, where VERL has written files.

        They are replaced, the config too: VERL writes the config in the form of the installed
        transformers, which may declare the other expert layout.
        """
        beside = Path(f"{path}.weights")
        if self._lora is None:
            save_hf(models, beside, hf_config=self._source, force=True)
        else:
            self._lora.export(models, beside)
        together(lambda: move_files(beside, Path(path)), path)


def move_files(source: Path, target: Path) -> None:
    """Move every file of `source` into `target`, on the first rank."""
    if dist.get_rank() == 0:
        target.mkdir(parents=True, exist_ok=True)
        for file in source.iterdir():
            file.replace(target / file.name)
        shutil.rmtree(source)
