"""Choice of the parameters that train, and each parameter's part of the model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.memory_labels import label_module
from mcore_qwen3vl.model.flops import Trained
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel

label_module(__file__, "model, other")

PARTS = {
    "vision": r"(adapter\.model\.)?visual\.(?!merger\.|deepstack_merger_list\.)",
    "aligner": r"(adapter\.model\.)?visual\.(merger|deepstack_merger_list)\.",
    "language": r"(?!(adapter\.model\.)?visual\.)",
}
"""Regular expressions for the names of each part of the model.

The aligner is the mergers, DeepStack's included. An adapter belongs to the part that it adapts.
"""

_LAYER = re.compile(r"^decoder\.layers\.\d+\.")


class Freezing:
    """Chooses which parameters train, for all pipeline chunks of a rank.

    Call :meth:`apply` on every chunk before Megatron wraps them, then :meth:`check` on all ranks.
    """

    def __init__(self, frozen: Sequence[str] = (), trainable: Sequence[str] = ()) -> None:
        """
        Args:
            frozen: patterns of parameters that do not train. Each is a part (``vision``,
                ``aligner``, ``language``) or a regular expression, matched from the start of
                parameter names such as ``decoder.layers.3.mlp.linear_fc1.weight``, with layers
                counted over the whole model.
            trainable: patterns of the same kind. If there are any, a parameter trains only if it
                matches one of them and none of `frozen`.

        Raises:
            BadInput: a pattern is neither a part nor a regular expression.
        """
        self._frozen = _compile_patterns(frozen)
        self._trainable = _compile_patterns(trainable)
        self._used: set[str] = set()
        self._trained: Counter[str] = Counter()  # values, by part
        self._values: Counter[str] = Counter()
        self._layers: set[tuple[str, bool]] = set()  # layer's parameter, and whether it trains
        self.divided: str | None = None
        """After :meth:`check`: a parameter that trains in some of the decoder's layers only."""

    def add_trainable(self, patterns: Iterable[str]) -> None:
        """Add patterns of parameters to train, like the class's, for the next :meth:`apply`."""
        self._trainable |= _compile_patterns(patterns)

    def apply(self, chunk: Qwen3VLModel) -> None:
        """Set ``requires_grad`` of every parameter of one pipeline chunk."""
        for local_name, parameter in chunk.named_parameters():
            name = global_name(chunk, local_name)
            stop = {pattern for pattern, regex in self._frozen.items() if regex.match(name)}
            keep = {pattern for pattern, regex in self._trainable.items() if regex.match(name)}
            # An adapter's factor may have no rows on this rank, and so nothing to train.
            trains = not stop and bool(keep or not self._trainable) and parameter.numel() > 0
            parameter.requires_grad_(trains)
            self._used |= stop | keep
            if parameter.numel():
                self._layers.add((_LAYER.sub("decoder.layers.*.", name), trains))
            self._values[part_of(name)] += parameter.numel()
            self._trained[part_of(name)] += parameter.numel() * trains

    def check(self, *, every_stage_is_here: bool = True) -> Trained:
        """Return how much trains over all ranks, which all call this.

        It raises BadInput if nothing trains; or if a pattern selects no parameter on any rank and
        `every_stage_is_here`, so that none selects it on a pipeline stage without a rank.
        """
        everywhere: list[Any] = [None] * dist.get_world_size()
        mine = (self._used, self._trained, self._values, self._layers)
        dist.all_gather_object(everywhere, mine)
        patterns = {*self._frozen, *self._trainable}
        used, trained, values, layers = zip(*everywhere, strict=True)
        unused = sorted(patterns.difference(*used))
        if unused and every_stage_is_here:
            raise BadInput(
                f"--freeze/--trainable {' '.join(unused)} selects no parameter. Use "
                f"{', '.join(PARTS)}, or a regular expression for the start of names such as "
                "decoder.layers.0.mlp, visual.blocks, embedding or output_layer."
            )
        training: Counter[str] = sum(trained, Counter())
        totals: Counter[str] = sum(values, Counter())
        if not training.total():
            raise BadInput("--freeze/--trainable leave no parameter to train: freeze less.")
        of_layers = set().union(*layers)
        # Parameters that train in some layers and not in others.
        both = (name for name, trains in of_layers if trains and (name, False) in of_layers)
        self.divided = min(both, default=None)
        return Trained(**{part: training[part] / max(totals[part], 1) for part in PARTS})


def part_of(name: str) -> str:
    """Return which of :data:`PARTS` a parameter is in, by its name in ``named_parameters()``."""
    while name.startswith("module."):  # of Megatron's wrappers
        name = name.removeprefix("module.")
    return next(part for part, pattern in PARTS.items() if re.match(pattern, name))


def global_name(chunk: Qwen3VLModel, name: str) -> str:
    """Return a parameter's name in the whole model, with its layer numbered over all stages.

    The copy of a tied embedding that a pipeline's last stage has as its head is the embedding. Were
    it named apart, a pattern could freeze one of the two, and the all-reduce of their gradients
    would wait for ever.
    """
    if name == "output_layer.weight" and chunk.architecture.tie_word_embeddings:
        return "embedding.word_embeddings.weight"
    match = re.match(r"decoder\.layers\.(\d+)\.", name)
    if not match:
        return name
    number = chunk.decoder.layers[int(match[1])].layer_number - 1
    return f"decoder.layers.{number}.{name[match.end() :]}"


def _compile_patterns(patterns: Iterable[str]) -> dict[str, re.Pattern[str]]:
    """Return the regular expression of each pattern, or raise BadInput for an invalid one."""
    compiled = {}
    for pattern in patterns:
        try:
            compiled[pattern] = re.compile(PARTS.get(pattern, pattern))
        except re.error as error:
            raise BadInput(
                f"{pattern!r} is neither one of {', '.join(PARTS)} nor a regular expression: "
                f"{error}."
            ) from None
    return compiled
