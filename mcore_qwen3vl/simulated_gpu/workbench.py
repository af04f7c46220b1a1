"""Many short rehearsals, forked from one process that has done the imports.

PyTorch and Megatron take fifteen seconds to import; most rehearsals take less. One process imports
them and forks a child for each call. A child makes its own CUDA context, as a fresh program would.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing import util
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, NoReturn
from unittest import mock

from .device import Report, Routing, Settings


class Failed(RuntimeError):
    """A call on the workbench raised or died; the message holds its traceback."""


class Workbench:
    """A process on the simulated GPU that runs functions in forks; use it in a ``with``."""

    def __init__(
        self,
        imports: Sequence[str] = (),
        settings: Settings | None = None,
        log: Path | None = None,
        raised: tuple[type[Exception], ...] = (),
    ) -> None:
        """
        Args:
            imports: modules to import once, for all calls.
            log: file for what the programs print; None: standard error.
            raised: exceptions that :meth:`call` raises as they are. They must be picklable.

        Raises:
            Unavailable: see :func:`.device.compiled_libraries`.
        """
        # Python would look for modules in the current folder first, where anything may lie. The
        # functions to call are found where this process finds them.
        safe = {"PYTHONSAFEPATH": "1"}
        environment = {**os.environ, **(settings or Settings()).environment(), **safe}
        program = f"import sys; sys.path[:] = {sys.path}; from {__name__} import serve; "
        program += "serve(*sys.argv[1:])"
        command = [sys.executable, "-c", program, str(os.getpid()), *imports]
        self._raised = raised
        pipe = subprocess.PIPE
        printed = None if log is None else log.open("ab")
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=printed, env=environment
        )

    def __enter__(self) -> Workbench:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is not None:  # a call may still be running, for minutes
            self._process.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def call(
        self,
        function: Callable[..., Any] | str,
        *args: Any,
        rank: int = 0,
        world_size: int = 1,
        routing: Routing = "uniform",
        memory_gib: float | None = None,
        context_gib: float | None = None,
    ) -> tuple[Any, Report]:
        """Run ``function(*args)`` as rank `rank` of `world_size`.

        Args:
            function: a function that a module defines, or ``module:function``.
            args: its arguments, which must be picklable.
            memory_gib, context_gib: of the device, if not as in the settings.

        Returns:
            The function's result (picklable), and the device's record, whose last stage is ``end``.

        Raises:
            Failed: the function raised an exception that is not one of `raised`, or died.
        """
        if callable(function):
            function = f"{function.__module__}:{function.__qualname__}"
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        simulated = rank, world_size, routing
        call = function, args, self._raised, simulated, memory_gib, context_gib
        _send(self._process.stdin, call)
        try:
            result, error = pickle.load(self._process.stdout)
        except EOFError:
            raise Failed(f"the workbench ended with {self._process.wait()}") from None
        if isinstance(error, Exception):
            raise error
        if error is not None:
            raise Failed(error)
        return result


def _send(stream: BinaryIO | Any, message: Any) -> None:
    pickle.dump(message, stream)
    stream.flush()


def serve(parent: str, *imports: str) -> None:
    """Answer calls from stdin until stdin or the process with the ID `parent` ends."""
    from .rank import count_compiled

    _die_with_parent(int(parent))
    answers = os.fdopen(os.dup(1), "wb")  # the pipe to the parent
    os.dup2(2, 1)  # what programs print is not an answer
    count_compiled()
    with _answer_for_the_device():
        for name in imports:
            importlib.import_module(name)
    while True:
        try:
            call = pickle.load(sys.stdin.buffer)
        except EOFError:
            leave_at_once()
        _send(answers, _call_in_fork(partial(_call_function, *call)))


@contextmanager
def _answer_for_the_device() -> Iterator[None]:
    """Answer modules that ask for the device's properties, without making a CUDA context here.

    megatron-core 0.20 asks for name and capability while it is imported. PyTorch would make a
    context in this process, and then no fork of it could use CUDA. A separate fork asks instead.
    """
    import torch

    ask = torch.cuda.get_device_properties

    @cache
    def answer(device: Any = None) -> SimpleNamespace:
        answers, error = _call_in_fork(lambda: (_picklable(ask(0)), None))  # there is one device
        if error is not None:
            raise Failed(f"the properties of the simulated GPU cannot be read: {error}")
        return SimpleNamespace(**answers)

    with mock.patch.object(torch.cuda, "get_device_properties", answer):
        yield
    if torch.cuda.is_initialized():
        raise Failed("an imported module has started CUDA, so forked processes cannot use it")


def _picklable(properties: Any) -> dict[str, Any]:
    """Return the properties that are numbers or text; the others cannot be pickled."""
    values = {n: getattr(properties, n) for n in dir(properties) if not n.startswith("_")}
    return {name: value for name, value in values.items() if isinstance(value, int | float | str)}


def _call_in_fork(run: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Call `run` in a fork and return its result and error; one of them is None."""
    readable, writable = os.pipe()
    server = os.getpid()
    child = os.fork()
    if not child:
        _die_with_parent(server)
        os.close(readable)
        with os.fdopen(writable, "wb") as pipe:
            pickle.dump(run(), pipe)
        leave_at_once()
    os.close(writable)
    with os.fdopen(readable, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if not answer:
        return None, f"died with status {os.waitstatus_to_exitcode(status)}"
    return pickle.loads(answer)  # written by our own fork


def _call_function(
    function: str,
    args: Sequence[Any],
    raised: tuple[type[Exception], ...],
    simulated: tuple[int, int, Routing],
    memory_gib: float | None,
    context_gib: float | None,
) -> tuple[Any, Any]:
    from .rank import one_rank

    module, _, name = function.partition(":")
    try:
        with one_rank(*simulated) as recorder:
            if memory_gib is not None:
                recorder.device.set_memory(memory_gib, context_gib)
            result = getattr(importlib.import_module(module), name)(*args)
            recorder.end_interval("end")
        return (result, recorder.report), None
    except raised as error:
        return None, error
    except BaseException:
        return None, traceback.format_exc()


def _die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however the parent ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


def leave_at_once(code: int = 0) -> NoReturn:
    """End this process and those that it started with :mod:`multiprocessing`.

    The rest of the interpreter's shutdown is skipped: it takes seconds once PyTorch is imported.
    """
    # This is what atexit would call: it shuts down managers and joins children.
    util._exit_function()  # type: ignore[attr-defined]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
