"""The labels of a classifier, as transformers' configs have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from mcore_qwen3vl.config import family_of
from mcore_qwen3vl.errors import BadInput

ProblemType = Literal["single_label_classification", "multi_label_classification"]
"""Whether exactly one label of a record is right, or any number of them; HF's names."""
SINGLE: ProblemType = "single_label_classification"


@dataclass(frozen=True)
class Labels:
    """The outputs of a head, in order; there may be none, if a model ends in its final norm."""

    names: tuple[str, ...] = ()
    problem_type: ProblemType | None = None  # None: scores, such as a reward, and no labels

    def __len__(self) -> int:
        return len(self.names)

    def __str__(self) -> str:
        return f"{', '.join(self.names)[:200]} ({self.problem_type})"

    @property
    def are_exclusive(self) -> bool:
        """Whether exactly one label of a record is right."""
        return self.problem_type == SINGLE

    @classmethod
    def numbered(cls, count: int, problem_type: ProblemType | None = None) -> Self:
        """Return `count` labels with the names that transformers gives them."""
        return cls(tuple(f"LABEL_{number}" for number in range(count)), problem_type)

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Self | None:
        """Return the labels that a ``config.json`` names, or None if it is not a classifier's.

        transformers leaves out the names of two labels that have no names of their own. BadInput is
        raised if ``id2label`` does not name the labels 0, 1 and so on.
        """
        names, kinds = config.get("id2label"), config.get("architectures") or ()
        problem_type = config.get("problem_type")
        if names is None:
            is_classifier = any(str(kind).endswith("ForSequenceClassification") for kind in kinds)
            return cls.numbered(2, problem_type) if is_classifier else None
        try:
            return cls(tuple(str(names[str(number)]) for number in range(len(names))), problem_type)
        except (KeyError, TypeError) as error:
            raise BadInput(f"id2label in config.json is {names!r:.80}: name all labels.") from error

    def in_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a ``config.json`` with these labels; names that it has replace `numbered` ones."""
        wanted = dict(config)
        if self.problem_type:
            wanted["problem_type"] = self.problem_type
        there = config.get("id2label") or {}
        same_names = (tuple(there.values()), Labels.numbered(len(there)).names)
        if len(there) == len(self) and self.names in same_names:
            return wanted
        return wanted | {
            "architectures": [f"{family_of(wanted).name}ForSequenceClassification"],
            "id2label": {str(number): name for number, name in enumerate(self.names)},
            "label2id": {name: number for number, name in enumerate(self.names)},
        }


NO_LABELS, ONE_SCORE = Labels(), Labels.numbered(1)
"""The heads of embedding models, which have none, and of reward models and critics."""
