"""``mcore-qwen3vl generate`` and ``score``: the commands that run a checkpoint without training."""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mcore_qwen3vl import console
from mcore_qwen3vl.cli import options
from mcore_qwen3vl.cli.data import (
    DATA_SETS,
    ChatTemplateKwargs,
    Preprocess,
    Split,
    TrainOn,
)
from mcore_qwen3vl.data.records.reading import parse_template_kwargs
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import refuse_special_files
from mcore_qwen3vl.json_and_yaml import parse_json
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.losses.reranker import ANSWERS
from mcore_qwen3vl.unused.fields import Unused, as_json

if TYPE_CHECKING:
    from mcore_qwen3vl.inference import ModelRequest
    from mcore_qwen3vl.scoring.records import Tally

_NO_PATH = ("http://", "https://", "data:")
_LONGEST_PATH = 1000  # longer text is base64

Dtype = Annotated[
    Literal["config", "bf16", "fp16", "fp32"],
    typer.Option(help="Dtype of weights and computation; config: as the checkpoint's config says."),
]
ConfigSource = Annotated[
    Path | None,
    options.config("Directory or hub id of config and processor, if the checkpoint has none."),
]
Checkpoint = Annotated[
    Path, options.source("CHECKPOINT", "Megatron-Core or Hugging Face directory, or hub id.")
]
Adapter = Annotated[Path | None, options.weights("PEFT adapter directory or hub id to use.")]
Cpu = Annotated[bool, typer.Option("--cpu", help="Run on the CPU, one process for each rank.")]


