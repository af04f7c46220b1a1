"""Energon's real loaders shard, blend and resume real files."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from threading import RLock, Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.energon import savable_loader
from torch.utils.data import get_worker_info
from transformers import AutoTokenizer
from transformers.models.qwen3_vl import video_processing_qwen3_vl

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data import DataConfig, Loader, Source, load_processor
from mcore_qwen3vl.data import processor as processor_module
from mcore_qwen3vl.data.config import parse_sources
from mcore_qwen3vl.data.inspection import check_data
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.losses.preference import PreferenceLoss
from mcore_qwen3vl.losses.reward import Reward
from mcore_qwen3vl.tiny.tiny_checkpoint import TINY
from tests.data.conftest import WriteJsonl, chat, question, write_tar
from tests.data.loaders import PACKED, MakeLoader, lines, same
from tests.data.writers import WRITERS
from tests.turns import slow

PADDED = DataConfig(seq_length=256, micro_batch_size=2, pad_to_longest=True)


@pytest.mark.parametrize("workers", [0, *slow(2)])
def test_without_shuffling_every_sample_comes_once_an_epoch_in_order(
    workers: int, make: MakeLoader, records: Path
) -> None:
    for rank in range(2):
        loader = make(records, dp_rank=rank, dp_size=2, num_workers=workers)
        mine = [lines(next(loader))[0] for _ in range(41)]
        assert mine == [(2 * step + rank) % 41 for step in range(41)]


def test_ranks_of_one_replica_read_the_same(make: MakeLoader, records: Path) -> None:
    loaders = [make(records, config=PACKED, dp_rank=1, dp_size=2) for _ in range(2)]
    for _ in range(5):
        assert same(next(loaders[0]), next(loaders[1]))


def test_reading_leaves_the_generator_of_dropout_alone(make: MakeLoader, records: Path) -> None:
    """torch's data loader draws from it when it starts, as a validation or a resume does."""
    torch.manual_seed(7)
    state = torch.get_rng_state()
    next(make(records, config=PADDED))
    assert torch.equal(torch.get_rng_state(), state)


def test_seed_changes_the_order(make: MakeLoader, records: Path) -> None:
    first = [lines(next(make(records, config=PADDED, seed=seed))) for seed in (0, 0, 1)]
    assert first[0] == first[1] != first[2]


@pytest.mark.parametrize(("after", "workers"), [*slow((0, 2), (1, 2), (5, 2)), (1, 0), (12, 0)])
@pytest.mark.parametrize("config", [PACKED, PADDED], ids=["packed", "padded"])
def test_resume_continues_with_the_next_batch(
    after: int, config: DataConfig, workers: int, make: MakeLoader, records: Path, tmp_path: Path
) -> None:
    uninterrupted = make(records, config=config, num_workers=workers)
    for _ in range(after):
        next(uninterrupted)
    torch.save(uninterrupted.state_dict(), tmp_path / "state.pt")
    expected = [next(uninterrupted) for _ in range(6)]

    resumed = make(records, config=config, num_workers=workers)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for batch in expected:
        assert same(next(resumed), batch)


@pytest.mark.parametrize(("between", "workers"), [*slow((0, 2), (1, 2), (3, 2)), (1, 0)])
def test_resume_from_a_resumed_run(
    between: int, workers: int, make: MakeLoader, records: Path
) -> None:
    """A run may stop again soon after it resumed, when a worker may not have read anything."""
    uninterrupted = make(records, config=PACKED, num_workers=workers)
    every = [next(uninterrupted) for _ in range(12)]

    first = make(records, config=PACKED, num_workers=workers)
    for _ in range(5):
        next(first)
    second = make(records, config=PACKED, num_workers=workers)
    second.load_state_dict(first.state_dict())
    for index in range(between):
        assert same(next(second), every[5 + index])
    third = make(records, config=PACKED, num_workers=workers)
    third.load_state_dict(second.state_dict())
    for index in range(5 + between, 12):
        assert same(next(third), every[index])


