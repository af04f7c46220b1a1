"""Memory that others publish for their recipes, against rehearsals of the same recipes.

    python benchmarks/published.py [NAME ...]     # in an environment with Transformer Engine

The recipes are those of ms-swift (Megatron-SWIFT, which trains through megatron-core and
Transformer Engine), each with the GiB of a GPU that are stated above its command. Recipes of text
models are rehearsed with the Qwen3-VL of that size, whose language model has the same shape, and
with a frozen tower. Our rehearsals differ in the head, which works in chunks, and in the data,
which are made up and half images.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from mcore_qwen3vl import console
from mcore_qwen3vl.rehearsal.command import read_command
from mcore_qwen3vl.rehearsal.rehearse import Options, Rehearser
from mcore_qwen3vl.runtime.gpus import GPUS
from mcore_qwen3vl.shapes import SHAPES

GIB = 2**30

COMMON = (
    "--bf16 --use-distributed-optimizer --sequence-parallel --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1 --lr 1e-5 --train-iters 2"
)
FULL = "--packing --micro-batch-size 1 --freeze vision aligner"
LORA = (
    "--micro-batch-size 8 --seq-length 2048 --global-batch-size 16 --lora-rank 8 --lora-alpha 32 "
    "--lora-target language"
)
MOE = "--expert-tensor-parallel-size 1 --moe-grouped-gemm --moe-permute-fusion"


@dataclass(frozen=True)
class Recipe:
    """A published recipe and its memory."""

    source: str  # in github.com/modelscope/ms-swift
    gib: str
    shape: str
    gpus: int
    flags: str


RECIPES = {
    "8B": Recipe(
        "docs/source_en/Megatron-SWIFT/Mcore-Bridge.md (Qwen3-VL-8B)", "76", "8b", 2,
        f"{FULL} --seq-length 2048 --global-batch-size 4 --tensor-model-parallel-size 2",
    ),
    "32B": Recipe(
        "examples/megatron/dense/qwen3_32b.sh (Qwen3-32B)", "80, the GPU's", "32b", 8,
        f"{FULL} --seq-length 8192 --global-batch-size 16 --tensor-model-parallel-size 8",
    ),
    "30B-A3B": Recipe(
        "docs/source_en/Megatron-SWIFT/Mcore-Bridge.md (Qwen3-30B-A3B)", "76", "30b_a3b", 8,
        f"{FULL} {MOE} --seq-length 8192 --global-batch-size 4 --tensor-model-parallel-size 4 "
        "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 25 "
        "--expert-model-parallel-size 4",
    ),
    "30B-A3B, 16 GPUs": Recipe(
        "examples/megatron/moe/qwen3_moe.sh (Qwen3-30B-A3B)", "60", "30b_a3b", 16,
        f"{FULL} {MOE} --seq-length 8192 --global-batch-size 16 "
        "--pipeline-model-parallel-size 2 --expert-model-parallel-size 8",
    ),
    "30B-A3B, LoRA": Recipe(
        "examples/megatron/lora/moe.sh (Qwen3-30B-A3B)", "62; 50 with a capacity factor of 2",
        "30b_a3b", 2, f"{LORA} {MOE} --expert-model-parallel-size 2",
    ),
    "235B-A22B, LoRA": Recipe(
        "examples/megatron/lora/qwen3_235b.sh (Qwen3-235B-A22B)", "80, the GPU's",
        "235b_a22b", 8,
        f"{LORA} {MOE} --tensor-model-parallel-size 4 --expert-model-parallel-size 8",
    ),
}  # fmt: skip


def main(names: list[str]) -> int:
    """Rehearse the recipes called `names`, or all, and print a table."""
    if unknown := sorted(set(names) - set(RECIPES)):
        print(f"error: {', '.join(unknown)}: not in {', '.join(RECIPES)}", file=sys.stderr)
        return 2
    options = Options(GPUS["h200-141gb"])  # so that all of them fit
    table = console.table(
        "GiB of a GPU", "recipe", "source", "published", "rehearsed", "of it held"
    )
    with console.progress("rehearsing") as say, Rehearser(options, say) as bench:
        for name in names or RECIPES:
            recipe = RECIPES[name]
            model = ("--hf-model", str(SHAPES / f"{recipe.shape}.json"))
            command = read_command([*model, *f"{COMMON} {recipe.flags}".split()], recipe.gpus)
            rehearsal = bench.rehearse(command)
            fullest = max(rehearsal.outcomes, key=lambda outcome: outcome.reserved)
            total = fullest.reserved / GIB + options.device(command).allowance_gib
            peak_gib = fullest.peak / GIB
            table.add_row(name, recipe.source, recipe.gib, f"{total:.1f}", f"{peak_gib:.1f}")
    console.output.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
