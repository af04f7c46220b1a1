"""What Megatron's errors say about a checkpoint that does not fit the command line."""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from mcore_qwen3vl.converters.storage.archive import torch_refusal_error
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.settings.run import CheckpointSettings

log = logging.getLogger(__name__)

# Megatron names a weight, or "optimizer.state.exp_avg.NAME from model not in state dict: [...]".
_UNSAVED_PARAMETER = re.compile(
    r"(?P<state>optimizer\.state\.\w+\.)?(?P<name>\S+\.(?:weight|bias))"
    r"(?: from model not in state dict|$)"
)

_GO_ON_WITHOUT = {
    "optimizer": "--no-load-optim",
    "opt_param_scheduler": "--no-load-optim",
    "rng_state": "--no-load-rng",
}
"""The flag that goes on without a state which a checkpoint lacks, by Megatron's name of it."""


@contextmanager
def explain_load_errors(checkpoints: CheckpointSettings) -> Iterator[None]:
    """Explain Megatron's errors about a checkpoint that does not fit the command line.

    Raises:
        BadInput: the optimizer, its schedule, the RNG or a parameter was not saved, or torch
            refuses to unpickle a file, or Megatron cannot load what is there.
    """
    directory = checkpoints.load or checkpoints.pretrained_checkpoint or ""
    try:
        yield
    except (pickle.UnpicklingError, CheckpointException) as error:
        failures: list[BaseException] = [error]
        if isinstance(error, CheckpointException):  # wraps each rank's error
            failures = [failure[0] for failure in error.failures.values()]
        for failure in failures:
            if isinstance(failure, BadInput):  # by a guard of ours
                raise failure from None
            if isinstance(failure, pickle.UnpicklingError):
                raise torch_refusal_error(f"The checkpoint in {directory}", failure) from None
            if lacks := _explain_missing_parameter(directory, failure):
                raise lacks from None
        # torch's exception is no Exception, so that nothing else would put it into words.
        raise _unloadable(directory, failures[0]) from error
    except KeyError as error:
        if lacks := _explain_missing_parameter(directory, error):
            raise lacks from None
        if (flag := _GO_ON_WITHOUT.get(error.args[0])) is None:
            raise _unloadable(directory, error) from error
        raise BadInput(
            f"The checkpoint in {directory} was saved without {error}. Add {flag} to go on "
            "without, or --finetune to take its weights only."
        ) from error
    except (BadInput, OSError, MemoryError, torch.OutOfMemoryError, dist.DistError):
        raise  # each says what it is about
    except Exception as error:  # Megatron trusts the content, and raises whatever comes of it
        raise _unloadable(directory, error) from error


def _unloadable(directory: str, error: BaseException) -> BadInput:
    """Return the error that Megatron cannot load a checkpoint; the traceback goes to the log."""
    log.info("loading from %s failed", directory, exc_info=error)
    reason = next(iter(str(error).strip().splitlines()), "")
    return BadInput(
        f"The checkpoint in {directory} cannot be loaded: {type(error).__name__}"
        f"{': ' * bool(reason)}{reason.rstrip('.'):.300}. It is damaged, or was saved by another "
        "program or with other flags: copy it again, check the path, or give that run's flags."
    )


def _explain_missing_parameter(directory: str, error: BaseException) -> BadInput | None:
    """Explain that a parameter was not saved; None if that is not what `error` says."""
    match = _UNSAVED_PARAMETER.match(str(error.args[0])) if isinstance(error, KeyError) else None
    if match is None:
        return None
    remedies = "Give that run's flags; "
    if match["state"]:  # the weights are there
        remedies += "or add --no-load-optim, to go on with a new optimizer; "
    return BadInput(
        f"The checkpoint in {directory} holds no {match['state'] or ''}{match['name']}, which this "
        "command trains: it was saved by a run that trained other parts (--freeze, --trainable, "
        f"--mtp-num-layers) or another task (--task). {remedies}or take its weights only, with "
        f"--load {directory} --finetune and another --save."
    )
