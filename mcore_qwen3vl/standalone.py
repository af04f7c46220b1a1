"""Qwen3-VL in a program of your own, without Megatron's training loop.

Five calls lead from an empty process to an exported checkpoint: :func:`init_distributed`,
:func:`load_model`, :func:`prepare_batch`, :func:`reduce_gradients` and :func:`save_model`. Each is
a thin call into the packages, which offer more. The same program runs alone on a CPU, alone on a
GPU, or on all ranks of ``torchrun``.

Importing this module imports no part of megatron, so that :func:`init_distributed` can still choose
the CPU.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.console import quiet_megatron
from mcore_qwen3vl.converters.identify import identify
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime import cpu
from mcore_qwen3vl.runtime.gpus import order_transfers
from mcore_qwen3vl.runtime.launch import initialize

if TYPE_CHECKING:
    from mcore_qwen3vl.data.encoding.batch import Batch
    from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel
    from mcore_qwen3vl.model.transformer_config import Spec


def init_distributed(
    layout: Layout | None = None,
    *,
    device: Literal["cpu", "cuda"] | None = None,
    seed: int = 1234,
) -> torch.device:
    """Initialise ``torch.distributed``, Megatron's process groups and its random states.

    Under ``torchrun`` the group is torchrun's ranks; otherwise it is this process alone. Call it
    before anything imports ``megatron.core``, because on the CPU it replaces functions that
    megatron looks up while it is imported. It also suppresses warnings for megatron's developers.

    Args:
        layout: parallel sizes; default: all of them 1.
        device: ``cuda`` (with NCCL) or ``cpu`` (with gloo); default: ``cuda`` if there is a GPU.
        seed: seed of Megatron's random states.

    Returns:
        The device for this rank's model and batches.

    Raises:
        BadInput: the number of ranks is not the layout's, or megatron was imported before the CPU
            backend could be installed.
    """
    quiet_megatron()
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cpu":
        cpu.install()
        chosen = torch.device("cpu")
    else:
        order_transfers()
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(chosen)
    if not dist.is_initialized():
        backend = "gloo" if kind == "cpu" else "nccl"
        if "RANK" in os.environ:  # set by torchrun
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    initialize(layout or Layout(), seed=seed)
    return chosen


def load_model(
    checkpoint: str | Path,
    layout: Layout | None = None,
    *,
    spec: Spec = "torch",
    **config_overrides: Any,
) -> list[Qwen3VLModel]:
    """Build this rank's part of a checkpoint's model and fill it; a collective of all ranks.

    Args:
        checkpoint: a Hugging Face directory, or a Megatron-Core one that holds its ``hf/`` folder.
        layout: the layout that :func:`init_distributed` was given.
        spec: layer spec, ``torch`` or ``te``.
        config_overrides: further ``TransformerConfig`` fields; ``params_dtype=torch.bfloat16``, for
            example, casts the weights as they are read.

    Returns:
        The pipeline chunks of this rank, in training mode on its device: one chunk, unless the
        layout has virtual stages.

    Raises:
        BadInput: the layout does not divide the model, or the checkpoint lacks tensors of the model
            or has others.
    """
    from mcore_qwen3vl.converters.live import load_weights
    from mcore_qwen3vl.model.qwen3vl import build_chunks

    place, layout = identify(checkpoint), layout or Layout()
    architecture = Architecture.from_hf(place.config())
    layout.validate(architecture)
    # Losses are summed over tokens, router losses too: reduce_gradients divides the gradients.
    options = {"calculate_per_token_loss": True, **config_overrides}
    chunks = build_chunks(architecture, layout, spec=spec, **options)
    for chunk in chunks:
        chunk.to(torch.cuda.current_device())  # the CPU, if the CPU backend is installed
    load_weights(chunks, place)
    return chunks


def prepare_batch(
    model: Qwen3VLModel, processor: Any, conversations: Sequence[Sequence[Mapping[str, Any]]]
) -> Batch:
    """Make one padded batch of conversations, with the code that prepares training data.

    Assistant turns are trained, their end-of-turn token included; everything else is masked. Each
    data-parallel rank passes conversations of its own, and all ranks of its model the same ones.

    Args:
        model: one chunk, which tells how sequences must divide and on which device the batch goes.
        processor: the checkpoint's processor, from :func:`mcore_qwen3vl.data.load_processor`.
        conversations: B lists of messages in the form that a line of training data has under
            ``messages``: an image is ``{"type": "image", "image": X}``, a video ``{"type": "video",
            "video": X}``, where X is a path, base64 text or the file's bytes; an image may also be
            a ``PIL.Image``.

    Returns:
        A batch of B rows on the model's device; S tokens is the length of its longest conversation.
        `position_ids` are (3, B, S), `labels` are shifted by one and -100 where `loss_weights`
        are 0, and `visual` holds pixels and indices of all images and videos, or is None.

    Raises:
        BadInput: a conversation is malformed or has no assistant turn, or media cannot be read. The
            message counts conversations from 0.
    """
    from mcore_qwen3vl.data.config import DataConfig, Source
    from mcore_qwen3vl.data.encoding.batch import Batcher
    from mcore_qwen3vl.data.encoding.encoder import Preparation, RawSample
    from mcore_qwen3vl.data.encoding.planning import Plan
    from mcore_qwen3vl.data.records.media import MediaFolder
    from mcore_qwen3vl.data.records.reading import BadSample, OverlongSample
    from mcore_qwen3vl.model.inputs import length_multiple

    groups = model.pg_collection
    multiple = length_multiple(groups.cp.size(), groups.tp.size(), model.config.sequence_parallel)
    longest = model.architecture.max_position_embeddings
    # The longest sequence that the model has positions for and that the layout divides.
    config = DataConfig(longest - longest % multiple, length_multiple=multiple, pad_to_longest=True)
    preparation = Preparation(processor, config, [Source(Path.cwd())])
    plans: dict[str, Plan] = {}
    for index, messages in enumerate(conversations):
        name = f"conversation {index}"
        common = {"__key__": name, "__restore_key__": ()}
        record = {"messages": [_as_in_data_sets(message) for message in messages]}
        try:
            raw = RawSample(**common, record=record, folder=MediaFolder(Path.cwd(), {}), source=0)
            plan = preparation.plan(raw)
            plans[name] = replace(plan, pixels=preparation.load_pixels(plan, raw.source))
        except (BadSample, OverlongSample) as error:
            raise BadInput(f"{name.capitalize()} cannot be used: {error}") from error
    if not plans:
        raise BadInput("There is no conversation to make a batch of: pass at least one.")
    pad_id = processor.tokenizer.pad_token_id
    batcher = Batcher(model.architecture, config, pad_id, preparation.scale)
    batch = batcher.pad(list(plans.values()), list(plans))
    return batch.to(next(model.parameters()).device)


def reduce_gradients(
    models: Qwen3VLModel | Sequence[Qwen3VLModel], num_tokens: Tensor | float
) -> None:
    """Complete the gradients before an optimizer step; a collective of all ranks.

    After ``backward()`` of a loss that is summed over tokens, each rank has the gradients of its
    own tokens. Megatron's ``finalize_model_grads``, called here for a model without Megatron's DDP,
    sums them over DP and CP, over TP and over tied embeddings. Then it divides them by the number
    of tokens of all ranks, which gives the mean of Hugging Face's ``num_items_in_batch``.

    Call it under every layout, once a step, after the last micro-batch. A trained parameter without
    a gradient gets zeros. Gradients are summed in their own dtype. Under TP, PP and EP do not use
    ``torch.nn.utils.clip_grad_norm_``, which would clip by another norm on each rank.

    Args:
        models: this rank's chunks, as :func:`load_model` returns them.
        num_tokens: the number of this rank's trained tokens, or the sum of their weights, over all
            micro-batches since the last step; only the last pipeline stage's is used.

    Raises:
        BadInput: the model is wrapped in Megatron's DDP, which has its own reduction.
    """
    from megatron.core.distributed import finalize_model_grads

    from mcore_qwen3vl.converters.live import unwrap
    from mcore_qwen3vl.model.qwen3vl import WithoutDDP

    chunks = [WithoutDDP(chunk) for chunk in unwrap(models)]
    # A copy, because Megatron reduces in place; float64 holds any count exactly.
    device = next(chunks[0].module.parameters()).device
    total = torch.as_tensor(num_tokens, device=device).detach().double().clone()
    finalize_model_grads(chunks, total)


def save_model(
    models: nn.Module | Sequence[nn.Module],
    path: str | Path,
    *,
    like: str | Path,
    force: bool = False,
) -> None:
    """Write a Hugging Face checkpoint; a collective of all ranks.

    Copies of a parameter on several ranks must agree in every bit, as they do after
    :func:`reduce_gradients`.

    Args:
        models: this rank's chunks, as :func:`load_model` returns them.
        path: directory to write, on a file system that all ranks share.
        like: a checkpoint; its config, tokenizer and processor are copied.
        force: whether to replace `path` if it is a checkpoint.

    Raises:
        BadInput: `path` exists or cannot be written, the ranks do not hold the whole model, or
            copies of a parameter differ.
    """
    from mcore_qwen3vl.converters.export import save_hf
    from mcore_qwen3vl.converters.live import check_replicas

    check_replicas(models)
    save_hf(models, path, hf_config=identify(like).config(), force=force)


def _as_in_data_sets(value: Any) -> Any:
    """Return a message's content in a form that data sets have: PIL images as PNG bytes."""
    from mcore_qwen3vl.data.records.media import to_rgb

    if isinstance(value, Mapping):
        return {key: _as_in_data_sets(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_in_data_sets(item) for item in value]
    if isinstance(value, Image.Image):
        png = io.BytesIO()
        to_rgb(value).save(png, "PNG")
        return png.getvalue()
    return str(value) if isinstance(value, Path) else value
