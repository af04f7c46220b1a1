"""The functions of ``mcore_qwen3vl``, for a program of your own without Megatron's training loop.

Each is a thin call into the packages, which offer more. The same program runs alone on a CPU, alone
on a GPU, or on all ranks of ``torchrun``.

Importing this module imports no part of megatron: Megatron decorates functions for CUDA while it is
imported, so the device is chosen first, by whichever of these functions is called first.
"""

from __future__ import annotations

import atexit
import io
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.console import quiet_megatron
from mcore_qwen3vl.converters.convert import (
    ConversionResult,
    HFOptions,
    McoreOptions,
    hf_to_hf,
    hf_to_mcore,
    mcore_to_hf,
)
from mcore_qwen3vl.converters.identify import PathKind, identify, resolve
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime import cpu
from mcore_qwen3vl.runtime.device import prepare_device
from mcore_qwen3vl.runtime.launch import initialize

if TYPE_CHECKING:
    from mcore_qwen3vl.data.encoding.batch import Batch
    from mcore_qwen3vl.generation.generate import Generation, Stream
    from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel
    from mcore_qwen3vl.model.transformer_config import Spec
    from mcore_qwen3vl.scoring.records import Tally
    from mcore_qwen3vl.verification.report import Report

Device = Literal["cpu", "cuda"]
Form = Literal["megatron", "huggingface"]
Record = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""A record of training data, or its messages alone."""

_FOLDERS: WeakKeyDictionary[nn.Module, Path] = WeakKeyDictionary()
"""The folder with config, tokenizer and processor that each model of `load_model` came with."""


def load_model(
    checkpoint: str | Path,
    layout: Layout | None = None,
    *,
    device: Device | None = None,
    dtype: torch.dtype | None = None,
    spec: Spec = "torch",
    seed: int = 1234,
    **config_overrides: Any,
) -> Qwen3VLModel:
    """Build this rank's part of a checkpoint's model and fill it; a collective of all ranks.

    The first call in a process chooses the device, and initialises ``torch.distributed`` and
    Megatron's process groups and random states, unless that is done. Under ``torchrun`` the ranks
    are torchrun's; otherwise they are this process alone. It also suppresses warnings that are for
    Megatron's developers.

    Args:
        checkpoint: a Hugging Face directory, a Megatron-Core one with its ``hf/`` folder, or a hub
            id.
        layout: parallel sizes; default: all of them 1. A process has one layout.
        device: ``cuda`` (with NCCL) or ``cpu`` (with gloo); default: ``cuda`` if there is a GPU.
        dtype: dtype of the parameters; weights are cast to it as they are read. Default: the dtype
            in the checkpoint's config.
        spec: layer spec, ``torch`` or ``te``.
        seed: seed of Megatron's random states; of the first call in a process.
        config_overrides: further ``TransformerConfig`` fields.

    Returns:
        The model, or this pipeline stage of it, in training mode on the rank's device.

    Raises:
        BadInput: the layout does not divide the model, needs another number of ranks or is not that
            of this process; the checkpoint lacks tensors of the model or has others; an override is
            no field; or the CPU is to be used and megatron was imported before.
    """
    layout = _require_layout(layout)
    if layout.vpp > 1:
        raise BadInput(
            f"Layout {layout} has virtual stages, which are several models on each rank, and only "
            "Megatron's schedule runs them: use `mcore-qwen3vl train`, or leave VPP out."
        )
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise BadInput(f"dtype is {dtype!r:.40}: pass one of torch, such as torch.bfloat16.")
    place = identify(resolve(_require_path("checkpoint", checkpoint)))
    place.require_whole()
    architecture = Architecture.from_hf(place.config())
    layout.validate(architecture)
    _start_rank(layout, _choose_device(device), seed)
    _check_overrides(config_overrides, layout)

    from mcore_qwen3vl.converters.live import load_weights
    from mcore_qwen3vl.model.qwen3vl import build_chunks

    # Losses are summed over tokens, router losses too: reduce_gradients divides the gradients.
    options = {"calculate_per_token_loss": True, **config_overrides}
    if dtype is not None:
        options["params_dtype"] = dtype
    (model,) = build_chunks(architecture, layout, spec=spec, **options)
    model.to(torch.cuda.current_device())  # the CPU, if the CPU backend is installed
    load_weights([model], place)
    _FOLDERS[model] = place.config()
    return model


def _require_layout(layout: Any) -> Layout:
    """Return the layout, by default of one rank; raise BadInput for anything else."""
    if layout is not None and not isinstance(layout, Layout):
        raise BadInput(f"layout is {layout!r:.60}: pass a Layout, such as Layout(tp=2).")
    return layout or Layout()


def _require_path(name: str, value: Any) -> Any:
    """Return a path or hub id; raise BadInput for anything else."""
    if not isinstance(value, str | os.PathLike):
        raise BadInput(f"{name} is {type(value).__name__}: pass the path of a directory, as text.")
    return value


def _check_overrides(overrides: Mapping[str, Any], layout: Layout) -> None:
    """Raise BadInput for what is no field of Megatron's config, or is set by an argument."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    if taken := sorted(layout.config_overrides().keys() & overrides):
        raise BadInput(f"{taken[0]} is one of the layout's sizes: pass it in layout=Layout(...).")
    if "params_dtype" in overrides:
        raise BadInput("params_dtype is the dtype of the model: pass it as dtype=.")
    if unknown := sorted(overrides.keys() - {f.name for f in fields(TransformerConfig)}):
        raise BadInput(
            f"{unknown[0]} is neither an argument nor a field of Megatron's TransformerConfig. "
            "Check the spelling."
        )


