"""sentence-transformers loads an exported model as the docs say, and embeds as `score` does.

`make test-trl` installs the package; without it this module is skipped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcore_qwen3vl.scoring.score import ScoreRequest, score
from mcore_qwen3vl.verification.curves import train, with_image_paths
from tests.docs.markdown import ROOT, blocks
from tests.losses.retrieval import texts_of
from tests.losses.whole_batch import PACKED
from tests.training.one_step import TOLERANCE, step_job

pytest.importorskip("sentence_transformers")


def test_an_export_embeds_texts_and_images(dense: Path, retrieval: Path, tmp_path: Path) -> None:
    export, out = tmp_path / "export", tmp_path / "out.npy"
    job = step_job(dense, retrieval, "single", "--task", "embedding", *PACKED)
    train(job, tmp_path / "run", "--save-hf", str(export))
    exported = export / "iter_0000001"
    score(
        ScoreRequest(exported, retrieval, out, dtype="fp32", seq_length=512, task="embedding"),
        on_cpu=True,
    )
    made: dict[str, Any] = {}
    (example,) = blocks(ROOT / "docs/embedding.md", "python")
    exec(example.text.replace("export/iter_0000500", str(exported)), made)
    texts: list[Any] = [
        with_image_paths(text, retrieval.parent)
        for line in retrieval.read_text().splitlines()
        for text in texts_of(json.loads(line))
    ]
    expected = made["model"].encode(texts, batch_size=1)
    assert np.load(out).shape == expected.shape
    worst = np.abs(np.load(out) - expected).max()
    print(f"observed: {worst:.1e}")
    assert worst <= TOLERANCE
