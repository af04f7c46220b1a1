"""Which parameters are frozen, also under a pipeline, and which choices are refused."""

from __future__ import annotations

import pytest

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.freeze import Freezing, global_name, part_of
from mcore_qwen3vl.model.qwen3vl import build_chunks
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from mcore_qwen3vl.tiny import tiny_config

DENSE = Architecture.from_hf(tiny_config())
TIED = Architecture.from_hf(tiny_config(tie=True))


def frozen_and_trained(
    frozen: list[str], trainable: list[str], layout: Layout, architecture: Architecture = DENSE
) -> tuple[list[str], list[str]]:
    """Return the names frozen and trained on this rank, in the whole model's numbering."""
    initialize(layout)
    (model,) = build_chunks(architecture, layout)
    freezing = Freezing(frozen, trainable)
    freezing.apply(model)
    trains = {global_name(model, n): p.requires_grad for n, p in model.named_parameters()}
    stopped, trained = ([n for n, does in trains.items() if does is it] for it in (False, True))
    shares = freezing.check()
    values = {n: p.numel() for n, p in model.named_parameters() if part_of(n) == "vision"}
    if model.pre_process:
        kept = sum(count for name, count in values.items() if name in trained)
        assert shares.vision == kept / sum(values.values())
    assert 0 <= shares.language <= 1
    return stopped, trained


def stages(
    frozen: list[str], trainable: list[str], architecture: Architecture = DENSE
) -> list[tuple[list[str], list[str]]]:
    """Run :func:`frozen_and_trained` on each of two pipeline stages."""
    return run_layout(frozen_and_trained, 2, frozen, trainable, Layout(pp=2), architecture)


def test_what_matches_a_pattern_is_frozen() -> None:
    patterns = ["aligner", r"decoder\.layers\.3\.mlp"]
    ((frozen, trained),) = run_layout(frozen_and_trained, 1, patterns, [], Layout())
    assert trained
    assert not {*frozen} & {*trained}
    mergers = [name for name in frozen if name.startswith("visual.")]
    assert {name.split(".")[1] for name in mergers} == {"merger", "deepstack_merger_list"}
    assert [name for name in frozen if name not in mergers] == [
        "decoder.layers.3.mlp.linear_fc1.weight",
        "decoder.layers.3.mlp.linear_fc2.weight",
    ]


def test_layers_are_numbered_over_the_whole_pipeline() -> None:
    (_, first), (_, last) = stages([], [r"decoder\.layers\.3\.", "output_layer"])
    assert first == []
    assert "output_layer.weight" in last
    assert len(last) > 1
    assert all(name.startswith(("decoder.layers.3.", "output_layer.")) for name in last)


def test_frozen_parts_are_those_named() -> None:
    (_, first), (_, last) = stages(["vision", "language"], [])
    assert last == []
    assert first
    assert all(name.startswith(("visual.merger.", "visual.deepstack_merger")) for name in first)


def test_what_is_both_frozen_and_trainable_is_frozen() -> None:
    (frozen, _), (_, last) = stages([r"decoder\.layers\.[02]\.mlp"], ["language"])
    assert "decoder.layers.0.mlp.linear_fc1.weight" in frozen
    assert "visual.merger.norm.weight" in frozen
    assert "decoder.layers.3.mlp.linear_fc1.weight" in last
    assert "decoder.layers.2.mlp.linear_fc1.weight" not in last


def test_both_copies_of_a_tied_embedding_are_frozen_or_train() -> None:
    embedding = "embedding.word_embeddings.weight"
    (first, _), (last, _) = stages(["embedding"], [], TIED)
    assert first == last == [embedding]
    (_, first), (_, last) = stages([], ["embedding"], TIED)
    assert first == last == [embedding]


def test_the_head_of_a_tied_model_is_no_parameter_of_its_own() -> None:
    with pytest.raises(BadInput, match="output_layer selects no parameter"):
        stages(["output_layer"], [], TIED)


@pytest.mark.parametrize(
    ("frozen", "message"),
    [
        (["vision", "lm_head"], "lm_head selects no parameter"),
        (["vision", "aligner", "language"], "leave no parameter to train"),
        (["decoder.("], "neither one of vision, aligner, language nor a regular"),
    ],
)
def test_what_cannot_be_frozen_is_refused(frozen: list[str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        stages(frozen, [])
