"""Mistakes planted in a converted checkpoint, and whether the trace names them.

``python -m mcore_qwen3vl.verify.trace.planted`` prints the table; it needs no GPU and
downloads nothing.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_qwen3vl.converters.convert import hf_to_mcore
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime import cpu
from mcore_qwen3vl.tiny import write_tiny_checkpoint

TEXT, VISUAL = "model.language_model", "model.visual"
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Bug:
    """One mistake.

    Attributes:
        name: what is done.
        kind: the name the trace must give it (``Cause.kind``).
        place: where the trace must point.
        plant: changes the Hugging Face tensors before they are converted, experts as published.
        config: changes the config that the converted checkpoint carries.
        moe: in the MoE model.
    """

    name: str
    kind: str
    place: str
    plant: Callable[[Tensors], None] | None = None
    config: Callable[[dict[str, Any]], None] | None = None
    moe: bool = False


def _edit(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    def plant(tensors: Tensors) -> None:
        tensors[name] = change(tensors[name]).contiguous()

    return plant


def _swap(a: str, b: str) -> Callable[[Tensors], None]:
    def plant(tensors: Tensors) -> None:
        tensors[a], tensors[b] = tensors[b], tensors[a]

    return plant


def _set(section: str, **values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config[section].update(values)


def _ungrouped_qkv(tensors: Tensors) -> None:
    """All queries, all keys, all values, where mcore expects them group by group."""
    from mcore_qwen3vl.converters.mapping.transforms import qkv

    names = [f"{TEXT}.layers.1.self_attn.{x}_proj.weight" for x in "qkv"]
    q, k, v = (tensors[n] for n in names)
    d = len(tensors[f"{TEXT}.layers.1.self_attn.q_norm.weight"])
    groups = qkv(len(q) // d, len(k) // d, d)
    for name, tensor in zip(names, groups.to_hf(torch.cat([q, k, v])), strict=True):
        tensors[name] = tensor


def _rotary_pairs(weight: Tensor) -> Tensor:
    heads = weight.unflatten(0, (-1, 2, 12))
    return heads.transpose(1, 2).reshape(weight.shape)


def _layer(number: int, name: str) -> str:
    return f"{TEXT}.layers.{number}.{name}"


BUGS: tuple[Bug, ...] = (
    Bug(
        "rotary base 1e6 in the config",
        "rotary base",
        f"{TEXT}.rotary_emb",
        config=_set("text_config", rope_theta=1000000),
    ),
    Bug(
        "mrope_section [6, 3, 3]",
        "mrope section",
        f"{TEXT}.rotary_emb",
        config=lambda c: c["text_config"]["rope_scaling"].update(mrope_section=[6, 3, 3]),
    ),
    Bug(
        "rms_norm_eps 1e-5",
        "norm epsilon",
        _layer(0, "input_layernorm"),
        config=_set("text_config", rms_norm_eps=1e-5),
    ),
    Bug(
        "DeepStack from blocks 0, 2, 3",
        "DeepStack layer",
        f"{VISUAL}.deepstack_merger_list.0",
        config=_set("vision_config", deepstack_visual_indexes=[0, 2, 3]),
    ),
    Bug(
        "top-2 router",
        "router top-k",
        _layer(0, "mlp.gate"),
        config=_set("text_config", num_experts_per_tok=2),
        moe=True,
    ),
    Bug("QKV not grouped", "permuted QKV", _layer(1, "self_attn.q_proj"), plant=_ungrouped_qkv),
    Bug(
        "keys and values swapped",
        "permuted QKV",
        _layer(2, "self_attn.k_proj"),
        plant=_swap(_layer(2, "self_attn.k_proj.weight"), _layer(2, "self_attn.v_proj.weight")),
    ),
    Bug(
        "rotary halves interleaved in the query",
        "permuted QKV",
        _layer(0, "self_attn.q_proj"),
        plant=_edit(_layer(0, "self_attn.q_proj.weight"), _rotary_pairs),
    ),
    Bug(
        "gate and up swapped",
        "swapped gate and up",
        _layer(1, "mlp.gate_proj"),
        plant=_swap(_layer(1, "mlp.gate_proj.weight"), _layer(1, "mlp.up_proj.weight")),
    ),
    Bug(
        "gate and up of all experts swapped",
        "swapped gate and up",
        _layer(2, "mlp.experts"),
        plant=_edit(_layer(2, "mlp.experts.gate_up_proj"), lambda w: w.roll(w.shape[2] // 2, 2)),
        moe=True,
    ),
    Bug(
        "experts' down projection transposed",
        "transposed expert",
        _layer(1, "mlp.experts"),
        plant=_edit(
            _layer(1, "mlp.experts.down_proj"),
            lambda w: w.transpose(1, 2).reshape(w.shape),
        ),
        moe=True,
    ),
    Bug(
        "two experts exchanged",
        "expert order",
        _layer(0, "mlp.experts"),
        plant=_edit(
            _layer(0, "mlp.experts.gate_up_proj"),
            lambda w: w[[0, 5, 2, 3, 4, 1, *range(6, len(w))]],
        ),
        moe=True,
    ),
    Bug(
        "router rows in reverse order",
        "router order",
        _layer(3, "mlp.gate"),
        plant=_edit(_layer(3, "mlp.gate.weight"), lambda w: w.flip(0)),
        moe=True,
    ),
    Bug(
        "attention output rounded to bfloat16",
        "dtype",
        _layer(2, "self_attn.o_proj"),
        plant=_edit(_layer(2, "self_attn.o_proj.weight"), lambda w: w.bfloat16().float()),
    ),
    Bug(
        "norm weight stored as w - 1",
        "zero-centred norm",
        _layer(1, "post_attention_layernorm"),
        plant=_edit(_layer(1, "post_attention_layernorm.weight"), lambda w: w - 1),
    ),
    Bug(
        "head is the embedding",
        "tied head",
        "lm_head",
        plant=lambda t: t.update({"lm_head.weight": t[f"{TEXT}.embed_tokens.weight"].clone()}),
    ),
    Bug(
        "DeepStack merger never filled",
        "missing DeepStack",
        f"{VISUAL}.deepstack_merger_list.1",
        plant=_edit(f"{VISUAL}.deepstack_merger_list.1.linear_fc2.weight", torch.zeros_like),
    ),
    Bug(
        "a vision block holds another's weights",
        "wrong vision weights",
        f"{VISUAL}.blocks.2.attn",
        plant=lambda t: t.update(
            {
                f"{VISUAL}.blocks.2.attn.proj.weight": t[
                    f"{VISUAL}.blocks.3.attn.proj.weight"
                ].clone()
            }
        ),
    ),
    Bug(
        "colour channels reversed in the patch embedding",
        "patch order",
        f"{VISUAL}.patch_embed",
        plant=_edit(f"{VISUAL}.patch_embed.proj.weight", lambda w: w.flip(1)),
    ),
    Bug(
        "vision QKV grouped by heads",
        "permuted vision QKV",
        f"{VISUAL}.blocks.1.attn.qkv",
        plant=_edit(
            f"{VISUAL}.blocks.1.attn.qkv.weight",
            lambda w: w.unflatten(0, (3, 4, 8)).transpose(0, 1).reshape(w.shape),
        ),
    ),
)


@dataclass(frozen=True)
class Outcome:
    """Where the trace pointed and what it named."""

    bug: Bug
    place: str
    kind: str
    explanation: str
    confirmed: bool

    @property
    def right(self) -> bool:
        return (self.place, self.kind) == (self.bug.place, self.bug.kind)


class Garden:
    """Correct checkpoints, and converted ones with a mistake, below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._truths: dict[bool, Any] = {}

    def truth(self, *, moe: bool) -> Any:
        """The correct checkpoint as the trace takes it."""
        from mcore_qwen3vl.verify.trace.run import Truth

        if moe not in self._truths:
            self._truths[moe] = Truth(self.correct(moe=moe))
        return self._truths[moe]

    def correct(self, *, moe: bool) -> Path:
        path = self.folder / ("moe" if moe else "dense")
        if not path.exists():
            write_tiny_checkpoint(path, moe=moe, seed=5)
        return path

    def with_bug(self, bug: Bug) -> Path:
        """A Megatron-Core checkpoint of the correct one, and the mistake."""
        from safetensors.torch import load_file, save_file

        target = self.folder / f"mcore-{BUGS.index(bug)}"
        if target.exists():
            return target
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            source = Path(shutil.copytree(self.correct(moe=bug.moe), Path(scratch) / "hf"))
            if bug.plant is not None:
                file = source / "model.safetensors"
                tensors = load_file(file)
                bug.plant(tensors)
                save_file(tensors, file, metadata={"format": "pt"})
            hf_to_mcore(source, target)
        if bug.config is not None:
            config = target / "hf" / "config.json"
            content = json.loads(config.read_text())
            bug.config(content)
            config.write_text(json.dumps(content))
        return target

    def look(self, bug: Bug, layout: Layout | None = None) -> Outcome:
        """Plant the mistake and trace it."""
        from mcore_qwen3vl.verify.trace.run import trace

        found = trace(self.truth(moe=bug.moe), self.with_bug(bug), layout=layout)
        first, cause = found.first, found.cause
        return Outcome(
            bug,
            first.name if first else "nowhere",
            cause.kind if cause else "none",
            cause.explanation if cause else "",
            bool(cause and cause.confirmed),
        )


def print_table(outcomes: Iterable[Outcome]) -> bool:
    """Print a line a mistake; whether all were named rightly."""
    from mcore_qwen3vl import console

    lines = console.table("Planted mistakes", "planted", "the trace points at", "names", "")
    right = True
    for outcome in outcomes:
        mark = "[green]right[/]" if outcome.right else f"[red]wrong[/]: {outcome.bug.kind}"
        lines.add_row(outcome.bug.name, outcome.place, outcome.kind, mark)
        right = right and outcome.right
    console.output.print(lines)
    return right


def main() -> int:
    """Plant every mistake; exit code 1 if one is not named."""
    cpu.install()
    from mcore_qwen3vl import console

    console.quiet_libraries()
    with tempfile.TemporaryDirectory(prefix="mcore-qwen3vl-") as folder:
        garden = Garden(Path(folder))
        return 0 if print_table([garden.look(bug) for bug in BUGS]) else 1


if __name__ == "__main__":
    sys.exit(main())
