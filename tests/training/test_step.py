"""The page of a run, training/step.py, names what exists, in the order in which a run calls it."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.training import hooks
from mcore_qwen3vl.training.step import BEGIN, HOOKS, STEP
from mcore_qwen3vl.verification.curves import run_rank
from tests.training.one_step import step_job


def test_who_does_it_exists() -> None:
    for event in (*BEGIN, *STEP):
        for who in event.by:
            assert resolve_name(who) is not None, who


def _first_calls(argv: list[str], output: Path) -> list[str]:
    """Train on this rank; return the wrapped functions that were called, by their first call."""
    called: dict[str, None] = {}
    wrap = hooks.wrap

    def wrap_and_note(module: Any, name: str, wrapper: hooks.Wrapper) -> None:
        def noted(*args: Any, **kwargs: Any) -> Any:
            called.setdefault(name)
            return wrapper(*args, **kwargs)

        wrap(module, name, noted)

    hooks.wrap = wrap_and_note
    run_rank(argv, output)
    return list(called)


def test_a_run_calls_what_it_wraps_in_this_order(dense: Path, data: Path, tmp_path: Path) -> None:
    flags = (
        *("--save", str(tmp_path / "saved"), "--save-interval", "1", "--exit-signal-handler"),
        *("--valid-data-path", str(data), "--eval-iters", "1", "--eval-interval", "1"),
    )
    resume = ("--load", str(tmp_path / "saved"), "--override-opt-param-scheduler")
    began, resumed = (
        run_layout(
            _first_calls,
            1,
            step_job(dense, data, "single", *flags, *more, steps=steps).argv,
            tmp_path / "output.txt",
        )[0]
        for steps, more in ((1, ()), (2, resume))
    )
    called = list(HOOKS)
    called.remove("compile_helpers")  # by a function that the CPU backend replaces
    assert began == [name for name in called if name != "check_checkpoint_args"]
    # A checkpoint is read into a state that is made as if it were saved.
    resumed.remove("generate_state_dict")
    assert resumed == [name for name in called if name != "generate_state_dict"]