def _choose_device(device: str | None) -> Device:
    """Choose the device before megatron is imported, and quiet its warnings.

    Raises:
        BadInput: `device` is not one, or is not usable in this process.
    """
    quiet_megatron()
    if device not in (None, *get_args(Device)):
        raise BadInput(f"device is {device!r:.40}: pass cpu or cuda, or leave it out.")
    if device == "cpu" or (
        device is None and (cpu.is_installed() or not torch.cuda.is_available())
    ):
        prepare_device(cpu=True)
        return "cpu"
    if cpu.is_installed():
        raise BadInput(
            "This process runs on the CPU, as it was told before, so it cannot use CUDA: name "
            "device='cuda' in the first call."
        )
    if not torch.cuda.is_available():
        raise BadInput("There is no GPU here: pass device='cpu', or leave device out.")
    prepare_device(cpu=False)
    return "cuda"


def _start_rank(layout: Layout, device: Device, seed: int) -> None:
    """Initialise ``torch.distributed`` and Megatron on this rank, unless that is done."""
    if device == "cuda" and not dist.is_initialized():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        backend = "gloo" if device == "cpu" else "nccl"
        if "RANK" in os.environ:  # set by torchrun
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            # No other rank waits for this one, so its group can end with the program.
            atexit.register(_leave_group)
    initialize(layout, seed=seed)


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def prepare_batch(model: nn.Module, processor: Any, records: Sequence[Record]) -> Batch:
    """Make one padded batch of records, with the code that prepares training data.

    Assistant turns are trained, their end-of-turn token included; everything else is masked. Keys
    of a record change that as they do in training data (docs/data.md): ``weight`` of a message, for
    example. Each data-parallel rank passes records of its own, and all ranks of its model the same.

    Args:
        model: of :func:`load_model`; it tells how sequences must divide and where the batch goes.
        processor: the checkpoint's processor, from ``load_processor``.
        records: B records, each in a form that a line of training data has: conversations with
            ``messages``, ``tools``, ``images`` and ``videos``, documents, captions. A list of
            messages stands for ``{"messages": [...]}``. An image or a video is a path, base64 text
            or the file's bytes; an image may also be a ``PIL.Image``. Paths are relative to the
            current directory.

    Returns:
        A batch of B rows on the model's device; S tokens is the length of its longest record.
        `position_ids` are (3, B, S), `labels` are shifted by one and -100 where `loss_weights`
        are 0, and `visual` holds pixels and indices of all images and videos, or is None.

    Raises:
        BadInput: a record is malformed, has nothing to train or is of another task, or media cannot
            be read. The message counts records from 0.
    """
    from mcore_qwen3vl.data.config import DataConfig, Source
    from mcore_qwen3vl.data.encoding.batch import Batcher
    from mcore_qwen3vl.data.encoding.planning import Plan
    from mcore_qwen3vl.data.encoding.preparation import Preparation, RawSample
    from mcore_qwen3vl.data.records.media import MediaFolder
    from mcore_qwen3vl.data.records.reading import BadSample, OverlongSample
    from mcore_qwen3vl.model.inputs import length_multiple

    model = _model_of(model)
    if isinstance(records, str | bytes | Mapping) or not isinstance(records, Sequence):
        raise BadInput(f"records is {type(records).__name__}: pass a list of records, also of one.")
    groups = model.pg_collection
    multiple = length_multiple(groups.cp.size(), groups.tp.size(), model.config.sequence_parallel)
    longest = model.architecture.max_position_embeddings
    # The longest sequence that the layout divides, within the model's positions.
    config = DataConfig(longest - longest % multiple, length_multiple=multiple, pad_to_longest=True)
    preparation = Preparation(processor, config, [Source(Path.cwd())])
    plans: dict[str, Plan] = {}
    for index, record in enumerate(records):
        name = f"record {index}"
        common = {"__key__": name, "__restore_key__": ()}
        content = _as_in_data_sets(record)
        content = content if isinstance(content, Mapping) else {"messages": content}
        try:
            raw = RawSample(**common, record=content, folder=MediaFolder(Path.cwd(), {}), source=0)
            plan = preparation.plan(raw)
            plans[name] = replace(plan, pixels=preparation.load_pixels(plan, raw.source))
        except (BadSample, OverlongSample) as error:
            raise BadInput(f"{name.capitalize()} cannot be used: {error}") from error
    if not plans:
        raise BadInput("There is no record to make a batch of: pass at least one.")
    pad_id = processor.tokenizer.pad_token_id
    batcher = Batcher(model.architecture, config, pad_id, preparation.scale)
    batch = batcher.pad(list(plans.values()), list(plans))
    return batch.to(next(model.parameters()).device)