def small_layout(**sizes: Any) -> Layout:
    """Return a layout: by default as many replicas as the experts need, and SP wherever TP is."""
    tp, experts = sizes.get("tp", 1), sizes.get("ep", 1) * sizes.get("etp", 1)
    return Layout(**{"dp": -(-experts // tp), "sp": tp > 1, **sizes})


@options.layout_flags(small_layout, without=("vpp", "cp"))
def generate(
    checkpoint: Checkpoint,
    layout: Layout,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            help="What to ask; repeatable. Every prompt gets all images and videos, unless the "
            "prompts place them one by one with <image> and <video>."
        ),
    ] = None,
    messages: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="In place of --prompt: a JSON file of one conversation to go on with, a list of "
            "messages or a record of data with messages, tools, images and chat_template_kwargs.",
        ),
    ] = None,
    image: Annotated[list[str] | None, typer.Option(help="Path or URL; repeatable.")] = None,
    video: Annotated[list[Path] | None, typer.Option(help="Path; repeatable.")] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(help="Longest answer, in tokens; default: the checkpoint's, or 128."),
    ] = None,
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
    chat_template_kwargs: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help='Arguments of the chat template as a JSON object, such as {"enable_thinking": '
            "false}.",
        ),
    ] = None,
    dtype: Dtype = "config",
    spec: options.Spec = "torch",
    hf_model: ConfigSource = None,
    lora: Adapter = None,
    cpu: Cpu = False,
    json: options.Json = False,
) -> None:
    """Answer prompts about images and videos, and print the answers word by word.

    Unless --dp and --sp are given, there are as many replicas as the experts need, and SP is on
    wherever TP is.
    """
    prompt = [console.as_utf8(text) for text in prompt or []]
    if bool(prompt) == (messages is not None):
        raise BadInput("Ask with --prompt TEXT, or with --messages FILE: one of them is needed.")
    if messages is not None and (image or video):
        raise BadInput("--image and --video belong to --prompt: name them in the file's messages.")
    record = None if messages is None else _read_json(messages)
    arguments = parse_template_kwargs(chat_template_kwargs)
    videos = [str(path) for path in video or []]
    for kind, references in (("Image", image or []), ("Video", videos)):
        for reference in filter(_is_missing_file, references):
            raise BadInput(f"{kind} {reference!r}: no such file.")
    start = time.monotonic()  # a small model takes most of its time for the imports
    quiet_and_choose_backend(cpu)
    from mcore_qwen3vl.generation.generate import GenerationRequest, generate_on_all_ranks
    from mcore_qwen3vl.generation.prompts import render_prompt, user_turns

    streams = len(prompt) < 2 and not json
    conversations: Sequence[Any] = user_turns(prompt, image or [], videos)
    processor: Any = None
    of_prompt: Sequence[Unused] = ()
    if messages is not None:
        from mcore_qwen3vl.data.processor import load_processor
        from mcore_qwen3vl.data.records.media import MediaFolder
        from mcore_qwen3vl.inference import hf_folder_of

        processor = load_processor(hf_folder_of(checkpoint, hf_model, "generate"))
        folder = MediaFolder(messages.parent, {})
        rendered = render_prompt(record, processor, folder, arguments)
        conversations, prompt, of_prompt = [rendered], [rendered.text], rendered.unused
    request = GenerationRequest(
        checkpoint,
        conversations,
        processor=processor,
        chat_template_kwargs=None if messages else arguments,  # which are in the rendered text
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
    unused = _print_unused(request, "generate", of_prompt)
    answers = generate_on_all_ranks(request, on_cpu=cpu)
    seconds = time.monotonic() - start
    if int(os.environ.get("RANK", "0")):  # under torchrun, the first rank alone shows the answers
        return
    if json:
        entries = [{"prompt": p, **asdict(a)} for p, a in zip(prompt, answers, strict=True)]
        facts = {"layout": str(layout), "seconds": seconds, "answers": entries}
        console.emit_json({**facts, "unused": as_json(unused)})
        return
    if streams:
        print()
    for asked, answer in zip(prompt, answers, strict=True):
        if not streams:
            question, text = (console.plain(t, lines=True) for t in (asked, answer.text))
            console.output.print(f"[bold]{question}[/]\n{text}\n")
    for answer in answers:
        console.messages.print(
            f"{answer.prompt_tokens} prompt tokens, {len(answer.token_ids)} new ones, ended by "
            f"{answer.finish_reason}"
        )
    console.messages.print(f"{seconds:.1f} s with loading, layout {layout}")


def _print_text(_: int, text: str) -> None:
    """Print a piece of the answer; a module's function, because ranks on GPUs get it pickled."""
    print(console.visible(text, lines=True), end="", flush=True)


def _is_missing_file(reference: str) -> bool:
    """Return whether `reference` is a path, not a URL or base64, at which there is nothing."""
    is_path = not reference.startswith(_NO_PATH) and len(reference) < _LONGEST_PATH
    return is_path and not os.path.exists(reference)


@options.layout_flags(small_layout)
@options.data_flags("max_bad_fraction", "allow_dropped", "trust_data")
def score(
    checkpoint: Checkpoint,
    data: Annotated[Path, options.data_set(f"{DATA_SETS} Preference records too.")],
    layout: Layout,
    reading: dict[str, Any],
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
    split: Split = "train",
    preprocess: Preprocess = None,
    train_on: TrainOn = None,
    chat_template_kwargs: ChatTemplateKwargs = None,
    dtype: Dtype = "config",
    spec: options.Spec = "torch",
    hf_model: ConfigSource = None,
    lora: Adapter = None,
    cpu: Cpu = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an output that is finished or begun.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Write log-probabilities of the trained tokens, one line of JSON a record; or see --task.

    An interrupted command continues when it is run again. The summary is the perplexity.
    """
    quiet_and_choose_backend(cpu)
    from mcore_qwen3vl.scoring.score import ScoreRequest
    from mcore_qwen3vl.scoring.score import score as run

    request = ScoreRequest(
        checkpoint=checkpoint, data=data, out=out, layout=layout, spec=spec, dtype=dtype,
        hf=hf_model, lora=lora, temperature=temperature, entropy=entropy, packing=packing,
        seq_length=seq_length, buffer=packing_buffer,
        force=force, split=split, preprocess=preprocess, task=task, answers=answers, top_k=top_k,
        train_on=train_on, chat_template_kwargs=chat_template_kwargs, **reading,
    )  # fmt: skip
    unused = _print_unused(request, "score")
    tally = run(request, on_cpu=cpu)
    if tally is None:  # a rank of torchrun other than the first
        return
    written = str(request.out_file)
    facts = {"out": written, **asdict(tally), "unused": as_json(unused)}
    console.present(json, facts, _show_scores, tally, written)
    options.require(bool(tally.scored), f"No record of {data} could be scored.")


def _read_json(file: Path) -> Any:
    """Return what a file of JSON holds, in which no key comes twice with two values."""
    try:
        refuse_special_files(file)
        return parse_json(file.read_text("utf-8"), unique=True)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadInput(
            f"--messages {file} cannot be read: {reason}. Name a file of JSON: a list of messages, "
            "or a record with messages."
        ) from error


def _print_unused(
    request: "ModelRequest", command: str, of_prompt: Sequence[Unused] = ()
) -> list[Unused]:
    """Name once what the command does not use of the model's files and the prompt; return it."""
    from mcore_qwen3vl.inference import unused_by

    unused = [*unused_by(request, command), *of_prompt]
    if os.environ.get("RANK", "0") == "0":
        console.print_unused(unused)
    return unused


def quiet_and_choose_backend(cpu: bool) -> None:
    """Quiet the libraries, and choose the backend before megatron is imported."""
    console.quiet_libraries()
    from mcore_qwen3vl.runtime.device import prepare_device

    prepare_device(cpu=cpu)


def _show_scores(tally: "Tally", written: str) -> None:
    """Print what a file of scores holds."""
    rows = [
        ("records", f"{tally.records:,}, of which {tally.scored:,} scored"),
        ("left out", f"{tally.bad:,} bad, {tally.overlong:,} over-long"),
        ("embeddings", _count_or_blank(tally.embeddings)),
        ("rewards", _count_or_blank(tally.rewards)),
        ("labels", ", ".join(f"{name} {count:,}" for name, count in tally.labels.items())),
        ("documents", _count_or_blank(tally.documents)),
        ("positive is first", _decimal_or_blank(tally.positive_first)),
        ("trained tokens", _count_or_blank(tally.tokens)),
        ("log-probability", _decimal_or_blank(tally.log_prob if tally.tokens else None)),
        ("perplexity", _decimal_or_blank(tally.perplexity)),
        ("entropy of a token", _decimal_or_blank(tally.entropy)),
        ("perplexity of chosen", _decimal_or_blank(tally.chosen_perplexity)),
        ("perplexity of rejected", _decimal_or_blank(tally.rejected_perplexity)),
        (
            "chosen has the higher reward" if tally.rewards else "chosen is likelier",
            _decimal_or_blank(tally.chosen_preferred),
        ),
    ]
    shown = [(name, console.plain(value)) for name, value in rows if value]
    console.output.print(console.table("", "what", ">", rows=shown))
    console.say(f"  in {written}")


def _count_or_blank(value: int) -> str:
    return f"{value:,}" if value else ""


def _decimal_or_blank(value: float | None) -> str:
    return "" if value is None else f"{value:,.4f}"
