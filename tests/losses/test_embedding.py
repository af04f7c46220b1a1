"""Embedding training in Megatron's loop equals one process on the whole batch, in every layout."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoProcessor, Qwen3_5Model, Qwen3VLModel

from mcore_qwen3vl import machine
from mcore_qwen3vl.converters.convert import hf_to_mcore
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.losses.embedding import Contrastive, Embedding
from mcore_qwen3vl.scoring.score import ScoreRequest, _ScoringJob, score
from mcore_qwen3vl.verification.curves import Job, train
from mcore_qwen3vl.verification.parity.case import ADAPTERS, write_random_adapter
from tests.losses.flags import TASK, loss_of, parsed
from tests.losses.retrieval import embedding, plain_step, texts_of
from tests.losses.whole_batch import LAYOUTS, PACKED, scored, trained_twice
from tests.training.one_step import TOLERANCE, check_step, step_job
from tests.turns import slow, slow_except


def embedding_job(checkpoint: Path, data: Path, layout: str, *flags: str, **options: Any) -> Job:
    return step_job(checkpoint, data, layout, "--task", "embedding", *flags, **options)


def check(job: Job, contrastive: Contrastive, folder: Path) -> None:
    check_step(job, plain_step(job, contrastive), contrastive.name, folder)


@pytest.mark.parametrize(
    ("kind", "layout", "flags"),
    [
        *slow_except(LAYOUTS, ("dense", "cp2", PACKED)),
        ("hybrid", "tp2+sp", PACKED),
        *slow(
            ("dense", "pp2", PACKED),
            ("dense", "tp2xpp2+sp", ()),
            ("dense", "cp2xdp2", PACKED),
            ("moe", "ep2xpp2xdp2", PACKED),
            ("hybrid", "cp2", PACKED),
            ("hybrid_moe", "ep2xdp2", PACKED),
        ),
    ],
)
def test_loss_and_every_gradient_are_those_of_one_process(
    checkpoint: Path, layout: str, flags: tuple[str, ...], retrieval: Path, tmp_path: Path
) -> None:
    check(embedding_job(checkpoint, retrieval, layout, *flags), Contrastive(), tmp_path)


@pytest.mark.parametrize(
    ("layout", "flags", "contrastive"),
    [
        ("dp2", ("--temperature", "0.2"), Contrastive(0.2)),
        *slow(("tp2xdp2+sp", ("--matryoshka-dims", "8", "32"), Contrastive(dimensions=(8, 32)))),
    ],
)
def test_one_micro_batch_a_rank_takes_one_pass(
    layout: str,
    flags: tuple[str, ...],
    contrastive: Contrastive,
    dense: Path,
    retrieval: Path,
    tmp_path: Path,
) -> None:
    job = embedding_job(dense, retrieval, layout, *PACKED, *flags, batch=2)
    check(job, contrastive, tmp_path)


@pytest.mark.parametrize(
    ("loss", "layout", "flags"),
    [
        ("cosent", "dp2", PACKED),
        *slow(
            ("cosine", "pp2", PACKED),
            ("cosent", "single", PACKED),
            ("cosent", "dp2", ()),
            ("cosent", "tp2+sp", PACKED),
            ("cosent", "pp2", PACKED),
            ("cosent", "cp2", PACKED),
            ("cosent", "dp2", (*PACKED, "--matryoshka-dims", "8", "32")),
            ("cosine", "tp2xcp2+sp", PACKED),
            ("cosine", "dp2", PACKED),
        ),
    ],
)
def test_losses_of_pairs_are_those_of_one_process(
    loss: Any, layout: str, flags: tuple[str, ...], dense: Path, scored_pairs: Path, tmp_path: Path
) -> None:
    """CoSENT compares all pairs of the global batch, those of other ranks too."""
    job = embedding_job(dense, scored_pairs, layout, "--embedding-loss", loss, *flags)
    dimensions = (8, 32) if "--matryoshka-dims" in flags else ()
    check(job, Contrastive(kind=loss, dimensions=dimensions), tmp_path)


@pytest.mark.parametrize(
    ("data", "flags", "message"),
    [
        ("retrieval", ("--embedding-loss", "cosent"), "train on two texts with a score"),
        ("scored_pairs", (), r"its score is 0\.\d+, and this would train on it as on any positive"),
    ],
)
def test_records_for_another_loss_are_refused(
    data: str,
    flags: tuple[str, ...],
    message: str,
    dense: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    capfd: pytest.CaptureFixture[str],
) -> None:
    job = embedding_job(dense, request.getfixturevalue(data), "single", *PACKED, *flags)
    with pytest.raises(BadInput, match="bad"):
        train(job, tmp_path / "run")
    said = [file.read_text() for file in (tmp_path / "run").glob("*.txt")]
    assert re.search(message, "".join([capfd.readouterr().err, *said]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"), [("dense", "single"), ("dense", "dp2"), ("moe", "ep2xdp2")]
)
def test_an_adapter_trains(
    kind: str, checkpoint: Path, layout: str, retrieval: Path, tmp_path: Path
) -> None:
    targets = "experts" if kind == "moe" else "language"
    adapter = write_random_adapter(tmp_path / "adapter", ADAPTERS[targets], checkpoint)
    job = embedding_job(checkpoint, retrieval, layout, *PACKED, lora=adapter)
    check(job, Contrastive(), tmp_path)


@pytest.fixture(scope="module")
def headless(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the dense model as Qwen3-VL-Embedding-8B is stored: untied, and without lm_head."""
    folder = tmp_path_factory.mktemp("headless")
    shutil.copytree(dense, folder, dirs_exist_ok=True)
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    del tensors["lm_head.weight"]
    save_file(tensors, weights, {"format": "pt"})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        ("headless", ("pp2", "cp2")),
        ("tied", ("dp2", "tp2xcp2+sp", "pp2")),
        ("hybrid", ("tp2", "cp2")),
    ],
)
def test_a_headless_model_is_trained_exported_scored_and_resumed(
    checkpoint: Path, layouts: tuple[str, ...], retrieval: Path, tmp_path: Path
) -> None:
    """Transformers' own class loads the export, and embeds as `score` does, in any form."""
    job = embedding_job(checkpoint, retrieval, "pp2", *PACKED)
    save, exported = trained_twice(job, "contrastive loss", tmp_path)
    assert "lm_head.weight" not in load_file(exported / "model.safetensors")
    expected = embeddings_of(exported, retrieval)
    for layout in layouts:
        checkpoint, suffix = (save, "npy") if "cp2" in layout else (exported, "parquet")
        compare_scores(checkpoint, layout, retrieval, tmp_path / f"{layout}.{suffix}", expected)


