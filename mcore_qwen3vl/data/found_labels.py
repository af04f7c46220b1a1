"""The labels that data sets of a classifier have, for heads whose labels nothing else names."""

from __future__ import annotations

from collections.abc import Sequence

from mcore_qwen3vl.data.loading.datasets import SOURCE, CrudeSamples
from mcore_qwen3vl.data.loading.sources import Source
from mcore_qwen3vl.data.records.classification import labels_in
from mcore_qwen3vl.data.records.reading import preprocessed
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import parse_json
from mcore_qwen3vl.labels import Labels

_MOST = 100_000  # a head of more labels is rather a record with an id in the wrong key


def found_labels(sources: Sequence[Source], *, trust: bool) -> Labels:
    """Return the labels of all records: names in alphabetical order, or numbers up to the largest.

    Records that cannot be used are left out, as in training.

    Raises:
        BadInput: there are none, or both names and numbers.
    """
    found: set[int | str] = set()
    for crude in CrudeSamples(sources, split="train", trust=trust):
        record = crude.get("json")
        try:
            record = parse_json(record) if isinstance(record, bytes) else record
            source = sources[crude["__subflavors__"][SOURCE]]
            found.update(labels_in(preprocessed(record, source.reading)))
        except BadInput:  # the hook cannot be imported
            raise
        except Exception:  # as in the loader, any exception makes the record bad
            continue
    numbers = [one for one in found if isinstance(one, int)]
    names = sorted(one for one in found if isinstance(one, str))
    if numbers and names:
        raise BadInput(
            f"Some labels are numbers ({min(numbers)}), others names ({names[0]}): use one kind."
        )
    if not found:
        raise BadInput(
            f"No record of {sources[0].path} has a label, which --task classify trains on."
        )
    if numbers and max(numbers) >= _MOST:
        raise BadInput(
            f"A label is {max(numbers)}, and labels are numbered from 0: for so many, pass "
            "--num-labels."
        )
    return Labels(tuple(names)) if names else Labels.numbered(max(numbers) + 1)
