"""``mcore-qwen3vl generate``: a quick look at what a checkpoint says."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mcore_qwen3vl import console
from mcore_qwen3vl.cli import sources
from mcore_qwen3vl.cli.options import Size
from mcore_qwen3vl.runtime.parallel import Layout


def generate(
    checkpoint: Annotated[
        Path, sources.argument("CHECKPOINT", "Megatron-Core or Hugging Face directory, or hub id.")
    ],
    prompt: Annotated[str, typer.Option(help="What to ask.")],
    image: Annotated[list[str] | None, typer.Option(help="Path or URL; repeatable.")] = None,
    video: Annotated[list[Path] | None, typer.Option(help="Path; repeatable.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Cut the answer off after these.")] = 128,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy; default: the checkpoint's.")
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from this much probability.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from the likeliest tokens.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the draws; default: a random one.")] = None,
    tp: Size = 1,
    pp: Size = 1,
    ep: Size = 1,
    etp: Size = 1,
    sp: Annotated[
        bool | None, typer.Option(help="Divide the prompt over TP; default: if TP > 1.")
    ] = None,
    spec: Annotated[
        Literal["torch", "te"], typer.Option(help="te needs Transformer Engine and a GPU.")
    ] = "torch",
    hf_model: Annotated[
        Path | None, sources.option("Config and processor, if the checkpoint has none.")
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Without a GPU, one process a rank.")] = False,
) -> None:
    """Answer a prompt about images and videos, word by word."""
    from mcore_qwen3vl.generation.run import Request, run

    content: list[dict[str, Any]] = [{"type": "image", "image": path} for path in image or []]
    content += [{"type": "video", "video": str(path)} for path in video or []]
    content.append({"type": "text", "text": prompt})
    layout = Layout(
        tp=tp,
        pp=pp,
        ep=ep,
        etp=etp,
        dp=-(-ep * etp // tp),  # replicas only as far as experts need ranks
        sp=tp > 1 if sp is None else sp,
    )
    request = Request(
        checkpoint,
        [[{"role": "user", "content": content}]],
        layout,
        spec,
        hf_model,
        {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "seed": seed,
            "stream": lambda _, text: print(text, end="", flush=True),
        },
    )
    start = time.monotonic()
    (answer,) = run(request, on_cpu=cpu)
    if int(os.environ.get("RANK", "0")) == 0:
        print()
        console.messages.print(
            f"{answer.prompt_tokens} prompt tokens, {len(answer.token_ids)} new ones, ended by "
            f"{answer.finish_reason}, {time.monotonic() - start:.1f} s with loading, on {layout}",
            highlight=False,
        )
