"""``mcore-qwen3vl generate``: a quick look at what a checkpoint says."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from mcore_qwen3vl import console
from mcore_qwen3vl.cli import options
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout

_NO_PATH = ("http://", "https://", "data:")
_LONGEST_PATH = 1000  # longer text is base64


def small_layout(**sizes: Any) -> Layout:
    """Return a layout: by default as many replicas as the experts need, and SP wherever TP is."""
    tp, experts = sizes.get("tp", 1), sizes.get("ep", 1) * sizes.get("etp", 1)
    return Layout(**{"dp": -(-experts // tp), "sp": tp > 1, **sizes})


@options.layout_flags(small_layout, without=("vpp", "cp"))
def generate(
    checkpoint: options.Checkpoint,
    prompt: Annotated[
        list[str],
        typer.Option(
            help="What to ask; repeatable. Every prompt gets all images and videos, unless the "
            "prompts place them one by one with <image> and <video>."
        ),
    ],
    layout: Layout,
    image: Annotated[list[str] | None, typer.Option(help="Path or URL; repeatable.")] = None,
    video: Annotated[list[Path] | None, typer.Option(help="Path; repeatable.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 128,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy; default: the checkpoint's.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample from the likeliest tokens that make up this probability."),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Sample from this many of the likeliest tokens.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Sampling seed; default: random.")] = None,
    dtype: options.Dtype = "config",
    spec: options.Spec = "torch",
    hf_model: options.ConfigSource = None,
    lora: Annotated[
        Path | None, options.weights("PEFT adapter directory or hub id to answer with.")
    ] = None,
    cpu: options.Cpu = False,
    json: options.Json = False,
) -> None:
    """Answer prompts about images and videos, and print the answers word by word.

    Unless --dp and --sp are given, there are as many replicas as the experts need, and SP is on
    wherever TP is.
    """
    prompt = [console.as_utf8(one) for one in prompt]
    videos = [str(path) for path in video or []]
    for kind, references in (("Image", image or []), ("Video", videos)):
        for reference in filter(_is_missing_file, references):
            raise BadInput(f"{kind} {reference!r}: no such file.")
    start = time.monotonic()  # a small model takes most of its time for the imports
    console.quiet_libraries()
    if cpu:
        from mcore_qwen3vl.runtime import cpu as backend

        backend.install()  # before megatron is imported
    from mcore_qwen3vl.generation.generate import Request, run
    from mcore_qwen3vl.generation.prompts import user_turns

    streams = len(prompt) == 1 and not json
    request = Request(
        checkpoint,
        user_turns(prompt, image or [], videos),
        layout=layout,
        spec=spec,
        dtype=dtype,
        hf=hf_model,
        lora=lora,
        options={
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "seed": seed,
            "stream": _print_text if streams else None,
        },
    )
    answers = run(request, on_cpu=cpu)
    seconds = time.monotonic() - start
    if int(os.environ.get("RANK", "0")):
        return
    if json:
        found = [{"prompt": p, **asdict(a)} for p, a in zip(prompt, answers, strict=True)]
        console.emit_json({"layout": str(layout), "seconds": seconds, "answers": found})
        return
    if streams:
        print()
    for asked, answer in zip(prompt, answers, strict=True):
        if not streams:
            console.output.print(f"[bold]{console.plain(asked)}[/]\n{console.plain(answer.text)}\n")
    for answer in answers:
        console.messages.print(
            f"{answer.prompt_tokens} prompt tokens, {len(answer.token_ids)} new ones, ended by "
            f"{answer.finish_reason}"
        )
    console.messages.print(f"{seconds:.1f} s with loading, layout {layout}")


def _print_text(_: int, text: str) -> None:
    """Print a piece of the answer; a module's function, because ranks on GPUs get it pickled."""
    print(console.visible(text), end="", flush=True)


def _is_missing_file(reference: str) -> bool:
    """Return whether `reference` is a path, not a URL or base64, at which there is nothing."""
    is_path = not reference.startswith(_NO_PATH) and len(reference) < _LONGEST_PATH
    return is_path and not os.path.exists(reference)
