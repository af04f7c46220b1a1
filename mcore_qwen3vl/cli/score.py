"""``mcore-qwen3vl score``: log-probabilities, embeddings or scores of a data set's records."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from mcore_qwen3vl import console
from mcore_qwen3vl.cli import options, show
from mcore_qwen3vl.cli.data import DATA_SETS, Preprocess, Split, TrustData
from mcore_qwen3vl.cli.generate import small_layout
from mcore_qwen3vl.data.config import MediaLimits
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.objectives.settings import ANSWERS


@options.layout_flags(small_layout)
@options.media_flags
def score(
    checkpoint: options.Checkpoint,
    data: Annotated[Path, options.data_set(f"{DATA_SETS} Preference records too.")],
    layout: Layout,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write; default: NAME.scores.jsonl beside NAME.jsonl, and likewise; with "
            "--task embedding NAME.embeddings.parquet, with --top-k NAME.topk.arrow, otherwise "
            "NAME.TASK.jsonl."
        ),
    ] = None,
    entropy: Annotated[
        bool, typer.Option("--entropy", help="Also write the entropy at each trained token.")
    ] = False,
    top_k: Annotated[
        int | None,
        typer.Option(
            help="Write this many likeliest tokens at each trained token, with their "
            "log-probabilities and that of all others together, for train --loss distill."
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Divide the logits by this.")] = 1.0,
    task: Annotated[
        Literal["log-probabilities", "embedding", "reranker", "reward", "classify"],
        typer.Option(
            help="embedding: write the normalised embedding of each text of retrieval records, or "
            "of conversations, as Parquet, or as an array if --out ends with .npy. "
            "reranker: write how relevant each document of retrieval "
            "records is, from 0 to 1. reward: write a reward model's scores of preference records "
            "or conversations. classify: write a classifier's label of each record, and the "
            "probabilities of all labels."
        ),
    ] = "log-probabilities",
    answers: Annotated[
        tuple[str, str],
        typer.Option(help="With --task reranker: its words for relevant and irrelevant."),
    ] = ANSWERS,
    packing: Annotated[bool, typer.Option(help="Put several records into one sequence.")] = True,
    seq_length: Annotated[
        int | None,
        typer.Option(help="Longest record, and length of a pack; default: 8192, or the model's."),
    ] = None,
    packing_buffer: Annotated[
        int, typer.Option(help="Number of records that a replica packs and writes together.")
    ] = 128,
    max_bad_fraction: Annotated[
        float, typer.Option(help="Stop when more than this share of the records is bad.")
    ] = 0.05,
    split: Split = "train",
    preprocess: Preprocess = None,
    trust_data: TrustData = False,
    dtype: options.Dtype = "config",
    spec: options.Spec = "torch",
    hf_model: options.ConfigSource = None,
    lora: Annotated[
        Path | None, options.weights("PEFT adapter directory or hub id to score with.")
    ] = None,
    cpu: options.Cpu = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an output that is finished or begun.")
    ] = False,
    json: options.Json = False,
    *,
    media: MediaLimits,
) -> None:
    """Write log-probabilities of the trained tokens, one line of JSON a record; or see --task.

    An interrupted command continues when it is run again. The summary is the perplexity.
    """
    console.quiet_libraries()
    if cpu:
        from mcore_qwen3vl.runtime import cpu as backend

        backend.install()  # before megatron is imported
    from mcore_qwen3vl.scoring.score import Request
    from mcore_qwen3vl.scoring.score import score as run

    request = Request(
        checkpoint, data, out, layout=layout, spec=spec, dtype=dtype, hf=hf_model, lora=lora,
        temperature=temperature, entropy=entropy, packing=packing, seq_length=seq_length,
        media=media, buffer=packing_buffer, max_bad_fraction=max_bad_fraction, force=force,
        split=split, preprocess=preprocess, trust_data=trust_data, task=task, answers=answers,
        top_k=top_k,
    )  # fmt: skip
    found = run(request, on_cpu=cpu)
    if found is None:  # a rank of torchrun other than the first
        return
    written = str(request.written)
    console.present(json, {"out": written, **asdict(found)}, show.scores, found, written)
    options.require(bool(found.scored), f"No record of {data} could be scored.")
