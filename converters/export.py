"""Export Hugging Face tensors, checkpoints and adapters from a running model of any layout.

Collectives gather the parts of each tensor from the ranks that hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain, groupby
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_qwen3vl.config import Architecture, ExpertLayout, read_config_file
from mcore_qwen3vl.converters.adapters.adapter import Factors, add_update, write_adapter
from mcore_qwen3vl.converters.adapters.config import AdapterConfig, HFConfig, Slot, apply_with_peft
from mcore_qwen3vl.converters.hf import shards
from mcore_qwen3vl.converters.hf.companions import copy_companions
from mcore_qwen3vl.converters.hf.config_file import Changes, dtype_to_state
from mcore_qwen3vl.converters.hf.hf_checkpoint import holder_of_mtp
from mcore_qwen3vl.converters.identify import INDEX, identify
from mcore_qwen3vl.converters.live import Models, Overlap, factor_parts, hf_parts, table_of, unwrap
from mcore_qwen3vl.converters.mapping.forms import (
    INPUT_EMBEDDING,
    LM_HEAD,
    Names,
    names_in_transformers,
)
from mcore_qwen3vl.converters.mapping.table import MTP, hf_shapes, table
from mcore_qwen3vl.converters.offline.engine import group_units
from mcore_qwen3vl.converters.storage.archive import as_bytes
from mcore_qwen3vl.converters.storage.boxes import Shape
from mcore_qwen3vl.converters.storage.disk import DirectFile
from mcore_qwen3vl.converters.storage.dtypes import dtype_name
from mcore_qwen3vl.converters.storage.staging import Staging, staging, write_durably
from mcore_qwen3vl.errors import BadInput

BUCKET_BYTES = 256 * 2**20
"""Most bytes of tensors that are gathered at once; a larger tensor is gathered by itself."""


def export_hf(
    models: Models, *, expert_layout: ExpertLayout | None = None, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, Tensor]]:
    """Yield transformers' names and whole tensors, in the order of the network, on every rank.

    This is a collective: every rank must exhaust the iterator. The tensors of one bucket
    share memory, which is freed once none of them is referenced.

    Args:
        expert_layout: layout of the fused experts; default: the one that the model's config
            declares.
        bucket_bytes: memory to gather into, besides the model; only a larger tensor exceeds it.

    Yields:
        (name, tensor) in the model's dtype, on the model's device, bitwise as trained.

    Raises:
        BadInput: the ranks do not hold the whole model, or hold parts of a tensor in different
            dtypes.
    """
    exporter, names = Gatherer.of_model(models, expert_layout), _names_of(models)
    for bucket in exporter.buckets(bucket_bytes):
        yield from names.store(exporter.gather(bucket)).items()


def _names_of(models: Models) -> Names:
    """Return how transformers calls the tensors of a running model."""
    return names_in_transformers(has_vision=unwrap(models)[0].architecture.has_vision)


def save_hf(
    models: Models,
    path: str | Path,
    *,
    hf_config: str | Path,
    max_shard_size: str = "5GB",
    force: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
    changed_files: Mapping[str, bytes] | None = None,
) -> None:
    """Write a Hugging Face checkpoint; the files are those of the offline export.

    This is a collective. The ranks take turns: each writes its bucket while the next is gathered.
    They write into the same files, so `path` must be on a file system that they share. It appears
    complete or not at all.

    Args:
        hf_config: directory of the model's config, tokenizer and processor; the config decides the
            layout of the fused experts. If the folder has weights too, the weights of MTP layers
            are copied from it where the running model has none.
        max_shard_size: largest safetensors file, like "5GB".
        force: replace `path` if it is a checkpoint.
        changed_files: content, by name, in place of that of the files of `hf_config`; further ones
            are written, too.

    Raises:
        BadInput: a rank cannot write, or the ranks do not hold the whole model in one dtype per
            tensor; raised on every rank.
    """
    path, hf_config = Path(path), Path(hf_config)
    architecture = Architecture.from_hf(hf_config)
    exporter, names = Gatherer.of_model(models, architecture.expert_layout), _names_of(models)
    further = None if unwrap(models)[0].has_mtp else holder_of_mtp(hf_config, architecture)
    entries = {} if further is None else further.entries
    copied = {
        name: shards.TensorSpec(entries[name].dtype, shape)
        for name, shape in hf_shapes(table(architecture, mtp=bool(entries))).items()
        if name.startswith(MTP)
    }
    tensors = names.store(exporter.tensors | copied)
    files = shards.plan_shards(tensors, shards.parse_size(max_shard_size))
    with ExitStack() as stack:
        stage = run_together(lambda: _create_shards(stack, path, files, force), path)
        # Only the first rank has a stage; the others learn its folder.
        first: list[Any] = [stage and stage.tree]
        dist.broadcast_object_list(first)
        thread = stack.enter_context(ThreadPoolExecutor(1))
        writing: Future[None] | None = None
        for number, bucket in enumerate(exporter.buckets(bucket_bytes)):
            turn = number % dist.get_world_size()
            gathered = names.store(exporter.gather(bucket, only=turn))
            if turn != dist.get_rank():
                continue
            # `exception` waits for the previous bucket, which bounds the memory. After an error the
            # rank writes no more, but still joins the collectives.
            if writing is None or writing.exception() is None:
                writing = thread.submit(_write_tensors, first[0], files, gathered)
        run_together(lambda: writing and writing.result(), path)
        changes = Changes(
            dtype=dtype_to_state(read_config_file(hf_config), tensors.values()),
            labels=unwrap(models)[0].head_labels,
            files=changed_files or {},
        )

        def publish() -> None:
            if stage is None:  # on all ranks but the first
                return
            if further is not None:  # it has what the running model has not
                for name in copied:  # all forms call them alike
                    _write_tensors(stage.tree, files, {name: further.read_tensor(name)})
            copy_companions(hf_config, stage.tree, changes)
            if len(files) > 1:
                write_durably(stage.tree / INDEX, shards.index_json(files))
            stage.publish()

        run_together(publish, path)


class Gatherer:
    """Gathers whole tensors from the ranks that hold their parts.

    Args:
        models: the model, or its virtual pipeline chunks, on whose device the tensors are gathered.
        shapes: shapes of all tensors; the same on all ranks and in the same order.

    Raises:
        BadInput: the ranks do not hold every tensor whole, or hold parts of one in different
            dtypes.
    """

    def __init__(
        self, models: Models, parts: Iterable[Overlap], shapes: dict[str, tuple[int, ...]]
    ) -> None:
        self._device = next(unwrap(models)[0].parameters()).device
        self._parts: dict[str, list[Overlap]] = {}
        for part in parts:
            if part.main:
                self._parts.setdefault(part.name, []).append(part)
        dtypes = self._agree_on_dtypes(shapes)
        self.tensors = {name: shards.TensorSpec(dtypes[name], s) for name, s in shapes.items()}

    @classmethod
    def of_model(cls, models: Models, expert_layout: ExpertLayout | None) -> Gatherer:
        """Make the gatherer of a model's Hugging Face tensors, in the order of the network."""
        parts = hf_parts(models, expert_layout=expert_layout)
        return cls(models, parts, hf_shapes(table_of(unwrap(models), expert_layout)))

    def buckets(self, limit: int) -> Iterator[list[str]]:
        """Yield names of consecutive tensors of one dtype, at most `limit` bytes or one tensor."""
        for _, names in groupby(self.tensors, lambda name: self.tensors[name].dtype):
            for unit in group_units(((n, self.tensors[n].nbytes) for n in names), limit, str):
                yield list(unit.work)

    def gather(self, names: list[str], only: int | None = None) -> dict[str, Tensor]:
        """Return the whole tensors, on every rank or on rank `only`.

        Each rank writes its parts into zeros, and the ranks' memory is summed as integers. Every
        value comes from one rank, so its bits arrive unchanged. With `only`, the result is
        undefined on the other ranks.
        """
        # The memory ends on a multiple of four values, so that it can be summed as int32.
        sizes = [prod(self.tensors[name].shape) for name in names]
        flat = torch.zeros(
            sum(sizes) + -sum(sizes) % 4, dtype=self.tensors[names[0]].dtype, device=self._device
        )
        tensors = {
            name: values.view(self.tensors[name].shape)
            for name, values in zip(names, flat.split([*sizes, -sum(sizes) % 4]), strict=False)
        }
        for name in names:
            for part in self._parts.get(name, ()):
                tensors[name][part.box] = part.local
        if only is None:
            dist.all_reduce(flat.view(torch.int32))
        else:
            dist.reduce(flat.view(torch.int32), dst=only)
        return tensors

    def _agree_on_dtypes(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.dtype]:
        """Check that the ranks hold every tensor whole, in one dtype, and return the dtypes."""
        local_counts = {
            name: (parts[0].local.dtype, sum(part.local.numel() for part in parts))
            for name, parts in self._parts.items()
        }
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, local_counts)
        agreed: dict[str, torch.dtype] = {}
        for name, shape in shapes.items():
            parts = [rank[name] for rank in ranks if name in rank]
            dtypes, count = {dtype for dtype, _ in parts}, sum(numel for _, numel in parts)
            if count != prod(shape) or len(dtypes) != 1:
                kinds = ", ".join(sorted(map(dtype_name, dtypes)))
                raise BadInput(
                    f"The ranks hold {count} of the {prod(shape)} values of {name} "
                    f"({kinds or 'no dtype'}): pass all pipeline chunks of the model, on every "
                    "rank, in one dtype."
                )
            agreed[name] = dtypes.pop()
        return agreed