def _as_in_data_sets(value: Any) -> Any:
    """Return a part of a record in a form that data sets have: PIL images as PNG bytes."""
    from mcore_qwen3vl.data.records.media import to_rgb

    if isinstance(value, Mapping):
        return {key: _as_in_data_sets(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_in_data_sets(item) for item in value]
    if isinstance(value, Image.Image):
        png = io.BytesIO()
        to_rgb(value).save(png, "PNG")
        return png.getvalue()
    return str(value) if isinstance(value, Path) else value


def _model_of(model: Any) -> Qwen3VLModel:
    """Return the model without Megatron's wrappers; BadInput for what `load_model` did not make."""
    if isinstance(model, nn.Module):
        from mcore_qwen3vl.converters.live import unwrap
        from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel

        (inner,) = unwrap(model)
        if isinstance(inner, Qwen3VLModel):
            return inner
    raise BadInput(f"model is {type(model).__name__}: pass what load_model returned.")


def reduce_gradients(model: nn.Module, num_tokens: Tensor | float) -> None:
    """Complete the gradients before an optimizer step; a collective of all ranks.

    After ``backward()`` of a loss that is summed over tokens, each rank has the gradients of its
    own tokens. Megatron's ``finalize_model_grads``, called here for a model without Megatron's DDP,
    sums them over DP and CP, over TP and over tied embeddings. Then it divides them by the number
    of tokens of all ranks, which gives the mean of Hugging Face's ``num_items_in_batch``.

    Call it under every layout, once a step, after the last micro-batch. A trained parameter without
    a gradient gets zeros. Gradients are summed in their own dtype. Under TP, PP and EP do not use
    ``torch.nn.utils.clip_grad_norm_``, which would clip by another norm on each rank.

    Args:
        model: of :func:`load_model`.
        num_tokens: the number of this rank's trained tokens, or the sum of their weights, over all
            micro-batches since the last step; only the last pipeline stage's is used.

    Raises:
        BadInput: the model is wrapped in Megatron's DDP, which has its own reduction.
    """
    chunk = _model_of(model)

    from megatron.core.distributed import finalize_model_grads

    from mcore_qwen3vl.model.without_ddp import WithoutDDP

    # A copy, because Megatron reduces in place; float64 holds any count exactly.
    device = next(chunk.parameters()).device
    total = torch.as_tensor(num_tokens, device=device).detach().double().clone()
    finalize_model_grads([WithoutDDP(chunk)], total)


def save_model(
    model: nn.Module, out: str | Path, *, like: str | Path | None = None, force: bool = False
) -> None:
    """Write a Hugging Face checkpoint; a collective of all ranks.

    Copies of a parameter on several ranks must agree in every bit, as they do after
    :func:`reduce_gradients`.

    Args:
        model: of :func:`load_model`, also in Megatron's wrappers.
        out: directory to write, on a file system that all ranks share.
        like: a checkpoint, whose config, tokenizer and processor are copied; default: the
            checkpoint of :func:`load_model`.
        force: whether to replace `out` if it is a checkpoint.

    Raises:
        BadInput: `out` exists or cannot be written, the ranks do not hold the whole model, or
            copies of a parameter differ.
    """
    inner = _model_of(model)
    _require_path("out", out)
    if like is None and inner not in _FOLDERS:
        raise BadInput(
            "The model was not loaded by load_model, so the config to write is not known: name a "
            "checkpoint of the same model with like=."
        )
    folder = _FOLDERS[inner] if like is None else identify(resolve(like, weights=False)).config()

    from mcore_qwen3vl.converters.export import save_hf
    from mcore_qwen3vl.converters.live import check_replicas

    check_replicas(inner)
    save_hf(inner, out, hf_config=folder, force=force)


def generate(
    model: nn.Module,
    processor: Any,
    conversations: Sequence[Record],
    *,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    seed: int | None = None,
    stream: Stream | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[Generation]:
    """Answer a batch of conversations; a collective of all ranks, with equal arguments on each.

    Every data-parallel replica answers all conversations. One rank chooses the tokens.

    Args:
        model: of :func:`load_model`, under a layout without CP.
        processor: the checkpoint's processor, from ``load_processor``.
        conversations: B lists of messages, as Hugging Face's chat templates take them. An image is
            ``{"type": "image", "image": X}`` with a path, a URL or a ``PIL.Image`` for X; a video
            is ``{"type": "video", "video": path}``. A record in place of a list has ``messages``
            in any form of training data, and ``tools``, ``images`` and ``chat_template_kwargs``.
        max_new_tokens: longest answer in tokens; default: the checkpoint's, or else 128.
        temperature: 0 is greedy; default, here and below: the checkpoint's.
        top_p: sample from the likeliest tokens that make up this probability.
        top_k: sample from this many of the likeliest tokens.
        seed: of sampling; default: random.
        stream: called with the number of a conversation and the text that was added to its answer.
        chat_template_kwargs: arguments of the chat template, as ``{"enable_thinking": False}``.

    Returns:
        The answers in the order of the conversations, on every rank, with `text`, `token_ids`,
        `prompt_tokens` and `finish_reason`.

    Raises:
        BadInput: the layout has CP, a value is out of range, media cannot be read, or a prompt is
            too long.
    """
    chunk = _model_of(model)
    from mcore_qwen3vl.generation.generate import generate as answer
    from mcore_qwen3vl.generation.prompts import render_prompt
    from mcore_qwen3vl.generation.sampling import load_generation_config

    def prompt_of(one: Any) -> Any:
        if isinstance(one, Mapping) and "messages" in one:
            return render_prompt(
                _as_in_data_sets(one), processor, chat_template_kwargs=chat_template_kwargs
            )
        if isinstance(one, str | Mapping) or not isinstance(one, Sequence):
            raise BadInput(
                "conversations must be a list of lists of messages, also for one question, or of "
                "records with messages."
            )
        return one

    prompts = [prompt_of(one) for one in conversations]
    folder = _FOLDERS.get(chunk)
    return answer(
        chunk,
        processor,
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stream=stream,
        chat_template_kwargs=chat_template_kwargs,
        generation_config=None if folder is None else load_generation_config(folder),
    )


@dataclass(frozen=True)
class ConversionReport:
    """What :func:`convert` did.

    Attributes:
        result: direction, paths, counts, seconds, and notes of one sentence each.
        comparison: the comparison of source and target, tensor by tensor; None if none was asked.
    """

    result: ConversionResult
    comparison: Report | None

    @property
    def equal(self) -> bool | None:
        """Whether every tensor of the target has the source's bits; None: not compared."""
        return None if self.comparison is None else self.comparison.ok

    def to_dict(self) -> dict[str, Any]:
        """Return all of it in JSON's types."""
        compared = None if self.comparison is None else self.comparison.to_dict()
        return {**asdict(self.result), "equal": self.equal, "comparison": compared}


_DIRECTIONS: dict[tuple[PathKind, str | None], tuple[Callable[..., ConversionResult], set[str]]] = {
    (PathKind.HUGGINGFACE, "megatron"): (hf_to_mcore, {*McoreOptions.__annotations__}),
    (PathKind.MEGATRON, "huggingface"): (mcore_to_hf, {*HFOptions.__annotations__, "hf_config"}),
    (PathKind.HUGGINGFACE, "huggingface"): (hf_to_hf, {*HFOptions.__annotations__, "vocab_size"}),
}
"""The function of each direction and its options, by what the source is and the target's form."""


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    to: Form | None = None,
    compare: bool | None = None,
    **options: Any,
) -> ConversionReport:
    """Convert a checkpoint without a GPU and in little memory; in one process, not on all ranks.

    Args:
        src: a Hugging Face or Megatron-Core checkpoint, or a hub id.
        dst: directory to write; it appears when it is complete.
        to: the form to write; default: the other one.
        compare: whether to read both afterwards and compare every tensor, bit for bit; default:
            unless `dtype` or `vocab_size` ask for other values.
        options: of :func:`mcore_qwen3vl.converters.convert.hf_to_mcore`, ``mcore_to_hf`` or
            ``hf_to_hf``: `dtype`, `force`, `workers`, `progress`, `strict`; to Megatron-Core `tp`,
            `make_vocab_size_divisible_by`, `format`, `layout`, `spec`, `dialect`; to Hugging Face
            `max_shard_size`, `expert_layout`, `hf_config`, `vocab_size`.

    Returns:
        A report with `equal`, `result`, `comparison` and `to_dict()`.

    Raises:
        BadInput: the source cannot be converted exactly with these options, `dst` exists, or
            reading or writing failed, in which case the same call continues.
        CheckFailed: a value is NaN or infinite and `strict` is set.
    """
    _require_one_process("convert")
    if to not in (None, *get_args(Form)):
        raise BadInput(f"to is {to!r:.40}: pass megatron or huggingface, or leave it out.")
    source = resolve(_require_path("src", src))
    place = identify(source)
    place.require_whole()
    to = to or ("megatron" if place.kind is PathKind.HUGGINGFACE else "huggingface")
    if (place.kind, to) not in _DIRECTIONS:
        raise BadInput(f"{src} is a Megatron-Core checkpoint already: pass to='huggingface'.")
    run, known = _DIRECTIONS[place.kind, to]
    if unknown := sorted(options.keys() - known):
        raise BadInput(
            f"{unknown[0]} is no option of a conversion to {to}. It has {', '.join(sorted(known))}."
        )
    changed = options.get("dtype", "keep") != "keep" or options.get("vocab_size") is not None
    if compare and changed:
        raise BadInput("dtype and vocab_size ask for other values: leave compare out.")
    result = run(source, _require_path("dst", dst), **options)
    wanted = not changed if compare is None else compare
    return ConversionReport(result, _compare_tensors(source, dst) if wanted else None)


def _require_one_process(function: str) -> None:
    """Raise BadInput on one of several ranks: each would do the whole work."""
    ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        raise BadInput(
            f"{function} works in one process, and this is one of {ranks} ranks: call it in a "
            "program of its own."
        )


def _compare_tensors(a: Path, b: str | Path) -> Report:
    """Compare the tensors alone: a config may be written in another form on purpose."""
    from mcore_qwen3vl.verification.checkpoints import TENSORS, compare_checkpoints

    report = compare_checkpoints(a, b)
    tensors = [finding for finding in report.findings if finding.part == TENSORS]
    return replace(report, findings=tensors)


def score(
    checkpoint: str | Path,
    data: str | Path,
    out: str | Path | None = None,
    *,
    layout: Layout | None = None,
    device: Device | None = None,
    **options: Any,
) -> Tally | None:
    """Write log-probabilities of a data set's trained tokens, one line of JSON a record.

    With `task` it writes embeddings, or the scores of a reranker, reward model or classifier. An
    interrupted call continues when it is made again. The ranks of the layout are torchrun's, this
    program's (after :func:`load_model`), or else processes that are started here.

    Args:
        checkpoint: a checkpoint of either kind, or a hub id.
        data: any data set of training.
        out: file to write; default: beside `data`, where training looks for its reference.
        layout: parallel sizes; default: all of them 1.
        device: see :func:`load_model`.
        options: fields of :class:`mcore_qwen3vl.scoring.score.ScoreRequest`, such as `task`,
            `top_k`, `entropy`, `seq_length` and `force`.

    Returns:
        The summary with `perplexity`, counts and `to_dict()`; None on ranks other than the first.

    Raises:
        BadInput: the checkpoint, the data, the layout or an option cannot be used; the output
            exists or was begun with other settings; or too many records are bad.
    """
    layout = _require_layout(layout)
    chosen = _choose_device(device)
    from mcore_qwen3vl.scoring.score import ScoreRequest
    from mcore_qwen3vl.scoring.score import score as write_scores

    known = {field.name for field in fields(ScoreRequest)} - {"checkpoint", "data", "out", "layout"}
    if unknown := sorted(options.keys() - known):
        raise BadInput(f"{unknown[0]} is no option of score, which has {', '.join(sorted(known))}.")
    request = ScoreRequest(
        resolve(_require_path("checkpoint", checkpoint)),
        Path(_require_path("data", data)),
        None if out is None else Path(_require_path("out", out)),
        layout=layout,
        **options,
    )
    return write_scores(request, on_cpu=chosen == "cpu")


_PARITY_OPTIONS = (
    *("batches", "gradients", "dtype", "spec", "lora", "compile_pointwise", "timeout"),
)


def verify(
    checkpoint: str | Path,
    reference: str | Path | None = None,
    *,
    layout: Layout | None = None,
    device: Device | None = None,
    **options: Any,
) -> Report:
    """Check that two things are the same; in one process, which starts ranks if it needs them.

    - ``verify("model")`` converts a Hugging Face checkpoint to Megatron-Core and back, and compares
      every tensor and file. Of a Megatron-Core checkpoint it compares the checksums that its
      conversion left.
    - ``verify("a", "b")`` compares every tensor and file of two checkpoints of either kind.
    - ``verify("model", layout=Layout(tp=2))`` compares what the models compute: logits, loss, every
      gradient and an optimizer step, with Hugging Face's. A Megatron-Core checkpoint needs the
      Hugging Face one as `reference`.

    Args:
        checkpoint: a checkpoint of either kind, or a hub id.
        reference: the checkpoint to compare it with.
        layout: parallel sizes of the model that computes; default: nothing is computed.
        device: of that model; see :func:`load_model`.
        options: with a layout those of
            :func:`mcore_qwen3vl.verification.parity.comparison.verify_parity`: `batches`,
            `gradients`, `dtype`, `spec`, `lora`, `compile_pointwise`, `timeout`.

    Returns:
        A report with `equal`, `findings`, `failures`, `require()` and `to_dict()`. Tensors and
        files are equal bit for bit; computed values within the tolerance that a finding names.

    Raises:
        BadInput: a checkpoint, the layout or an option cannot be used.
    """
    _require_one_process("verify")
    place = identify(resolve(_require_path("checkpoint", checkpoint)))
    place.require_whole()
    other = None if reference is None else resolve(_require_path("reference", reference))
    if layout is not None:
        return _verify_computation(place.path, other, _require_layout(layout), device, options)
    if options or device is not None:
        name = next(iter(options), "device")
        raise BadInput(f"{name} is for comparing what models compute: name a layout= too.")
    from mcore_qwen3vl.verification.checkpoints import (
        check_manifest,
        compare_checkpoints,
        roundtrip,
    )

    if other is not None:
        return compare_checkpoints(place.path, other)
    if place.kind is PathKind.MEGATRON:
        return check_manifest(place.path)
    return roundtrip(place.path, None, lambda title: nullcontext(lambda done, total, name: None))


def _verify_computation(
    checkpoint: Path,
    reference: Path | None,
    layout: Layout,
    device: Device | None,
    options: dict[str, Any],
) -> Report:
    """Compare a model under a layout with Hugging Face's model of the reference, or of itself."""
    if unknown := sorted(options.keys() - set(_PARITY_OPTIONS)):
        raise BadInput(
            f"{unknown[0]} is no option of verify, which has {', '.join(_PARITY_OPTIONS)}."
        )
    if dist.is_initialized():
        raise BadInput("verify starts ranks of its own: call it in a process without load_model.")
    if reference is None and identify(checkpoint).kind is PathKind.MEGATRON:
        raise BadInput(
            f"{checkpoint} is a Megatron-Core checkpoint: name the Hugging Face one whose model "
            "computes the same as reference=."
        )
    chosen = _choose_device(device)
    from mcore_qwen3vl.verification.parity.comparison import verify_parity

    if reference is None:
        return verify_parity(checkpoint, layout, device=chosen, **options)
    return verify_parity(reference, layout, device=chosen, checkpoint=checkpoint, **options)
