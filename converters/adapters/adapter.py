"""A LoRA adapter: its factors in memory, and PEFT's directory of them, read and written.

In memory an adapter has Hugging Face's parameter names and one convention for the factors of fused
experts, whatever wrote its file.

PEFT reads a three-dimensional parameter as (experts, in, out) or (experts, out, in), depending on
the versions of PEFT and transformers. In the *canonical* roles A is applied to the expert's input;
PEFT 0.21 with transformers 5 and PEFT 0.18 with transformers 4.57 write them, and vLLM reads them.
In the *swapped* roles, which the other two combinations write, A and B have exchanged places. The
config does not say which; the shapes do, unless an expert's input is as wide as its output.

    canonical   A (E*r, in)    B (out, r*E)    ΔW_e = s · B[:, e::E] · A[e*r:(e+1)*r]
    swapped     A (E*r, out)   B (in, r*E)     ΔW_e = s · (B[:, e::E] · A[e*r:(e+1)*r])ᵀ

The update equals what PEFT adds within float32 rounding, but not bit for bit: the bits of a product
depend on the processor, the library, the number of rows and where the operands lie in memory. PEFT
multiplies whole weights, which would take 6.4 GB for the experts of one layer of the 235B model.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from mcore_qwen3vl.config import Architecture, read_config_file
from mcore_qwen3vl.converters.adapters.config import (
    PREFIX,
    AdapterConfig,
    Applied,
    HFConfig,
    Slot,
    apply_with_peft,
    config_content,
    labels_of,
    unused_name_notes,
)
from mcore_qwen3vl.converters.hf.config_file import dumps
from mcore_qwen3vl.converters.hf.hf_checkpoint import SafetensorsFile
from mcore_qwen3vl.converters.hf.shards import FLOATS
from mcore_qwen3vl.converters.identify import ADAPTER_CONFIG, origin_of
from mcore_qwen3vl.converters.mapping.forms import INPUT_EMBEDDING, LM_HEAD, refuse_wrapped
from mcore_qwen3vl.converters.offline import manifest
from mcore_qwen3vl.converters.storage.boxes import Shape
from mcore_qwen3vl.converters.storage.disk import load_pages
from mcore_qwen3vl.converters.storage.dtypes import DTYPES, all_finite, cast, dtype_name
from mcore_qwen3vl.converters.storage.staging import staging, write_durably
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.json_and_yaml import parse_json
from mcore_qwen3vl.labels import Labels
from mcore_qwen3vl.unused.fields import Unused

WEIGHTS = "adapter_model.safetensors"

BASE_LAYER = f"{PREFIX}lm_head.base_layer.weight"
"""Key of the whole head, which PEFT stores beside its factors if the head is a target."""

SHOWN = 3
"""The most names that a message lists."""

CHUNK_VALUES = 2**20
"""Values of a product computed at a time, which stay in the processor's cache until written."""

Roles = Literal["canonical", "swapped"]


@dataclass(frozen=True)
class Factors:
    """The low-rank update of one parameter: ΔW = `scaling` · B · A.

    Attributes:
        a, b: (r, in) and (out, r); for fused experts (E*r, in) and (out, r*E), as above.
        r: rank; for fused experts, the rank of each expert.
        scaling: lora_alpha / r, or lora_alpha / sqrt(r) with rsLoRA.
    """

    a: Tensor
    b: Tensor
    r: int
    scaling: float


@dataclass(frozen=True)
class Adapter:
    """An adapter as it was read.

    Attributes:
        factors: factors by Hugging Face parameter, in the canonical roles.
        saved: whole parameters in the adapter, by name; experts in the layout of transformers 5.
            If a parameter also has factors, it is the base weight for adding their product.
        labels: labels of the classifier's head among `saved`; None: it has no such head.
    """

    config: AdapterConfig
    factors: dict[str, Factors]
    saved: dict[str, Tensor]
    roles: Roles = "canonical"
    notes: tuple[str, ...] = ()
    labels: Labels | None = None

    def factor_tensors(self) -> dict[str, Tensor]:
        """Return all factors, as ``PARAMETER.lora_A`` and ``PARAMETER.lora_B``."""
        named: dict[str, Tensor] = {}
        for name, factors in self.factors.items():
            named |= {f"{name}.lora_A": factors.a, f"{name}.lora_B": factors.b}
        return named

    def other_base_notes(self, base: Path) -> list[str]:
        """Return a note if the adapter names another model that is on this machine.

        The checkpoint that `base` was converted from is no other model.

        Raises:
            BadInput: its manifest is damaged.
        """
        named = self.config.raw.get("base_model_name_or_path")
        if not isinstance(named, str) or not Path(named).is_dir():
            return []
        converted = manifest.find(base)
        source = manifest.read(converted)["source"] if converted else {}
        if Path(named).samefile(base) or origin_of(Path(named)).items() <= source.items():
            return []
        return [f"The adapter was trained on {named}, and is used with {base}."]