@pytest.mark.slow
def test_a_language_model_embeds_from_megatrons_format(
    dense: Path, retrieval: Path, tmp_path: Path
) -> None:
    """Its head is in the checkpoint, and is not read."""
    hf_to_mcore(dense, tmp_path / "mcore")
    expected = embeddings_of(dense, retrieval)
    compare_scores(tmp_path / "mcore", "tp2+sp", retrieval, tmp_path / "out.parquet", expected)


def embeddings_of(checkpoint: Path, data: Path) -> Tensor:
    """Return the embeddings (N, H) of all texts by transformers' own class."""
    model = AutoModel.from_pretrained(checkpoint, dtype=torch.float32)
    assert type(model) in (Qwen3VLModel, Qwen3_5Model)
    processor = AutoProcessor.from_pretrained(checkpoint)
    lines = map(json.loads, data.read_text().splitlines())
    with torch.no_grad():
        states = [
            embedding(model, processor, text, data.parent)
            for record in lines
            for text in texts_of(record)
        ]
    return torch.nn.functional.normalize(torch.stack(states), dim=-1)


def compare_scores(checkpoint: Path, layout: str, data: Path, out: Path, expected: Tensor) -> None:
    """Compare what `score` writes with `expected`."""
    found = scored(checkpoint, data, out, layout, "embedding")
    assert found.embeddings == len(expected)
    if out.suffix == ".npy":
        embeddings = torch.from_numpy(np.load(out))
    else:
        rows = pq.read_table(out).to_pylist()
        assert [(row["line"], row["text"]) for row in rows[:3]] == [
            *((1, name) for name in ("query", "positive")),
            (2, "query"),
        ]
        embeddings = torch.tensor([row["embedding"] for row in rows])
    assert embeddings.shape == expected.shape
    worst = (embeddings - expected).abs().max()
    print(f"observed: score {layout} {worst:.1e}")
    assert worst <= TOLERANCE


@pytest.mark.parametrize(
    ("out", "options", "message"),
    [
        ("out.jsonl", {}, "headless model"),
        ("out.jsonl", {"task": "embedding"}, "embeddings are written as Parquet"),
        ("out.parquet", {"task": "embedding", "entropy": True}, "not for --task embedding"),
    ],
)
def test_what_score_refuses(
    out: str, options: dict[str, Any], message: str, headless: Path, retrieval: Path, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=message):
        score(ScoreRequest(headless, retrieval, tmp_path / out, **options), on_cpu=True)


def test_only_parquet_needs_pyarrow(
    headless: Path, retrieval: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    request = ScoreRequest(headless, retrieval, tmp_path / "out.npy", task="embedding")
    _ScoringJob(request)
    with pytest.raises(BadInput, match=r"out\.parquet needs the package pyarrow"):
        _ScoringJob(replace(request, out=tmp_path / "out.parquet"))


def test_values_and_defaults_of_an_embedding(moe: Path) -> None:
    found = parsed(moe, *TASK, "--temperature", "0.2", "--matryoshka-dims", "8", "16")
    assert isinstance(found.loss, Embedding)
    assert found.loss.contrastive == Contrastive(0.2, (8, 16))
    assert found.compute.moe_aux_loss_coeff == 0
    assert loss_of(moe, Embedding, *TASK).contrastive == Contrastive(0.05)