def _write_tensors(tree: Path, files: Sequence[shards.Shard], tensors: dict[str, Tensor]) -> None:
    """Write gathered tensors to their places in the shards."""
    for shard in files:
        names = [name for name in tensors if name in shard.tensors]
        if not names:
            continue
        with DirectFile(tree / shard.file, create=False) as out:
            for name in names:
                out.seek(shard.offset(name))
                out.write(as_bytes(tensors[name].cpu()))
            out.sync()


def _create_shards(
    stack: ExitStack, path: Path, files: Sequence[shards.Shard], force: bool
) -> Staging | None:
    """Create the files at their full size, on the first rank only."""
    if dist.get_rank() != 0:
        return None
    stage = stack.enter_context(
        staging(path, None, force=force, replaceable=lambda there: identify(there).is_checkpoint)
    )
    for shard in files:
        shard.create(stage.tree)
    return stage


def run_together[Result](work: Callable[[], Result], path: str | Path) -> Result:
    """Run `work` on every rank; if it fails on one, fail on all, so that none waits for it.

    Raises:
        BadInput: `work` raised BadInput or OSError on some rank.
    """
    result: Result | None = None
    error: str | None = None
    try:
        result = work()
    except (BadInput, OSError) as raised:
        error = str(raised)
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for rank, message in enumerate(errors):
        if message is not None:
            raise BadInput(f"Rank {rank} could not save the model to {path}: {message}")
    return result  # type: ignore[return-value]