def whole_shape(name: str, applied: Applied) -> Shape:
    """Return the shape of a parameter that is stored whole."""
    return applied.saved[name] if name in applied.saved else applied.slots[name].base


def some_of(names: list[str]) -> str:
    """Return the first `SHOWN` names and the number of the others, for a message."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(name[:200] for name in names[:SHOWN]) + more


def swap_roles(a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Convert factors of fused experts to the other roles; exact, and its own inverse.

    From `a` (E*r, n) and `b` (m, r*E) they are (E*r, m) and (n, r*E), contiguous.
    """
    rank = a.shape[0] // experts
    new_a = b.reshape(len(b), rank, experts).permute(2, 1, 0).reshape(experts * rank, len(b))
    new_b = a.reshape(experts, rank, a.shape[1]).permute(2, 1, 0).reshape(a.shape[1], -1)
    return new_a.contiguous(), new_b.contiguous()


def find_roles(
    slots: Mapping[str, Slot], shapes: Mapping[str, Shape], wanted: Roles | None, where: str
) -> Roles:
    """Return the roles in which the factors of fused experts are stored.

    Without fused experts, return `wanted`, or else canonical.

    Args:
        shapes: shapes of the tensors in the file, by key; all keys of `slots` are present.
        wanted: roles that the user gave; None: the shapes decide.

    Raises:
        BadInput: a shape fits neither roles, or not the `wanted` ones; parameters contradict each
            other; or all shapes fit both roles and `wanted` is None.
    """
    possible: set[Roles] = {"canonical", "swapped"}
    fused = {name: slot for name, slot in slots.items() if len(slot.base) == 3}
    for name, slot in fused.items():
        a, b = shapes[slot.a_key], shapes[slot.b_key]
        (rank, into), (out, _) = slot.a_shape, slot.b_shape
        fits: set[Roles] = {"canonical"} if (a, b) == (slot.a_shape, slot.b_shape) else set()
        if (a, b) == ((rank, out), (into, rank)):
            fits.add("swapped")
        if not fits:
            raise BadInput(
                f"{where}: the factors of {name} have shapes {list(a)} and {list(b)}; rank "
                f"{slot.r} for each expert of this model makes {list(slot.a_shape)} and "
                f"{list(slot.b_shape)}, or {[rank, out]} and {[into, rank]} in the swapped roles. "
                "The adapter belongs to another model, or its config to another adapter."
            )
        possible &= fits
        if not possible:
            raise BadInput(
                f"{where}: the factors of some fused experts have the canonical roles and those of "
                f"others, such as {name}, the swapped ones. The file was put together from two."
            )
    if wanted is not None and wanted not in possible:
        raise BadInput(f"{where}: the shapes of its expert factors are not the {wanted} roles.")
    if not fused or wanted is not None:
        return wanted or "canonical"
    if len(possible) > 1:
        raise BadInput(
            f"{where}: an expert's input is as wide as its output, so the shapes do not tell which "
            "roles A and B have. Say it with --from-roles: canonical for PEFT 0.21 with "
            "transformers 5 or PEFT 0.18 with 4.57, else swapped."
        )
    return possible.pop()


