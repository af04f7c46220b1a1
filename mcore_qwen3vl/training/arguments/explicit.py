"""Beside what the config fixes: defaults that suit the model, and flags that contradict it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.errors import BadInput


def recommended_arguments(architecture: Architecture) -> dict[str, Any]:
    """Defaults that suit the model and that a flag may change."""
    defaults = {
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "init_method_std": architecture.initializer_range,
        # Qwen's vocabulary divides by every usual TP; padding is for those that do not.
        "make_vocab_size_divisible_by": 1,
        # Text is tokenised by the HF processor in the data workers; Megatron's own tokenizer
        # only has to name the vocabulary size.
        "tokenizer_type": "NullTokenizer",
        # The other one refuses the variable-length transfers of some pipeline splits, and mcore
        # asks it even when the model is dense.
        "moe_token_dispatcher_type": "alltoall",
    }
    if architecture.is_moe:
        defaults |= {
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": architecture.router_aux_loss_coef,
        }
    return defaults


def explicit_arguments(parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, Any]:
    """The arguments that `argv` itself sets, by ``dest`` name, without any default."""
    defaults = [(action, action.default) for action in parser._actions]
    for action, _ in defaults:
        action.default = argparse.SUPPRESS
    explicit = vars(parser.parse_known_args(list(argv))[0])
    for action, default in defaults:
        action.default = default
    return explicit


def check_explicit(
    parser: argparse.ArgumentParser, explicit: Mapping[str, Any], fixed: Mapping[str, Any]
) -> None:
    """Refuse flags that contradict the checkpoint's config.

    Args:
        parser: names the flag of each argument.
        explicit: what the command line sets (:func:`explicit_arguments`).
        fixed: what the config says; a different value would be a different model.

    Raises:
        BadInput: naming every such flag, its value and the config's.
    """
    flags = {action.dest: action.option_strings[0] for action in parser._actions if action.dest}
    wrong = [
        f"{flags[name]} sets {name} to {explicit[name]}, the config says {value}"
        for name, value in fixed.items()
        if name in explicit and explicit[name] != value
    ]
    if wrong:
        raise BadInput(
            f"The command line contradicts the --hf-model config: {'; '.join(wrong)}. "
            "--hf-model supplies the architecture: leave these flags out."
        )