def save_adapter(
    models: Models,
    path: str | Path,
    *,
    config: AdapterConfig,
    hf_config: HFConfig,
    force: bool = False,
    files: Mapping[str, bytes] = {},
) -> None:
    """Write a PEFT adapter directory: factors, and parameters trained whole, in the model's dtype.

    This is a collective. The first rank gathers everything in host memory and writes it. The
    directory appears complete or not at all.

    Args:
        hf_config: the base model's ``config.json``: its content, the file or its directory.
        force: replace `path` if it is an adapter.
        files: content of further files, by name; the first rank's counts.

    Raises:
        BadInput: the first rank cannot write, or the ranks together do not hold the whole adapter;
            raised on every rank.
    """
    applied = apply_with_peft(config, hf_config)
    targets = applied.slots
    tied = unwrap(models)[0].architecture.tie_word_embeddings
    saved = {name: shape for name, shape in applied.saved.items() if not (tied and name == LM_HEAD)}
    if tied and LM_HEAD in applied.saved:
        # A running model has one weight for both, under the name of the embedding.
        saved[INPUT_EMBEDDING] = applied.saved[LM_HEAD]
    tensors = _gather_on_first(models, saved | _factor_shapes(targets))

    def write() -> None:
        if dist.get_rank() != 0:
            return
        saved_tensors = {name: tensors[name] for name in saved}
        factors = _named_factors(tensors, targets)
        write_adapter(path, config, factors, saved_tensors, hf_config, force=force, files=files)

    run_together(write, path)