def scaled_product(a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Compute s·B·A in float32: (out, in) from (r, in) and (out, r)."""
    return (b.float() @ a.float()).mul_(scaling)


def factors_of_expert(factors: Factors, index: int) -> tuple[Tensor, Tensor]:
    """Return A (r, in) and B (out, r) of one of the fused experts."""
    rows = slice(index * factors.r, (index + 1) * factors.r)
    experts = factors.a.shape[0] // factors.r
    return factors.a[rows], factors.b[:, index::experts]


def row_chunks(count: int, width: int = 1) -> Iterator[slice]:
    """Split rows 0 to `count`, of `width` values each, into pieces of about `CHUNK_VALUES`."""
    pieces = min(-(-count * width // CHUNK_VALUES), count)
    bounds = [count * piece // pieces for piece in range(pieces + 1)]
    for first, last in itertools.pairwise(bounds):
        yield slice(first, last)


@torch.no_grad()
def add_update(weight: Tensor, factors: Factors, name: str, *, swapped: bool) -> None:
    """Add s·B·A to a weight in place, rounding once to the weight's dtype.

    Args:
        weight: weight of a linear layer, (out, in), or of fused experts, (E, out, in).
        swapped: whether experts are (E, in, out), as published.

    Raises:
        BadInput: a sum is too large for the weight's dtype.
    """
    if weight.ndim == 3:
        experts = weight.mT if swapped else weight
        parts = [
            (expert, *factors_of_expert(factors, index)) for index, expert in enumerate(experts)
        ]
    else:
        chunks = row_chunks(*weight.shape)
        parts = [(weight[rows], factors.a, factors.b[rows]) for rows in chunks]
    for part, a, b in parts:
        part.copy_(
            cast(scaled_product(a, b, factors.scaling).add_(part.float()), weight.dtype, name)
        )


PICKLE = "adapter_model.bin"

OF_TOKENS = (
    *("chat_template.jinja", "chat_template.json", "tokenizer.json", "tokenizer_config.json"),
    *("vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json"),
    *("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"),
    "generation_config.json",
)
"""Files of a model that trainers also save beside an adapter."""


def unused_of_adapter(path: str | Path, base: str | Path | None = None) -> list[Unused]:
    """Return what nothing uses of an adapter: fields of its config, and files unlike the base's.

    Args:
        path: the adapter's directory, or its config alone.
        base: directory of the model whose tokenizer, template and processor are used; None: not
            known, and no file is compared.

    Raises:
        BadInput: see :meth:`.config.AdapterConfig.from_file`.
    """
    unused = AdapterConfig.from_file(path).unused
    # Without a base the folder is compared with itself, which finds nothing.
    folders = Path(path), Path(base or path)
    if not all(folder.is_dir() for folder in folders):
        return unused
    for name in OF_TOKENS:
        here, there = (_parsed_content(folder / name) for folder in folders)
        if here is not None and here != there:
            why = "the base has none" if there is None else "it differs from the base's"
            unused.append(Unused("the adapter's folder", name, f"{why}, and only the base counts"))
    return unused


def _parsed_content(file: Path) -> Any:
    """Return what a file says, whatever its spaces and order; None if there is none."""
    if not file.is_file():
        return None
    content = file.read_bytes()
    try:
        return parse_json(content) if file.suffix == ".json" else content
    except ValueError:
        return content


def read_adapter(path: str | Path, hf_config: HFConfig, *, roles: Roles | None = None) -> Adapter:
    """Read a PEFT adapter and check every tensor; tensors are views of the file where possible.

    Args:
        hf_config: the model's ``config.json``: its content, the file or its directory.
        roles: the roles of the factors of fused experts; None: their shapes decide.

    Raises:
        BadInput: a file is missing or damaged, or is a pickle; the config asks for something that
            is not supported; a tensor is missing, is not part of the adapter, has the wrong shape
            or dtype, or holds a non-finite value; or the roles of expert factors are ambiguous.
    """
    path = Path(path)
    config = AdapterConfig.from_file(path)
    content = _model_config_with_labels(path, config, hf_config)
    applied = apply_with_peft(config, content, linear_router=True)
    file = path / WEIGHTS
    tensors = AdapterFile(path)
    embeddings = _saved_embeddings(tensors, applied)
    tied = bool(embeddings) and Architecture.from_hf(content).tie_word_embeddings
    if embeddings:
        modules = [_MODULES[name] for name in (_MODULES if tied else embeddings)]
        config = replace(config, modules_to_save=(*(config.modules_to_save or ()), *modules))
        applied = apply_with_peft(config, content, linear_router=True)
    keys = applied.saved_keys()
    if tied:  # one of the two is enough
        keys = {k: name for k, name in keys.items() if name not in _MODULES or k in tensors.shapes}
    if LM_HEAD in applied.slots:
        keys[BASE_LAYER] = LM_HEAD  # PEFT may store the whole head beside its factors
    _require_keys(file, set(tensors.shapes), keys, applied)
    stored = find_roles(applied.slots, tensors.shapes, roles, str(file))
    factors = {
        name: _read_factors(name, slot, tensors, stored, file)
        for name, slot in applied.slots.items()
    }
    saved = {
        name: _checked_saved(name, tensors.read_tensor(key), whole_shape(name, applied), file)
        for key, name in keys.items()
        if key in tensors.shapes
    }
    saved = _with_both_embeddings(saved, applied, tied)
    notes = [*unused_name_notes(config, applied)]
    if stored == "swapped":
        notes.append("The factors of fused experts are stored in the swapped roles.")
    router = any(name.endswith(".mlp.gate.weight") for name in applied.slots)
    if router and config.names_a_linear_router:
        notes.append(
            "The router has its name of transformers 4.57. To use the adapter with transformers 5, "
            "run `mcore-qwen3vl lora convert`."
        )
    labels = labels_of(content) if config.has_score else None
    return Adapter(config, factors, saved, stored, tuple(notes), labels)


def _model_config_with_labels(
    path: Path, config: AdapterConfig, hf_config: HFConfig
) -> dict[str, Any]:
    """Return the model's config; if the adapter has a head and names its labels, with these."""
    content = config_content(hf_config)
    head_config = path / "config.json"
    if not config.has_score or not head_config.is_file():
        return content
    labels = Labels.of_config(read_config_file(head_config))
    return content if labels is None else labels.in_config(content)


class AdapterFile:
    """The tensors of an adapter's file, by PEFT's keys.

    Raises:
        BadInput: the directory has no such file, or the file is a pickle or damaged.
    """

    def __init__(self, path: Path) -> None:
        self._file = path / WEIGHTS
        if not self._file.is_file() and (path / PICKLE).is_file():
            raise BadInput(
                f"{path} has its weights in {PICKLE}, a pickle, which is not read: it can run any "
                f"code. Load it with PEFT and save it again, which writes {WEIGHTS}."
            )
        if not self._file.is_file():
            raise BadInput(f"{path} holds no {WEIGHTS}. Copy the adapter again.")
        self._tensors = SafetensorsFile(self._file)
        self.shapes: dict[str, Shape] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for key, (dtype, shape) in self._tensors.described.items():
            if dtype not in FLOATS:
                raise BadInput(
                    f"{self._file}: tensor {key:.200} has dtype {dtype}; "
                    f"{', '.join(FLOATS)} are understood."
                )
            self.shapes[key], self.dtypes[key] = shape, FLOATS[dtype]

    def read_tensor(self, key: str) -> Tensor:
        """Return the tensor under `key`, a view of the file."""
        try:
            tensor = load_pages(self._tensors.tensor(key))
        except OSError as error:
            raise BadInput(f"{self._file} cannot be read: {error}.") from None
        if not all_finite(tensor):
            raise BadInput(
                f"{self._file}: tensor {key} holds a value that is not finite (NaN or infinite). "
                "The training run that wrote it had diverged: use an earlier adapter."
            )
        return tensor


_MODULES = {INPUT_EMBEDDING: "embed_tokens", LM_HEAD: "lm_head"}


def _saved_embeddings(tensors: AdapterFile, applied: Applied) -> list[str]:
    """Return the embeddings that the file holds whole and the config does not name.

    PEFT writes them so for ``save_embedding_layers``, and loads them into the base.
    """
    return [
        name
        for name in _MODULES
        if applied.key_of(name) in tensors.shapes and name not in {*applied.saved, *applied.slots}
    ]


def _require_keys(file: Path, keys: set[str], saved: Mapping[str, str], applied: Applied) -> None:
    """Raise BadInput unless the file holds exactly the config's keys; `BASE_LAYER` is optional."""
    factors = [key for slot in applied.slots.values() for key in (slot.a_key, slot.b_key)]
    wanted = [*factors, *saved]
    refuse_wrapped(sorted(keys), str(file))
    missing = [key for key in wanted if key not in keys and key != BASE_LAYER]
    if keys and len(missing) == len(wanted):
        raise BadInput(
            f"{file} calls none of its tensors as PEFT does in this model: it holds "
            f"{some_of(sorted(keys))}, and PEFT writes {some_of(missing)}. The names have another "
            "prefix, or are of another model: rename them, or save the adapter with PEFT's "
            "save_pretrained."
        )
    if missing:
        raise BadInput(
            f"{file} lacks {some_of(missing)} of the {len(wanted)} tensors that {ADAPTER_CONFIG} "
            "calls for. PEFT warns of them, and leaves them at their initial values. Copy the "
            "adapter again."
        )
    if foreign := sorted(keys - set(wanted)):
        raise BadInput(
            f"{file} holds {some_of(foreign)}, which {ADAPTER_CONFIG} does not call for in this "
            "model. Check that the adapter is for this model, and that its config was saved with "
            "it."
        )


def _read_factors(name: str, slot: Slot, tensors: AdapterFile, roles: Roles, file: Path) -> Factors:
    """Read one parameter's factors in the canonical roles; raise BadInput for a wrong shape."""
    fused = len(slot.base) == 3
    pairs = ((slot.a_key, slot.a_shape), (slot.b_key, slot.b_shape))
    for key, shape in () if fused else pairs:  # `find_roles` has checked fused experts
        if tensors.shapes[key] != shape:
            raise BadInput(
                f"{file}: tensor {key} has shape {list(tensors.shapes[key])}; rank {slot.r} in "
                f"{name} {list(slot.base)} makes it {list(shape)}. The adapter belongs to another "
                "model, or its config to another adapter."
            )
    a, b = tensors.read_tensor(slot.a_key), tensors.read_tensor(slot.b_key)
    if fused and roles == "swapped":
        a, b = swap_roles(a, b, slot.base[0])
    return Factors(a, b, slot.r, slot.scaling)


def _checked_saved(name: str, tensor: Tensor, shape: Shape, file: Path) -> Tensor:
    """Check a whole parameter; swap the last two axes of experts of transformers 4.57."""
    if tuple(tensor.shape) == shape:
        return tensor
    if len(shape) == 3 and tuple(tensor.shape) == (shape[0], shape[2], shape[1]):
        return tensor.transpose(1, 2).contiguous()
    cause = "The adapter belongs to another model."
    if name in (INPUT_EMBEDDING, LM_HEAD) and tensor.shape[1:] == shape[1:]:
        cause = (
            "The vocabulary was resized before training (resize_token_embeddings), and that of "
            "this model was not: name the resized model as the base, saved with its tokenizer."
        )
    raise BadInput(
        f"{file}: {name} has shape {list(tensor.shape)}, but {list(shape)} in this model. {cause}"
    )


def write_adapter(
    path: str | Path,
    config: AdapterConfig,
    factors: Mapping[str, Factors],
    saved: Mapping[str, Tensor],
    hf_config: HFConfig,
    *,
    roles: Roles = "canonical",
    force: bool = False,
    files: Mapping[str, bytes] = {},
) -> None:
    """Write a PEFT adapter directory, which appears complete or not at all.

    Args:
        factors: all factors that the config calls for, by Hugging Face parameter, in the canonical
            roles.
        saved: all parameters that the config stores whole; one of two tied embeddings is enough. A
            parameter that also has factors is stored as their base layer.
        files: content of further files, by name.

    Raises:
        BadInput: the tensors are not those that `config` calls for; `path` exists and `force` is
            not set, or is not an adapter; or writing failed, in which case nothing is left.
    """
    config.require_supported()
    applied = apply_with_peft(config, hf_config, linear_router=True)
    tied = Architecture.from_hf(config_content(hf_config)).tie_word_embeddings
    tensors = dict(
        _checked_tensors(applied, factors, _with_both_embeddings(saved, applied, tied), roles)
    )
    if isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear":
        # PEFT too stores the names that it matches; releases differ on them.
        config = replace(config, target_modules=applied.spelled_out)
    target = Path(path)
    with staging(
        target, None, force=force, replaceable=lambda there: (there / ADAPTER_CONFIG).is_file()
    ) as stage:
        try:
            save_file(tensors, stage.tree / WEIGHTS, metadata={"format": "pt"})
            with (stage.tree / WEIGHTS).open("rb+") as handle:
                os.fsync(handle.fileno())
            write_durably(stage.tree / ADAPTER_CONFIG, config.to_json().encode())
            if config.has_score:  # PEFT's file does not name the labels
                write_durably(stage.tree / "config.json", dumps(config_content(hf_config)))
            for name, content in files.items():
                write_durably(stage.tree / name, content)
            stage.publish()
        except Exception as error:  # safetensors has its own exception for a full disk
            raise BadInput(f"{target} cannot be written: {error!s:.200}.") from error


def _with_both_embeddings(
    saved: Mapping[str, Tensor], applied: Applied, tied: bool
) -> dict[str, Tensor]:
    """Return `saved` with both of the tied embeddings if only one of them was given."""
    embeddings = {LM_HEAD, INPUT_EMBEDDING} & saved.keys()
    if not tied or len(embeddings) != 1 or not {LM_HEAD, INPUT_EMBEDDING} <= applied.saved.keys():
        return dict(saved)
    return dict(saved) | dict.fromkeys((LM_HEAD, INPUT_EMBEDDING), saved[embeddings.pop()])


def _checked_tensors(
    applied: Applied, factors: Mapping[str, Factors], saved: Mapping[str, Tensor], roles: Roles
) -> Iterator[tuple[str, Tensor]]:
    """Check that the given tensors are those of the config; yield PEFT's keys and tensors."""
    saved_alone = set(saved) - set(factors)
    for what, present, wanted in (
        ("factors", set(factors), set(applied.slots)),
        ("whole tensors", saved_alone, set(applied.saved)),
    ):
        if present != wanted:
            names = sorted(present ^ wanted)
            raise BadInput(
                f"the {what} given are not those the config calls for: {some_of(names)}."
            )
    memory: set[int] = set()
    for name, slot in applied.slots.items():
        a, b = factors[name].a, factors[name].b
        if (tuple(a.shape), tuple(b.shape)) != (slot.a_shape, slot.b_shape):
            raise BadInput(
                f"the factors of {name} are {list(a.shape)} and {list(b.shape)}; the config makes "
                f"them {list(slot.a_shape)} and {list(slot.b_shape)}."
            )
        if len(slot.base) == 3 and roles == "swapped":
            a, b = swap_roles(a, b, slot.base[0])
        yield slot.a_key, _storable(a, memory)
        yield slot.b_key, _storable(b, memory)
    for name, tensor in saved.items():
        if tuple(tensor.shape) != whole_shape(name, applied):
            raise BadInput(
                f"{name} is {list(tensor.shape)} and not {list(whole_shape(name, applied))}."
            )
        yield (BASE_LAYER if name in factors else applied.key_of(name)), _storable(tensor, memory)


def _storable(tensor: Tensor, memory: set[int]) -> Tensor:
    """Return `tensor`, contiguous and in its own memory: safetensors refuses shared memory."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype not in DTYPES.values():
        raise BadInput(
            f"adapters are stored as {', '.join(DTYPES)}, not {dtype_name(tensor.dtype)}."
        )
    if tensor.data_ptr() in memory:
        tensor = tensor.clone()
    memory.add(tensor.data_ptr())
    return tensor


def convert_adapter(
    source: str | Path,
    target: str | Path,
    hf_config: HFConfig,
    *,
    roles: Roles,
    from_roles: Roles | None = None,
    force: bool = False,
) -> Adapter:
    """Copy an adapter, with the factors of fused experts converted to `roles`.

    A router that is named as in transformers 4.57 is renamed, see
    `AdapterConfig.with_router_as_parameter`. Everything else stays as it is.

    Args:
        from_roles: roles in `source`; needed if the shapes do not tell.
    """
    adapter = read_adapter(source, hf_config, roles=from_roles)
    config = adapter.config.with_router_as_parameter()
    base = config_content(hf_config)
    base = adapter.labels.in_config(base) if adapter.labels else base
    write_adapter(target, config, adapter.factors, adapter.saved, base, roles=roles, force=force)
    return adapter
