"""Read a Hugging Face checkpoint lazily: safetensors files and their index.

Tensors are views of memory-mapped files; nothing is read until it is used.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mcore_qwen3vl.config import MODEL_TYPES, Architecture, read_config_file, ties_embeddings
from mcore_qwen3vl.converters.hf import quantized
from mcore_qwen3vl.converters.hf.shards import DTYPES, TensorHeader
from mcore_qwen3vl.converters.identify import INDEX, SINGLE, PathKind, identify
from mcore_qwen3vl.converters.mapping import forms
from mcore_qwen3vl.converters.mapping.table import MTP, TEXT, Row, hf_shapes
from mcore_qwen3vl.converters.storage.boxes import Selection, Shape, with_explicit_bounds
from mcore_qwen3vl.converters.storage.disk import load_pages, map_file
from mcore_qwen3vl.converters.storage.dtypes import cast
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import refuse_special_files, refuse_undecodable
from mcore_qwen3vl.json_and_yaml import parse_json
from mcore_qwen3vl.unused.fields import Unused

NUMBERED = re.compile(r"^(.*-)\d+-of-(\d{1,9})\.safetensors$")

_TURNED = (
    " (the last two axes are swapped: the experts are in the other layout than the one that "
    "config.json declares, so the config is not the one saved with these weights)"
)


def holder_of_mtp(folder: Path, architecture: Architecture) -> HuggingFaceCheckpoint | None:
    """Return the checkpoint in `folder` if it has MTP layers.

    A run that does not train its MTP layers exports those of its source. If the config declares
    none, only the config is read.

    Raises:
        BadInput: the weights in `folder` are damaged.
    """
    if not architecture.mtp_num_hidden_layers or identify(folder).kind is not PathKind.HUGGINGFACE:
        return None
    checkpoint = HuggingFaceCheckpoint(folder)
    return checkpoint if checkpoint.has_mtp else None


class HuggingFaceCheckpoint:
    """The tensors of one Hugging Face checkpoint directory.

    Construction reads and checks every header (sizes against the file, the index against the
    headers), but no tensor data.

    Attributes:
        form: the names of the tensors in the files, and the kind of head.
        entries: the header of each tensor of the model, by the table's HF name.
        scales: the headers of the scale tensors that belong to quantised tensors, by name.
        left_out: the headers of tensors that are stored and belong to no model here, by name.
        split: the fused tensors among `entries` that the files hold expert by expert.
        headers: as `entries`, with these experts as they are stored.
        quantization: the ``quantization_config``, or None.
        has_mtp: whether there are MTP layers.

    Raises:
        BadInput: there are no safetensors files; a file is cut short or not safetensors; the index
            names a file that is absent or in another directory, or disagrees with the files; or the
            quantisation is of an unknown kind (see `quantized.declared_quantization`).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        refuse_special_files(path)
        config = read_config_file(path) if (path / "config.json").exists() else {}
        self.quantization = quantized.declared_quantization(config)
        index = _read_index(path)
        files = sorted(set(index.values())) if index is not None else _files_without_index(path)
        self.files = [path / file for file in files]
        self._files = {file: SafetensorsFile(path / file) for file in files}
        self.entries: dict[str, TensorHeader] = {}
        for file, tensors in self._files.items():
            for name, (dtype, shape) in tensors.described.items():
                self._add_entry(file, name, dtype, shape)
        if index is not None:
            self._require_index_fits(index)
        shapes = {name: entry.shape for name, entry in self.entries.items()}
        family = MODEL_TYPES.get(str(config.get("model_type")), MODEL_TYPES["qwen3_vl"])
        tied, has_vision = ties_embeddings(config), family.has_vision
        self.form = forms.recognise_form(shapes, tied=tied, has_vision=has_vision)
        leaves_out = self.form.names.leaves_out
        self.left_out = {name: e for name, e in self.entries.items() if leaves_out(name)}
        kept = {name: e for name, e in self.entries.items() if name not in self.left_out}
        stored, self.scales = quantized.pair_factors(kept, self.quantization)
        self.headers = forms.rename_entries(stored, self.form.names)
        self.entries, self.split = quantized.fuse_experts(self.headers, config)
        self.has_mtp = any(name.startswith(MTP) for name in self.entries)
        if family.hybrid:  # transformers itself writes these one by one
            split = tuple(
                start for start in (TEXT, MTP) if any(n.startswith(start) for n in self.split)
            )
            self.form = replace(self.form, split_experts=split)

    def read_stored(self, name: str, box: Selection = ()) -> Tensor:
        """Return `box` of a tensor as the file has it: a view of the file, not to be written to.

        For fused experts that are stored one by one, it is a copy.
        """
        if (split := self.split.get(name)) is not None:
            return split.take(box, self.read_stored)
        entry = self.headers.get(name) or self.scales[name]
        return load_pages(self._files[entry.file].tensor(entry.name)[box])

    def read_tensor(
        self, name: str, box: Selection = (), dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return `box` of a tensor, by default all of it; the result is not to be written to.

        Args:
            name: HF name in the table.
            box: a slice for each of the leading axes; the first of three axes may have an index.
            dtype: dtype of the result; default: the entry's, in which case the result is a view
                of the file unless the tensor is quantised.

        Raises:
            BadInput: a value does not fit `dtype`.
        """
        if (split := self.split.get(name)) is not None:
            return split.take(box, lambda part, place: self.read_tensor(part, place, dtype))
        entry = self.headers[name]
        stored = self.read_stored(name, box)
        if entry.scale is None:
            return cast(stored, dtype or entry.dtype, name)
        place = with_explicit_bounds(box, entry.shape)
        factors, (rows, columns) = self.read_stored(entry.scale, place[:-2]), place[-2:]
        return quantized.dequantize(stored, factors, rows, columns, dtype or entry.dtype, name)

    def require(self, rows: Iterable[Row]) -> None:
        """Check that the checkpoint holds exactly the tensors that `rows` consume.

        Raises:
            BadInput: a tensor is missing, has another shape, or no row consumes it; or the head is
                to be tied to the embedding and differs from it.
        """
        wanted = hf_shapes(list(rows))
        if forms.LM_HEAD in wanted:
            self.form.require_language_model(self.path)
        stored = self.form.names.stored_name
        for name, shape in wanted.items():
            if name not in self.entries:
                raise BadInput(
                    f"{self.path} lacks the tensor {stored(name)} {list(shape)}, which config.json "
                    "calls for. Nothing is initialised at random here: fetch the complete "
                    "checkpoint."
                )
            stored_shape = self.entries[name].shape
            if stored_shape != shape:
                turned = ".experts." in name and stored_shape == (shape[0], shape[2], shape[1])
                raise BadInput(
                    f"{self.path}: tensor {stored(name)} has shape {list(stored_shape)}, but "
                    f"config.json makes it {list(shape)}. The config and the weights belong to "
                    f"different models{_TURNED if turned else ''}."
                )
        for name in self.entries:
            if name not in wanted:
                raise BadInput(
                    f"{self.path} holds the tensor {stored(name)} "
                    f"{list(self.entries[name].shape)}, which is no part of the model that "
                    "config.json describes. Dropping it in silence would lose data, so nothing "
                    "was converted."
                )
        if self.form.head.kind == forms.TIED_COPY:
            self._require_tied_copy()

    def _require_tied_copy(self) -> None:
        """Refuse a stored head that differs from the embedding although the config ties them."""
        head = self.read_stored(forms.LM_HEAD)
        embedding = self.read_stored(forms.INPUT_EMBEDDING)
        # Bits are compared, since NaN is not equal to itself. Both are views of the file, and the
        # comparison makes no copy of them.
        if head.dtype != embedding.dtype or not torch.equal(
            head.view(torch.uint8), embedding.view(torch.uint8)
        ):
            raise BadInput(
                f"{self.path}: config.json ties the embeddings (tie_word_embeddings), but the "
                f"stored {forms.LM_HEAD} differs from "
                f"{self.form.names.stored_name(forms.INPUT_EMBEDDING)}. Set tie_word_embeddings to "
                "false in config.json if the model has a head of its own, or remove "
                f"{forms.LM_HEAD}."
            )

    def _add_entry(self, file: str, name: str, stored: str, shape: Shape) -> None:
        """Add a tensor's header; raise BadInput if it is there twice or its dtype is unknown."""
        if name in self.entries:
            raise BadInput(
                f"{self.path}: tensor {name} is in both {self.entries[name].file} and {file}. "
                "Files of two checkpoints are mixed in this directory."
            )
        dtype = DTYPES.get(stored)
        if dtype is None:
            raise BadInput(
                f"{self.path}: tensor {name} in {file} has dtype {stored}; "
                f"{', '.join(DTYPES)} are understood. If it is a quantised checkpoint, convert the "
                "model's original one."
            )
        self.entries[name] = TensorHeader(name, file, dtype, shape, dtype)

    def _require_index_fits(self, index: dict[str, str]) -> None:
        """Raise BadInput unless the index names exactly the tensors of each file."""
        holders = {name: entry.file for name, entry in self.entries.items()}
        for name in index | holders:
            said, holder = index.get(name), holders.get(name)
            if said != holder:
                claim = f"says that tensor {name} is in {said}" if said else f"does not name {name}"
                truth = f"it is in {holder}" if holder else "no file holds it"
                raise BadInput(
                    f"{self.path / INDEX} {claim}, but {truth}. The index belongs to another "
                    "checkpoint or a file was replaced."
                )


class SafetensorsFile:
    """A mapped safetensors file.

    Attributes:
        described: safetensors' name of the dtype, and the shape, of each tensor, sorted by name.

    Raises:
        BadInput: the file is not a complete safetensors file, or may not be read.
    """

    def __init__(self, path: Path) -> None:
        refuse_undecodable([str(path)])
        try:
            # `safe_open` checks the header. It reports a file that it may not open as absent.
            with path.open("rb") as file, safe_open(path, framework="pt"):
                self._start = 8 + int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(self._start - 8))
            self._data = map_file(path)
        except PermissionError as error:
            raise BadInput(f"{path} cannot be read: {error.strerror}. Check its mode.") from None
        except (SafetensorError, OSError, ValueError) as error:
            raise BadInput(
                f"{path} is not a complete safetensors file ({error!s:.200}). Fetch it again."
            ) from None
        self._header = {name: header[name] for name in sorted(header) if name != "__metadata__"}
        self.described = {n: (t["dtype"], tuple(t["shape"])) for n, t in self._header.items()}

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor of one of `DTYPES`, a view of the file that is not read yet."""
        dtype, shape = self.described[name]
        start, stop = (self._start + at for at in self._header[name]["data_offsets"])
        if start == stop:
            return torch.empty(shape, dtype=DTYPES[dtype])
        return torch.frombuffer(self._data[start:stop], dtype=DTYPES[dtype]).view(shape)


def unread_files(path: Path) -> list[Unused]:
    """Return the safetensors files beside the weights of a checkpoint that are no part of it.

    Raises:
        BadInput: the folder holds no checkpoint, or a damaged index.
    """
    index = _read_index(path)
    read = set(index.values()) if index is not None else set(_files_without_index(path))
    why = f"not read: {INDEX} does not name it"
    if index is None:
        why = (
            f"not read: {SINGLE} alone is the model. vLLM, without an index, reads it too: move it "
            "elsewhere before you serve the model"
        )
    others = sorted(file.name for file in path.glob("*.safetensors") if file.name not in read)
    return [
        Unused("the model's folder", name, _AS_MISTRAL if fnmatch(name, _MISTRAL) else why)
        for name in others
    ]


_MISTRAL = "consolidated*.safetensors"
_AS_MISTRAL = (
    "not read: it is named as Mistral's own weights are. vLLM reads such a file in place of the "
    "model: move it elsewhere before you serve the model"
)


def _files_without_index(path: Path) -> list[str]:
    """Return the files of a checkpoint that has no index: one, and those with `MTP` alone.

    vLLM reads every file. transformers reads the one, and no MTP layers from any file, because it
    has no model of them.
    """
    first = _only_file(path)
    others = (file for file in path.glob("*.safetensors") if file.name != first)
    return [first, *sorted(file.name for file in others if _holds_mtp_alone(file))]


def _holds_mtp_alone(file: Path) -> bool:
    try:
        names = SafetensorsFile(file).described
    except BadInput:  # not a file of the model
        return False
    return bool(names) and all(name.startswith(MTP) for name in names)


def _only_file(path: Path) -> str:
    """Return the name of the one file of a checkpoint without an index; raise BadInput if none."""
    if (path / SINGLE).is_file():
        return SINGLE
    if others := sorted(file.name for file in path.glob("*.safetensors")):
        raise BadInput(
            f"{path} holds {', '.join(others[:3])} but neither {SINGLE} nor {INDEX}, so which "
            "files make the model is not known. Fetch the index too."
        )
    raise BadInput(
        f"{path} holds no safetensors weights (neither {SINGLE} nor {INDEX}), and other formats, "
        "such as pytorch_model.bin, are not read. Load the model with transformers and save it "
        "with save_pretrained, which writes safetensors."
    )


def _read_index(path: Path) -> dict[str, str] | None:
    """Return a map from tensor name to file name, or None for a single-file checkpoint."""
    file = path / INDEX
    if not file.exists():
        return None
    if (path / SINGLE).exists():
        raise BadInput(
            f"{path} holds both {SINGLE} and {INDEX}, so which of them is the model is not known. "
            "Remove the one that is left over."
        )
    try:
        weight_map = parse_json(file.read_bytes())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"{file} cannot be read as an index ({error!r:.200}). Copy it again."
        ) from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadInput(f"{file} has no tensor in its weight_map. Copy it again.")
    for name, target in weight_map.items():
        _check_shard(file, name, target)
    _check_shard_count(file, set(weight_map.values()))
    return weight_map


def _check_shard_count(index: Path, files: set[str]) -> None:
    """Refuse an index that skips a shard of a set named ``model-00001-of-00007.safetensors``.

    This check alone sees that a shard is missing which holds nothing but `LM_HEAD`: without it
    the rest has the form of a headless model.
    """
    # The names of each set, as model-*-of-00007, and how many of its files are named.
    sets = Counter(NUMBERED.sub(r"\1*-of-\2", file) for file in files if NUMBERED.search(file))
    for name, count in sets.items():
        if count < int(name.rpartition("-")[2]):
            raise BadInput(
                f"{index} names {count} of the shards {name}.safetensors. The index belongs to "
                "another checkpoint or is damaged: copy it again."
            )


def _check_shard(index: Path, tensor: str, target: Any) -> None:
    """Raise BadInput unless `target`, where the index puts a tensor, is a file beside it."""
    safe = isinstance(target, str) and target == PurePosixPath(target).name and "\\" not in target
    if not safe or target in ("", ".", "..") or "\0" in target or len(target) > 255:
        raise BadInput(
            f"{index} puts tensor {tensor:.200} in {target!r:.200}, which is not a plain file name "
            "in the same directory. Refused: an index must not reach outside its checkpoint."
        )
    if not (index.parent / target).is_file():
        raise BadInput(
            f"{index} puts tensor {tensor} in {target}, which does not exist. "
            "The checkpoint is incomplete: fetch the missing file."
        )
