"""What the losses over pairs of a chosen and a rejected answer share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mcore_qwen3vl.data.record_form import RecordForm
from mcore_qwen3vl.data.records.reading import Reading
from mcore_qwen3vl.lazy import Lazy

if TYPE_CHECKING:
    from torch import Tensor

    from mcore_qwen3vl.data.records import tasks
    from mcore_qwen3vl.data.records.media import MediaFolder
    from mcore_qwen3vl.data.records.messages import Conversation
else:
    tasks = Lazy("mcore_qwen3vl.data.records.tasks")


@dataclass(frozen=True)
class PairRecords(RecordForm):
    """Preference records: a pair takes two rows of a padded batch."""

    needed_by: ClassVar[str]
    """What needs such records, with the verb."""

    def parse(
        self, record: Mapping[str, Any], folder: MediaFolder, reading: Reading
    ) -> Mapping[str, Conversation]:
        tasks.require_preference(record, self.needed_by)
        return tasks.parse_pair(record, folder, reading)


def numbers_of_rewards(rewards: Tensor) -> dict[str, Tensor]:
    """Return the log's numbers (P,), by name, of the rewards (P, 2) of pairs.

    A pair is right, 1.0 and not 0.0, if the chosen answer's reward is the higher one.
    """
    chosen, rejected = rewards.unbind(1)
    return {
        "rewards chosen": chosen,
        "rewards rejected": rejected,
        "rewards margin": chosen - rejected,
        "rewards accuracy": (chosen - rejected > 0).float(),
    }
