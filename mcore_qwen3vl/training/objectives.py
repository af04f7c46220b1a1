"""What a run minimises, as Megatron's loop takes it: its forward step and its passes."""

from __future__ import annotations

from functools import partial

from mcore_qwen3vl.data.config import names_to_log, parse_sources
from mcore_qwen3vl.training.arguments.settings import Settings
from mcore_qwen3vl.training.forward_step import ForwardStep
from mcore_qwen3vl.training.hooks import Wrapper, call_original
from mcore_qwen3vl.training.second_model import SecondModel


def forward_step_of(settings: Settings) -> ForwardStep:
    """Return the forward step with the objective that the run minimises."""
    loop, loss = settings.loop, settings.loss
    return ForwardStep(
        loss.objective(settings, settings.lora),
        loss.compute(settings),
        data_sets=names_to_log(parse_sources(loop.training_data)),
        validation_sets=names_to_log(
            parse_sources(loop.valid_data_path) if loop.valid_data_path else ()
        ),
    )


def passes_of(settings: Settings, second: SecondModel | None) -> Wrapper:
    """Return what replaces ``get_forward_backward_func``: some losses take two passes in a step."""
    frozen = second.in_place_of if second else None
    passes = settings.loss.schedule(settings, settings.lora, frozen)
    if passes is None:
        return call_original
    return lambda original, *args, **kwargs: partial(passes, original(*args, **kwargs))
