"""Each gradient rule matters: if it is broken deliberately, the comparison fails.

Other implementations made these mistakes; each test says in which part they show. Ranks are
forked from this process, so a function replaced here is replaced there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer import transformer_block

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.model import qwen3vl, transformer_config, vision
from mcore_qwen3vl.model.decoder import attention, layer
from mcore_qwen3vl.runtime.launch import RanksFailed
from mcore_qwen3vl.verification.parity.matrix import UNIFORM, Matrix, MatrixRow
from mcore_qwen3vl.verification.report import Report
from tests.turns import slow

FAR_OFF = 1e-2
"""Far above the tolerance, because each of the mistakes is a gross one."""

HANGS = 5.0
"""Seconds to wait for ranks that may hang; correct ones need half a second."""


def worst(report: Report, part: str, name: str = "") -> float:
    errors = [f.relative_error for f in report.findings if f.part == part and name in f.name]
    print(f"observed error in {part} {name}: {max(errors):.2e}")
    return max(errors)


@pytest.mark.slow
def test_vision_replicated_over_tp_without_a_sum(matrix: Matrix, monkeypatch: Any) -> None:
    """An SP rank's DeepStack rows give a part of the vision gradient, to be summed over TP."""
    build = vision.VisionTower.__init__

    def unmarked(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        for parameter in self.parameters():
            parameter.sequence_parallel = False

    monkeypatch.setattr(vision.VisionTower, "__init__", unmarked)
    report = matrix.compare_row(MatrixRow("dense", "tp2+sp", ("image",)))
    assert worst(report, "gradients", "visual") > FAR_OFF
    assert worst(report, "logits") < 2e-5


@pytest.mark.parametrize(("frequencies", "factor"), [*slow((False, True)), (True, False)])
def test_yarn_without_one_of_its_parts(
    matrix: Matrix, monkeypatch: Any, frequencies: bool, factor: bool
) -> None:
    """YaRN changes the frequencies and scales cosines and sines; each shows in the logits."""
    scaled = attention.rope_frequencies

    def partly(architecture: Any) -> tuple[torch.Tensor, float]:
        of_plain, one = scaled(replace(architecture, rope_scaling=()))
        of_yarn, scale = scaled(architecture)
        return of_yarn if frequencies else of_plain, scale if factor else one

    monkeypatch.setattr(attention, "rope_frequencies", partly)
    monkeypatch.setattr(transformer_config, "rope_frequencies", partly)
    assert worst(matrix.compare_row(MatrixRow("yarn", "tp2+sp", ("mixed",))), "logits") > FAR_OFF


@pytest.mark.slow
def test_deepstack_by_gathering_adding_and_scattering(matrix: Matrix, monkeypatch: Any) -> None:
    """TP ranks do the same work on gathered states, which a summing backward counts TP times."""
    add = layer.add_to_rows

    def gathered(*args: torch.Tensor) -> torch.Tensor:
        whole = mappings.gather_from_sequence_parallel_region(add(*args))
        return mappings.scatter_to_sequence_parallel_region(whole)

    monkeypatch.setattr(layer, "add_to_rows", gathered)
    report = matrix.compare_row(MatrixRow("dense", "tp2+sp", ("image",)))
    assert worst(report, "gradients") > FAR_OFF
    assert worst(report, "logits") < 2e-5


@pytest.mark.slow
def test_features_gathered_without_reducing_backward(matrix: Matrix, monkeypatch: Any) -> None:
    """A rank's rows of a feature that another rank encoded would lose their gradient."""
    gather = mappings.gather_from_sequence_parallel_region

    def slicing(features: torch.Tensor, group: Any) -> torch.Tensor:
        return gather(features, tensor_parallel_output_grad=False, group=group)

    monkeypatch.setattr(vision, "gather_from_sequence_parallel_region", slicing)
    report = matrix.compare_row(MatrixRow("dense", "cp2", ("images",)))
    assert worst(report, "gradients", "visual") > FAR_OFF
    assert worst(report, "logits") < 2e-5


@pytest.mark.slow
def test_features_placed_batch_first(matrix: Matrix, monkeypatch: Any) -> None:
    """Hidden states are sequence first: features land on wrong tokens, but only with B > 1."""
    plan = qwen3vl.plan_fusion

    def batch_first(token_index: Any, positions: Any, **sizes: Any) -> Any:
        made = plan(token_index, positions, **sizes)
        local, batch = (
            made.destination // sizes["batch_size"],
            made.destination % sizes["batch_size"],
        )
        return qwen3vl.FusionPlan(made.rows, batch * len(positions) + local)

    monkeypatch.setattr(qwen3vl, "plan_fusion", batch_first)
    matrix.compare_row(MatrixRow("dense", "single", ("image",))).require()
    report = matrix.compare_row(MatrixRow("dense", "single", ("padded",)))
    assert worst(report, "logits") > FAR_OFF


@pytest.mark.usefixtures("impatient")
def test_a_rank_without_image_that_skips_the_tower(matrix: Matrix, monkeypatch: Any) -> None:
    """The ranks hang: with overlap, reductions wait until every parameter of the tower is used."""
    encode = vision.VisionTower.forward

    def skipping(self: Any, visual: Any) -> Any:
        if visual is not None:
            return encode(self, visual)
        empty = torch.zeros(0, self.config.out_hidden_size)
        return empty, [empty for _ in self.config.deepstack_visual_indexes]

    monkeypatch.setattr(vision.VisionTower, "forward", skipping)
    row = MatrixRow("dense", "dp2", ("imageless",), {"overlap": True})
    with pytest.raises(RanksFailed):
        matrix.compare_row(row, timeout=HANGS)


def test_padding_that_the_router_counts(matrix: Matrix, monkeypatch: Any) -> None:
    """The tail of a pack changes the balancing loss unless it is masked.

    Megatron balances a whole pack, for which Hugging Face has no counterpart, so the errors with
    and without the mask are compared. The z-loss has a counterpart, see ``test_router_losses``.
    """
    row = MatrixRow("moe", "single", ("packed",), {"config": {"moe_aux_loss_coeff": 0.3}})

    def router() -> dict[str, Any]:
        found = matrix.compare_row(row).findings
        return {f.name: f.measured.absolute_error for f in found if "mlp.gate" in f.name}

    masked = router()
    monkeypatch.setattr(qwen3vl.Qwen3VLModel, "_router_padding", lambda *arguments: None)
    counted = router()
    changes = (abs(counted[name] - masked[name]) / masked[name] for name in masked)
    change = max(changes)
    print(f"observed change of the router's gradients: {change:.2e}")
    assert change > FAR_OFF


def test_samples_of_a_pack_that_see_one_another(matrix: Matrix, monkeypatch: Any) -> None:
    """Errors show if the bounds are lost, so that the pack is one sample."""
    of = attention.PackedSequence.from_params.__func__

    def unbounded(cls: Any, *arguments: Any) -> Any:
        packed = of(cls, *arguments)
        return replace(packed, bounds=(0, packed.bounds[-1]))

    monkeypatch.setattr(attention.PackedSequence, "from_params", classmethod(unbounded))
    assert worst(matrix.compare_row(MatrixRow("dense", "single", ("packed",))), "logits") > FAR_OFF


def test_recompute_that_drops_deepstack(matrix: Matrix, monkeypatch: Any) -> None:
    """Layers run inside a checkpointed region must receive the features, too."""
    recompute = transformer_block.checkpointed_forward

    def dropping(*args: Any, **kwargs: Any) -> Any:
        return recompute(*args, **{**kwargs, "context": None, "context_mask": None})

    monkeypatch.setattr(transformer_block, "checkpointed_forward", dropping)
    config = {**UNIFORM, "recompute_num_layers": 2}
    report = matrix.compare_row(MatrixRow("dense", "single", ("image",), {"config": config}))
    assert worst(report, "logits") > FAR_OFF
    assert worst(report, "gradients", "deepstack_merger_list") > FAR_OFF


def test_features_that_do_not_travel(matrix: Matrix, monkeypatch: Any) -> None:
    """Errors show if features do not reach DeepStack layers on later pipeline stages."""

    def forgetting(self: Any, seq_len: int, batch: int, plan: Any) -> Any:
        received = layer.unpack_features(
            self.decoder.input_tensor, seq_len, self._carried_in, len(plan.destination)
        )
        self.decoder.set_input_tensor(received[0])
        return torch.zeros_like(received[1])

    monkeypatch.setattr(qwen3vl.Qwen3VLModel, "_receive", forgetting)
    report = matrix.compare_row(MatrixRow("dense", "pp4", ("image",)))
    assert worst(report, "logits") > FAR_OFF
    assert worst(report, "gradients", "deepstack_merger_list.1") > FAR_OFF


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_an_interleaved_pipeline_needs_overlapped_transfers(
    matrix: Matrix, monkeypatch: Any
) -> None:
    """It is refused without them, because on gloo transfers would silently pair up wrongly."""
    config = {"overlap_p2p_comm": False, "batch_p2p_comm": True}
    row = MatrixRow("dense", "pp2xvpp2", ("text",), {"config": config})
    with pytest.raises(BadInput, match="VPP 2 without overlap_p2p_comm gives wrong results"):
        matrix.compare_row(row)
    monkeypatch.setattr(transformer_config, "_check_interleaving", lambda fields: None)
    try:
        report = matrix.compare_row(row, timeout=HANGS)
    except RanksFailed:
        print("observed: the ranks hang or fail")
    else:
        assert worst(report, "logits") > FAR_OFF