def _gather_on_first(models: Models, shapes: dict[str, Shape]) -> dict[str, Tensor]:
    """Return the whole tensors in host memory on the first rank, nothing on the others."""
    with torch.no_grad():
        parts = chain(hf_parts(models, expert_layout="v5"), factor_parts(models))
        gatherer = Gatherer(models, (part for part in parts if part.name in shapes), shapes)
    tensors: dict[str, Tensor] = {}
    for bucket in gatherer.buckets(BUCKET_BYTES):
        gathered = gatherer.gather(bucket, only=0)
        if dist.get_rank() == 0:
            tensors |= {name: tensor.to("cpu", copy=True) for name, tensor in gathered.items()}
    return tensors


def export_merged(
    models: Models,
    targets: Mapping[str, Slot],
    *,
    expert_layout: ExpertLayout | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[tuple[str, Tensor]]:
    """Export like `export_hf`, with s·B·A added.

    This is a collective. The update is added to the gathered tensors, so the model's weights do not
    change. Within float32 rounding, the result is the same as ``lora merge`` gives with the adapter
    of ``save_adapter``.

    Args:
        targets: the adapted parameters of the whole model, as
            :func:`mcore_qwen3vl.converters.adapters.config.resolve_targets` returns them.
        expert_layout: layout of the fused experts; vLLM reads only ``published``.
        bucket_bytes: as in ``export_hf``; a bucket's factors take memory besides.

    Yields:
        (name, tensor) in the model's dtype, on the model's device.

    Raises:
        BadInput: the head of tied embeddings is adapted; a sum is too large for the dtype; or the
            ranks do not hold the whole model and its factors.
    """
    chunks = unwrap(models)
    if chunks[0].architecture.tie_word_embeddings and LM_HEAD in targets:
        raise BadInput(
            "The adapter changes the head, which is tied to the embedding, so one merged "
            "weight cannot serve as both. Export the adapter, and merge it with "
            "`mcore-qwen3vl lora merge`, which writes two tensors."
        )
    weights, stored = Gatherer.of_model(models, expert_layout), _names_of(models)
    gatherer = Gatherer(models, factor_parts(models), _factor_shapes(targets))
    layout = chunks[0].architecture.layout_of_experts(expert_layout)
    for bucket in weights.buckets(bucket_bytes):
        tensors = weights.gather(bucket)
        adapted = {name: targets[name] for name in bucket if name in targets}
        names = list(_factor_shapes(adapted))
        updates = _named_factors(gatherer.gather(names) if names else {}, adapted)
        for name, update in updates.items():
            add_update(tensors[name], update, name, swapped=layout == "published")
        yield from stored.store(tensors).items()


def _factor_shapes(targets: Mapping[str, Slot]) -> dict[str, Shape]:
    """Return the shapes of the factors, by the names that `factor_parts` gives them."""
    return {
        f"{name}.{factor}": shape
        for name, spec in targets.items()
        for factor, shape in (("lora_A", spec.a_shape), ("lora_B", spec.b_shape))
    }


def _named_factors(
    tensors: Mapping[str, Tensor], targets: Mapping[str, Slot]
) -> dict[str, Factors]:
    """Return the factors of each parameter, from tensors named as by `factor_parts`."""
    return {
        name: Factors(tensors[f"{name}.lora_A"], tensors[f"{name}.lora_B"], spec.r, spec.scaling)
        for name, spec in targets.items()
    }
