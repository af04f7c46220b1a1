"""``torch.load`` for Megatron's legacy files: tensors mapped from the file, and no code run.

A legacy file holds the tensors beside Megatron's arguments, optimizer and random states. It is read
with ``weights_only=True``: torch's own unpickler, which knows tensors and plain containers. What
else Megatron puts into such a file is listed here, and nothing but the list is admitted. Apart from
the arguments' plain namespace, each class is replaced by an inert stand-in, so that neither
megatron nor numpy is asked for anything.
"""

from __future__ import annotations

import argparse
import mmap
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mcore_qwen3vl.converters.storage.archive import check_archive
from mcore_qwen3vl.errors import BadInput

STAND_INS = (
    # In the arguments: enumerations of Megatron's and Python's, paths, nested namespaces.
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
    # The state of Megatron's optimizer and of its rerun machine.
    "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState",
    # Transformer Engine's FP8 state, as older versions save it.
    "_io.BytesIO",
)
"""What a legacy file may name beside tensors (``megatron.core.safe_globals`` admits the same)."""


class _StandIn:
    """Takes whatever arguments and state the class that it replaces would."""

    def __new__(cls, *args: Any) -> _StandIn:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None: ...


def load(file: Path) -> Any:
    """The content of a legacy file; its tensors are private maps of the file.

    Raises:
        BadInput: the file is damaged, or names something outside the list.
    """
    try:
        with file.open("rb") as handle:
            check_archive(memoryview(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)))
        with _only_the_list():
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        if found := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise BadInput(
                f"{file} asks for {found[1]}, which has no place in a model's checkpoint. Refused: "
                "loading it could run code. If you trust the file, load it in Megatron and save it "
                "again with --ckpt-format torch_dist."
            ) from None
        raise BadInput(_damaged(file, error)) from None
    except Exception as error:  # torch's readers raise nearly anything on a damaged file
        raise BadInput(_damaged(file, error)) from None


@contextmanager
def _only_the_list() -> Iterator[None]:
    """Admit what is listed here, and not what other libraries have told torch to admit.

    Importing megatron-core admits the real classes, which would meet our stand-ins.
    """
    others = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    listed: list[Any] = [(argparse.Namespace, "argparse.Namespace")]
    listed += [(type("StandIn", (_StandIn,), {}), name) for name in STAND_INS]
    torch.serialization.add_safe_globals(listed)
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(others)


def _damaged(file: Path, error: Exception) -> str:
    reason = str(error).partition("\n")[0]
    return f"{file} cannot be read ({type(error).__name__}: {reason:.200}). Copy the file again."
