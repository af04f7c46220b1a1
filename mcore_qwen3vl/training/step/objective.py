"""What a run minimises: its forward step, and the passes that a step takes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from mcore_qwen3vl.data.loading.sources import parse_sources, source_names
from mcore_qwen3vl.training.arguments.losses import (
    DISTILL,
    KTO,
    LOSSES,
    distillation_of,
    kto_of,
    preference_of,
    reference_of,
)
from mcore_qwen3vl.training.arguments.tasks import contrastive_of
from mcore_qwen3vl.training.hooks import Wrapper, unchanged
from mcore_qwen3vl.training.second_model import SecondModel
from mcore_qwen3vl.training.step.distillation import compared, of_divergences, teacher_step
from mcore_qwen3vl.training.step.forward import ForwardStep
from mcore_qwen3vl.training.step.losses import find_loss, of_tokens
from mcore_qwen3vl.training.step.preference import (
    ANSWERS_STEP,
    of_labelled,
    of_pairs,
    with_baseline,
    without_adapter,
)
from mcore_qwen3vl.training.step.tasks import objective_of, with_contrasts
from mcore_qwen3vl.training.step.two_passes import two_passes


def forward_step_of(args: argparse.Namespace) -> ForwardStep:
    """Return the forward step with the objective that the run minimises."""
    step = partial(
        ForwardStep,
        data_sets=source_names(parse_sources(args.train_data_path or args.data_path)),
        validation_sets=source_names(
            parse_sources(args.valid_data_path) if args.valid_data_path else ()
        ),
    )
    if args.task:
        return step(*objective_of(args))
    if args.loss in LOSSES:
        return step(of_pairs(preference_of(args)))
    if args.loss == KTO:
        return step(of_labelled(kto_of(args)))
    if args.loss == DISTILL:
        settings = distillation_of(args)
        return step(of_divergences(settings), run=compared(settings))
    return step(of_tokens(find_loss(args.loss)))


def schedule_of(args: argparse.Namespace, second: SecondModel | None) -> Wrapper:
    """Return what replaces ``get_forward_backward_func``: some losses take two passes in a step."""
    reference = second.in_place if second else without_adapter
    passes: Callable[..., Any]
    if args.task == "embedding":
        passes = partial(with_contrasts, contrastive_of(args))
    elif args.loss == DISTILL and second:
        first = teacher_step(args.teacher_top_k, distillation_of(args).temperature)
        passes = partial(two_passes, "teacher", first=first, within=second.in_place)
    elif args.loss in LOSSES and reference_of(args) in ("adapter", "model"):
        passes = partial(two_passes, "references", first=ANSWERS_STEP, within=reference)
    elif args.loss == KTO:
        passes = partial(with_baseline, reference)
    else:
        return unchanged
    return lambda original, *args, **kwargs: partial(passes, original(*args, **kwargs))
