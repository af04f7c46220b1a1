"""What a run minimises: its forward step, and the passes that a step takes."""

from __future__ import annotations

import argparse
from functools import partial

from mcore_qwen3vl.data.loading.sources import parse_sources, source_names
from mcore_qwen3vl.training.distillation.flags import DISTILL, distillation_of
from mcore_qwen3vl.training.distillation.live_teacher import with_teacher
from mcore_qwen3vl.training.distillation.objective import compared, of_divergences
from mcore_qwen3vl.training.hooks import Wrapper, unchanged
from mcore_qwen3vl.training.preference import flags as preference
from mcore_qwen3vl.training.preference.objective import of_labelled, of_pairs
from mcore_qwen3vl.training.preference.reference import (
    with_baseline,
    with_reference,
    without_adapter,
)
from mcore_qwen3vl.training.second_model.model import SecondModel
from mcore_qwen3vl.training.step.forward import ForwardStep
from mcore_qwen3vl.training.step.losses import find_loss, of_tokens
from mcore_qwen3vl.training.tasks.contrastive import with_contrasts
from mcore_qwen3vl.training.tasks.flags import contrastive_of
from mcore_qwen3vl.training.tasks.objectives import objective_of


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
    if args.loss in preference.LOSSES:
        return step(of_pairs(preference.preference_of(args)))
    if args.loss == preference.KTO:
        return step(of_labelled(preference.kto_of(args)))
    if args.loss == DISTILL:
        settings = distillation_of(args)
        return step(of_divergences(settings), compared(settings))
    return step(of_tokens(find_loss(args.loss)))


def schedule_of(args: argparse.Namespace, second: SecondModel | None) -> Wrapper:
    """Return what replaces ``get_forward_backward_func``: some losses take two passes in a step."""
    if args.task == "embedding":
        return partial(with_contrasts, contrastive_of(args))
    if args.loss == DISTILL and second:
        return partial(
            with_teacher, second.in_place, args.teacher_top_k, distillation_of(args).temperature
        )
    reference = second.in_place if second else without_adapter
    if args.loss in preference.LOSSES and preference.reference_of(args) in ("adapter", "model"):
        return partial(with_reference, reference)
    if args.loss == preference.KTO:
        return partial(with_baseline, reference)
    return unchanged
