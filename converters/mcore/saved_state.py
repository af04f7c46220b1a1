"""What Megatron saves beside a model's tensors: its arguments, and optimizer and random states.

It is read by the same guarded unpickler as all pickles here, which admits tensors and plain
containers. This module lists what else Megatron saves, and admits nothing else. Each class is
replaced by an inert stand-in, so that neither megatron nor numpy is imported.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore_qwen3vl.converters.storage.archive import (
    Archive,
    BadArchive,
    Sums,
    TensorUnpickler,
)
from mcore_qwen3vl.converters.storage.disk import map_file
from mcore_qwen3vl.converters.storage.restricted_pickle import FAILURES, Record, Refused
from mcore_qwen3vl.errors import BadInput

STAND_INS = (
    # The arguments' values: enumerations of Megatron and Python, paths, nested namespaces.
    "argparse.Namespace",
    "megatron.core.enums.ModelType",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.CudaGraphModule",
    "megatron.core.transformer.enums.CudaGraphScope",
    "megatron.core.transformer.enums.InferenceCudaGraphScope",
    "signal.Signals",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
    "types.SimpleNamespace",
    # numpy's random state.
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.ndarray",
    "numpy.dtype",
    "numpy.dtypes.UInt32DType",
    # The state of Megatron's optimizer and of its rerun state machine.
    "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState",
    # Transformer Engine's FP8 state, as older versions save it.
    "_io.BytesIO",
    # Small objects of Python and torch, which are not parts of parameters.
    "_codecs.encode",  # bytes, under the pickle protocol that torch uses
    "__builtin__.bytearray",
    "__builtin__.complex",
    "collections.Counter",
    "torch.Tensor",
    "torch.device",
    "torch.nn.parameter.Parameter",
    "torch.serialization._get_layout",
)
"""What Megatron saves beside tensors; ``megatron.core.safe_globals`` admits these names."""


def load(file: Path, part: slice = slice(None), sums: Sums | None = None) -> Any:
    """Return the content of a file of Megatron's, or of the bytes `part` of it.

    Tensors are copy-on-write views of the mapped file. The arguments are an ``argparse.Namespace``.
    Every other object that is not a tensor or a plain container is a `Record`. The checksums of the
    tensors' data are noted in `sums`.

    Raises:
        BadInput: the file is damaged, or names something outside the list.
    """
    try:
        archive = Archive(map_file(file)[part], sums)
        archive.check()
        archive.check_byte_order()
        content = TensorUnpickler(archive, 2**40, _CLASSES).load()
        for state in content if isinstance(content, list) else [content]:
            if isinstance(state, dict) and isinstance(state.get("args"), _NamespaceRecord):
                state["args"] = state["args"].namespace()
        return content
    except Refused as error:
        raise BadInput(
            f"{file} asks for {error!s:.200}, which has no place in a model's checkpoint. Refused: "
            "loading it could run code. If you trust the file, load it in Megatron and save it "
            "again with --ckpt-format torch_dist."
        ) from None
    except (OSError, BadArchive, *FAILURES) as error:
        raise BadInput(
            f"{file} cannot be read ({type(error).__name__}: {error!s:.200}). Copy the file again."
        ) from None


def arguments_in(state: Any) -> Mapping[str, Any]:
    """Return the arguments in a state, or in a list that begins with one; empty if it has none."""
    first = state[0] if isinstance(state, list) and state else state
    args = first.get("args") if isinstance(first, dict) else None
    return vars(args) if isinstance(args, Namespace) else {}


class _NamespaceRecord(Record):
    """A stand-in for ``argparse.Namespace``."""

    def namespace(self) -> Namespace:
        return Namespace(**self.state)  # a TypeError, as on other damage, if it is not names


_CLASSES = {name: type("StandIn", (Record,), {}) for name in STAND_INS}
_CLASSES["argparse.Namespace"] = _NamespaceRecord
