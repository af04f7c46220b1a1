"""Experiment trackers: where ``--log-to`` sends the numbers of ``--log-json``.

A tracker is made once, on the rank that knows the loss. W&B, SwanLab and Trackio share W&B's
interface: ``init`` returns a run, which takes numbers and is finished. :class:`Tracker` is that
run, so a function of a user's own may return ``wandb.init(...)``.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import batched
from typing import Any, Protocol, cast

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.functions import RULE, find_function

Config = Mapping[str, Any]
"""What the command line of a run sets, by the names of the flags with underscores."""

PROJECT = "mcore-qwen3vl"
_LOGGER = logging.getLogger(__name__)
_FAILURES = 3
"""Steps in a row that a tracker may fail to take; a lost server holds up each of them."""
_NOT_IN_MLFLOW = re.compile(r"[^\w\-. /:]")
_MLFLOW_PARAMS = 100
"""How many parameters one request to an MLflow server may set."""
_MLFLOW_LENGTH = 500
"""Characters of a parameter that every version of MLflow takes."""


class Tracker(Protocol):
    """Takes a run's numbers; ``wandb.init`` returns one."""

    def log(self, numbers: dict[str, float], /, *, step: int) -> object:
        """Take the numbers of a step, all of them finite."""

    def finish(self, exit_code: int, /) -> object:
        """Take no more numbers: the training has ended with this exit code."""


@dataclass(frozen=True)
class _Run:
    """A run of a package, by its two functions."""

    log: Callable[..., object]
    finish: Callable[[int], object]


def _begin_mlflow(project: str, name: str | None, config: Config) -> Tracker:
    """Begin a run of MLflow, or go on with that of ``MLFLOW_RUN_ID``."""
    mlflow: Any = import_module("mlflow")
    mlflow.set_experiment(project)
    mlflow.start_run(run_name=name)
    texts = {flag: str(value)[:_MLFLOW_LENGTH] for flag, value in config.items()}
    for some in batched(texts.items(), _MLFLOW_PARAMS):
        mlflow.log_params(dict(some))

    def log(numbers: Mapping[str, float], *, step: int) -> None:
        named = {_NOT_IN_MLFLOW.sub("_", name): value for name, value in numbers.items()}
        mlflow.log_metrics(named, step=step)

    def finish(exit_code: int) -> None:
        by_signal = "KILLED" if exit_code > 128 else "FAILED"
        mlflow.end_run(by_signal if exit_code else "FINISHED")

    return _Run(log, finish)


def _begin(package: str, project: str, name: str | None, config: Config) -> Tracker:
    if package == "mlflow":
        return _begin_mlflow(project, name, config)
    run: Any = import_module(package).init(project=project, name=name, config=dict(config))
    if package == "swanlab":
        return _Run(run.log, lambda exit_code: run.finish("crashed" if exit_code else "success"))
    if package == "trackio":  # it does not note how a run has ended
        return _Run(run.log, lambda exit_code: run.finish())
    return cast(Tracker, run)


PACKAGES = {"mlflow": "MLflow", "swanlab": "SwanLab", "trackio": "Trackio", "wandb": "W&B"}
"""The packages that ``--log-to`` knows, with the products' names."""


def check_tracker(named: str) -> None:
    """Raise BadInput unless `named` is one of :data:`PACKAGES`, installed, or a function."""
    if ":" in named:
        try:
            find_function(named, "config")
        except BadInput as error:
            raise BadInput(f"--log-to {error}") from error
    elif named == "tensorboard":
        raise BadInput("--log-to tensorboard: give --tensorboard-dir DIR, which is Megatron's.")
    elif named not in PACKAGES:
        raise BadInput(f"--log-to {named} is none of {', '.join(PACKAGES)}. Name one, or {RULE}.")
    elif find_spec(named) is None:
        raise BadInput(f"--log-to {named} needs the package {named}: pip install {named}.")


class Trackers:
    """The trackers of a run, on the rank that logs."""

    def __init__(self, names: Sequence[str]) -> None:
        """
        Args:
            names: as ``--log-to`` has them, checked by :func:`check_tracker`.
        """
        self._names = names
        self._trackers: dict[str, Tracker] = {}
        self._failures: dict[str, int] = {}

    def begin(self, project: str | None, run: str | None, config: Config) -> None:
        """Begin a run of each tracker.

        Args:
            project: MLflow's experiment, and the others' project.
            run: the run's name; None: the tracker makes one.

        Raises:
            BadInput: a tracker cannot begin.
        """
        plain = {name: _plain(value) for name, value in sorted(config.items())}
        for name in self._names:
            try:
                if ":" in name:
                    self._trackers[name] = find_function(name, "config")(dict(plain))
                else:
                    self._trackers[name] = _begin(name, project or PROJECT, run, plain)
            except Exception as error:  # of code that is not ours
                self.finish(BadInput.exit_code)
                raise BadInput(f"--log-to {name} cannot begin: {_text(error)}.") from error

    def log(self, numbers: Mapping[str, float | None], step: int) -> None:
        """Send the numbers of a step; one that is none is left out.

        The training does not end with a tracker's server: what a tracker does not take is a
        warning, and a tracker that takes nothing for a while is given up.
        """
        finite = {name: x for name, x in numbers.items() if x is not None and math.isfinite(x)}
        for name, tracker in self._trackers.items():
            if self._is_given_up(name):
                continue
            try:
                tracker.log(dict(finite), step=step)
            except Exception as error:
                self._note_failure(name, step, error)
            else:
                self._failures[name] = 0

    def _is_given_up(self, name: str) -> bool:
        """Return whether a tracker gets no more numbers; its run still ends with the training's."""
        return self._failures.get(name, 0) >= _FAILURES

    def _note_failure(self, name: str, step: int, error: Exception) -> None:
        self._failures[name] = self._failures.get(name, 0) + 1
        gone = self._is_given_up(name)
        _LOGGER.warning(
            "--log-to %s did not take the numbers of step %s: %s.%s", name, step, _text(error),
            " It is sent no more; --log-json keeps all numbers." if gone else "",
        )  # fmt: skip

    def finish(self, exit_code: int) -> None:
        """End the trackers' runs, with the exit code of the training."""
        trackers, self._trackers = self._trackers, {}
        for name, tracker in trackers.items():
            try:
                tracker.finish(exit_code)
            except Exception as error:
                _LOGGER.warning("--log-to %s did not finish: %s.", name, _text(error))


def _plain(value: Any) -> Any:
    """Return a flag's value as every tracker takes it; a list is as on the command line."""
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return value if isinstance(value, bool | int | float | str) else str(value)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}"
