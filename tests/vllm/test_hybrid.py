"""vLLM serves exports of Qwen3.5: it scores and answers as Hugging Face's model, and drafts.

Its gated delta nets take nothing but bf16 on the CPU, so its results are as exact as those of
Hugging Face's model in bf16, and no more. Both are compared with that model in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="make test-vllm makes an environment that has vLLM")

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.convert import hf_to_mcore
from mcore_qwen3vl.converters.export import save_hf
from mcore_qwen3vl.converters.live import load_checkpoint
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.qwen3vl import build_chunks
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from mcore_qwen3vl.tiny.tiny_checkpoint import HYBRID_MOE
from tests.converters.checkpoints import load
from tests.half_precision import MORE_NOISE
from tests.vllm.conftest import InVllm, Prompts, write_servable
from tests.vllm.hugging_face import HuggingFace

LAYOUTS = {"hybrid": "tp2xpp2+sp", "hybrid_moe": "tp2xep2+sp"}
# Every token goes to all experts: rounding would send it to another one.
TEXT = {"hybrid": {}, "hybrid_moe": {"num_experts_per_tok": HYBRID_MOE["num_experts"]}}
DRAFTING = {
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
    "enable_prefix_caching": False,
}


@dataclass(frozen=True)
class Served:
    """A checkpoint of Hugging Face's, and what was exported from our sharded model of it."""

    hf: Path
    exported: Path

    @cached_property
    def references(self) -> tuple[HuggingFace, HuggingFace]:
        """Hugging Face's model in float32 and in bf16."""
        return HuggingFace(self.hf, torch.float32), HuggingFace(self.hf, torch.bfloat16)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Served]:
    """Return a function that gives the model of a kind, made once."""
    made: dict[str, Served] = {}

    def make(kind: str) -> Served:
        if kind not in made:
            folder, layout = tmp_path_factory.mktemp(kind), Layout.parse(LAYOUTS[kind])
            one = Served(folder / "hf", folder / "exported")
            write_servable(one.hf, kind, "bfloat16", **TEXT[kind])
            hf_to_mcore(one.hf, folder / "mcore")
            run_layout(export, layout.world_size, one.hf, folder / "mcore", layout, one.exported)
            made[kind] = one
        return made[kind]

    return make


def export(hf: Path, mcore: Path, layout: Layout, exported: Path) -> None:
    """Load a converted checkpoint into a sharded model, with its MTP layer, and export it."""
    initialize(layout)
    chunks = build_chunks(Architecture.from_hf(hf), layout, mtp_num_layers=1)
    load_checkpoint(chunks, mcore)
    save_hf(chunks, exported, hf_config=hf)


@dataclass(frozen=True)
class Rows:
    """What Hugging Face's model, in float32 and in bf16, says of n tokens that vLLM has chosen."""

    tokens: Tensor  # (n,)
    exact: Tensor  # (n, vocabulary) log-probabilities
    rounded: Tensor  # the same, in bf16

    def of_tokens(self, log_probs: Tensor) -> Tensor:
        """Return those of the n tokens."""
        return log_probs.gather(1, self.tokens[:, None])[:, 0]

    @property
    def behind(self) -> Tensor:
        """How far each token is behind the best one in float32; 0 if it is the best."""
        return self.exact.max(1).values - self.of_tokens(self.exact)

    @property
    def noise(self) -> Tensor:
        """What rounding to bf16 changes in the log-probability of each token."""
        return self.of_tokens(self.rounded) - self.of_tokens(self.exact)


def rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def require_best(rows: list[Rows], what: str) -> None:
    """Fail if one token is not the best in float32, or as good as it but for rounding."""
    behind = torch.cat([row.behind for row in rows])
    limit = float(torch.cat([(row.rounded - row.exact).abs().flatten() for row in rows]).max())
    print(f"{what}: {int((behind == 0).sum())} of {len(behind)} tokens are the best; ", end="")
    print(f"the worst is behind by {float(behind.max()):.4f}; rounding changes up to {limit:.3f}")
    assert behind.max() <= limit


@pytest.mark.parametrize("kind", LAYOUTS)
def test_it_scores_and_answers_as_hugging_face(
    kind: str, served: Callable[[str], Served], prompts: Prompts, in_vllm: InVllm
) -> None:
    """All prompts in one batch."""
    model = served(kind)
    before, after = load(model.hf), load(model.exported)
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        assert torch.equal(before[name].to(tensor.dtype), tensor), name
    found = in_vllm(model.exported, {"": None}, together=True, dtype="bfloat16")[""]
    answers, off, noise = [], [], []
    for name, one in found.items():
        for start, tokens, theirs in (
            (len(one["prompt"]), one["prompt"] + one["answer"], one["answer_log_probs"]),
            (1, one["token_ids"], one["log_probs"]),
        ):
            both = [m.after(prompts[name], tokens).next[start - 1 : -1] for m in model.references]
            rows = Rows(torch.tensor(tokens[start:]), *both)
            off.append(torch.tensor(theirs) - rows.of_tokens(rows.exact))
            noise.append(rows.noise)
            if start > 1:
                answers.append(rows)
    print(f"{kind}: vLLM is off by {rms(torch.cat(off)):.4f}, Hugging Face by ", end="")
    print(f"{rms(torch.cat(noise)):.4f}")
    assert rms(torch.cat(off)) < MORE_NOISE * rms(torch.cat(noise))
    require_best(answers, kind)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_its_drafts_are_those_of_the_further_layer(
    kind: str, served: Callable[[str], Served], prompts: Prompts, in_vllm: InVllm
) -> None:
    model = served(kind)
    options = {"score": False, "dtype": "bfloat16", **DRAFTING}
    found = in_vllm(model.exported, {"": None}, **options)[""]
    answers, drafts = [], []
    for name, one in found.items():
        tokens, asked = one["prompt"] + one["answer"], len(one["prompt"])
        both = [m.after(prompts[name], tokens) for m in model.references]
        rows = [states.next[asked - 1 : -1] for states in both]
        answers.append(Rows(torch.tensor(one["answer"]), *rows))
        # The first draft comes after the first token of the answer. One that is right is an
        # answer's token too, and the next draft comes after the token behind it.
        drafted, at = list(chain(*one["drafts"])), [0]
        for draft in drafted[:-1]:
            at.append(at[-1] + 1 + int(one["answer"][at[-1] + 1 : at[-1] + 2] == [draft]))
        assert at[-1] < len(one["answer"])
        assert len(drafted) >= len(one["answer"]) // 2
        rows = [states.further[asked - 1 :][at] for states in both]
        drafts.append(Rows(torch.tensor(drafted), *rows))
    require_best(answers, kind)
    require_best(drafts, f"{kind}, drafts")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"dtype": "float32"}, "CPU GDN attention requires BF16"),
        (
            {"dtype": "bfloat16", **DRAFTING, "enable_prefix_caching": True},
            r"precopy_mamba_align_fused_kernel\[grid\]",
        ),
    ],
    ids=["float32", "drafts with cached prefixes"],
)
def test_control_what_vllm_cannot_do_on_the_cpu(
    options: dict[str, Any], line: str, served: Callable[[str], Served], in_vllm: InVllm
) -> None:
    """If one of these runs, compare it above: float32 exactly, and drafts by default."""
    with pytest.raises(RuntimeError, match=line):
        in_vllm(served("hybrid").exported, {"": None}, score=False, **options)