@pytest.mark.slow
@pytest.mark.parametrize("resumed", [False, True])
def test_a_state_saved_before_a_worker_began(
    resumed: bool, make: MakeLoader, records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine, one worker may deliver before the other has restored its state."""

    class SecondIsLate(Thread):
        def start(self) -> None:
            super().start()
            if get_worker_info().id == 1:
                time.sleep(2)

    def saved(state: dict[str, Any] | None) -> dict[str, Any]:
        loader = make(records, config=PACKED, num_workers=2)
        if state is not None:
            loader.load_state_dict(state)
        next(loader)
        return loader.state_dict()

    uninterrupted = make(records, config=PACKED, num_workers=2)
    before = None
    if resumed:
        for _ in range(4):
            next(uninterrupted)
        before = uninterrupted.state_dict()
    next(uninterrupted)
    with monkeypatch.context() as patch:
        patch.setattr(
            savable_loader, "threading", SimpleNamespace(Thread=SecondIsLate, RLock=RLock)
        )
        after = saved(before)
    third = make(records, config=PACKED, num_workers=2)
    third.load_state_dict(after)
    for _ in range(4):
        assert same(next(third), next(uninterrupted))


@pytest.mark.slow
def test_state_does_not_depend_on_when_workers_noted_theirs(
    make: MakeLoader, records: Path
) -> None:
    """If workers note their state every batch, not every minute, nothing is read again."""
    often = {"config": PACKED, "num_workers": 2, "checkpoint_every_seconds": 0.0}
    uninterrupted = make(records, **often)
    for _ in range(5):
        next(uninterrupted)
    state = uninterrupted.state_dict()
    resumed = make(records, **often)
    resumed.load_state_dict(state)
    for _ in range(3):
        assert same(next(resumed), next(uninterrupted))


def test_blending_follows_the_weights(make: MakeLoader, write_jsonl: WriteJsonl) -> None:
    few = write_jsonl([question(i, image=False) for i in range(5)], "few.jsonl")
    many = write_jsonl([question(i, image=False) for i in range(50)], "many.jsonl")
    loader = make(Source(few, 3.0), Source(many, 1.0))
    names = Counter(Path(next(loader).names[0].rsplit(":", 1)[0]).name for _ in range(200))
    assert 126 < names["few.jsonl"] < 174  # 150 expected, deviation 6.1


def test_metadataset_yaml(make: MakeLoader, write_jsonl: WriteJsonl, tmp_path: Path) -> None:
    write_jsonl([question(i, image=False) for i in range(5)], "a.jsonl")
    write_jsonl([question(i, image=False) for i in range(5)], "b.jsonl")
    (tmp_path / "blend.yaml").write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"
        "      - {path: a.jsonl, weight: 1}\n      - {path: b.jsonl, weight: 1}\n"
    )
    loader = make(tmp_path / "blend.yaml")
    names = {Path(next(loader).names[0].rsplit(":", 1)[0]).name for _ in range(30)}
    assert names == {"a.jsonl", "b.jsonl"}


def test_webdataset_of_captions_interleaved_documents_and_chats(
    make: MakeLoader, media: Path, tmp_path: Path
) -> None:
    image = (media / "0.png").read_bytes()
    interleaved = {"texts": ["x ", None, " y"], "images": [None, "a.png", None]}
    talk = {**chat(("user", "<image>?"), ("assistant", "z")), "images": ["png"]}
    samples: list[dict[str, bytes]] = [
        {"png": image, "txt": b"a caption"},
        {"json": json.dumps(interleaved).encode(), "a.png": image},
        {"json": json.dumps(talk).encode(), "png": image},
        {"png": image, "json": json.dumps({"caption": "in json"}).encode()},
    ]
    members = [
        (f"{key}.{suffix}", content)
        for key, parts in enumerate(samples)
        for suffix, content in parts.items()
    ]
    loader = make(write_tar(tmp_path / "tars" / "0.tar", members).parent)
    tokenizer = TINY.make_tokenizer()
    trained = [
        tokenizer.decode([t for t in next(loader).labels[0].tolist() if t >= 0]) for _ in range(4)
    ]
    end = "<|endoftext|>"
    assert trained == ["a caption" + end, " " + " y" + end, "z<|im_end|>", "in json" + end]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "tar"])
def test_a_key_with_two_values_makes_a_record_bad(
    suffix: str, make: MakeLoader, write_jsonl: WriteJsonl, tmp_path: Path, processor: Any
) -> None:
    """Python would take the last; the same value twice is no question."""
    texts = [json.dumps(question(i, image=False)) for i in range(4)]
    same = f"{texts[2][:-1]}, {texts[2][1:]}"
    twice = f"{texts[3][:-1]}, {texts[1][1:]}"
    records = [texts[0], texts[1], same, twice]
    path = write_jsonl(records)
    if suffix == "json":
        path = tmp_path / "data.json"
        path.write_text(f"[{', '.join(records)}]")
    if suffix == "tar":
        members = [(f"{i}.json", record.encode()) for i, record in enumerate(records)]
        path = write_tar(tmp_path / "tars" / "0.tar", members).parent
    said = "the key 'messages' comes twice, with other values: keep one"
    (flaw,) = check_data(path, processor, DataConfig(seq_length=256)).bad
    assert said in flaw.reason
    loader = make(path, config=DataConfig(seq_length=256, shuffle=False, max_bad_fraction=0.0))
    with pytest.raises(BadInput, match=said):
        list(islice(loader, 4))


@pytest.mark.parametrize(
    ("made_for", "advice"),
    [
        ({}, "rejected_response belongs to .*--loss dpo, simpo or orpo trains on both"),
        (
            {"records": PreferenceLoss.records},
            "rejected_response .* --loss dpo, simpo and orpo need chosen and rejected, which .*",
        ),
        (
            {"records": Reward.records},
            "rejected_response is another .* --task reward needs chosen and rejected, which .*",
        ),
    ],
)
def test_preference_records_of_another_program_are_named(
    make: MakeLoader, write_jsonl: WriteJsonl, made_for: dict[str, Any], advice: str
) -> None:
    records = [question(i, image=False) for i in range(4)]
    path = write_jsonl([{**record, "rejected_response": "no"} for record in records])
    loader = make(path, config=DataConfig(seq_length=256, shuffle=False, **made_for))
    with pytest.raises(BadInput, match=f"{advice}.*--preprocess"):
        next(loader)


def test_more_workers_than_samples_of_tars_are_refused(
    make: MakeLoader, media: Path, tmp_path: Path
) -> None:
    path = WRITERS["tars"](tmp_path, media)
    with pytest.raises(BadInput, match=r"fewer samples than data workers \(30 data-parallel"):
        make(path, dp_rank=29, dp_size=30, num_workers=2)


def test_sources_are_read_as_megatron_reads_its_data_path() -> None:
    assert parse_sources(["a.jsonl"]) == [Source(Path("a.jsonl"))]
    assert parse_sources(["0.3", "a", "0.7", "b"]) == [
        Source(Path("a"), 0.3),
        Source(Path("b"), 0.7),
    ]
    for words in ([], ["a", "b"], ["0.5", "a", "b"], ["0", "a", "1", "b"]):
        with pytest.raises(BadInput, match="neither one path"):
            parse_sources(words)


def test_processors_of_an_older_transformers_are_refused(
    processor_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They write other text for videos, and cannot tell how many patches one will have."""
    monkeypatch.setattr(processor_module, "version", {"transformers": "5.17.0"}.get)
    with pytest.raises(BadInput, match=r"5\.18 or newer; 5\.17\.0 is"):
        load_processor(processor_dir)


GROWTH = 25_000  # bytes a batch that count as a leak


def leaks(loader: Loader, meanwhile: Callable[[], Any] = lambda: None) -> set[str]:
    """Return what grows while 200 batches are read, after 100 have filled caches and pools."""
    kept = []

    def held() -> tuple[int, int]:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))

    for _ in islice(loader, 100):
        pass
    memory, files = held()
    for _ in islice(loader, 200):
        kept.append(meanwhile())
    memory_now, files_now = held()
    grown = {"memory": memory_now - memory > 200 * GROWTH, "files": files_now > files}
    return {what for what, grows in grown.items() if grows}


@pytest.mark.slow
def test_nothing_grows_with_the_batches(make: MakeLoader, data: Path) -> None:
    assert leaks(make(data, config=PACKED)) == set()


@pytest.mark.slow
def test_what_grows_is_found(make: MakeLoader, data: Path) -> None:
    # 100 MB in all: less may fit into what earlier tests have freed, and then nothing grows.
    assert leaks(make(data, config=PACKED), lambda: b"a" * 500_000) == {"memory"}
    assert leaks(make(data, config=PACKED), lambda: data.open("rb")) == {"files"}


def test_frames_are_capped_by_the_budgets_alone_and_nothing_is_said_of_it(
    processor_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(video_processing_qwen3_vl.logger, "warning_once", said.append)
    videos = load_processor(processor_dir).video_processor
    frames = np.zeros((4, 3, 64, 64), np.uint8)
    videos(videos=[frames], do_sample_frames=False, return_tensors="pt")
    assert said == []


def test_a_token_beyond_the_rows_of_the_model_is_refused(dense: Path, tmp_path: Path) -> None:
    """Under TP the padding would give it a row, and with it a log-probability."""
    folder = shutil.copytree(dense, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    free = Architecture.from_hf(folder).vocab_size - len(tokenizer)
    tokenizer.add_tokens([f"<new{i}>" for i in range(free)])
    tokenizer.save_pretrained(folder)
    assert load_processor(folder)
    tokenizer.add_tokens(["<a>", "<b>"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(BadInput, match=r"2 of its tokens.*352 rows.*'<a>' has the id 352.*ab 354`"):
        load_processor(folder)
