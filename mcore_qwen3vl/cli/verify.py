"""``mcore-qwen3vl verify``: check that two things are the same.

Every command ends with the same kind of report. The exit code is 0 if everything holds, 1 if not,
and 3 if the command could not be finished.
"""

import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mcore_qwen3vl import console
from mcore_qwen3vl.cli import options
from mcore_qwen3vl.cli.data import DATA_SETS, ChatTemplateKwargs, Preprocess, Split
from mcore_qwen3vl.cli.inference import (
    Adapter,
    Checkpoint,
    ConfigSource,
    Cpu,
    quiet_and_choose_backend,
    small_layout,
)
from mcore_qwen3vl.errors import BadInput, CheckFailed
from mcore_qwen3vl.layout import Layout

if TYPE_CHECKING:
    from mcore_qwen3vl.verification.report import Report

app = typer.Typer(help="Check that two things are the same.", no_args_is_help=True)

HFSource = Annotated[Path, options.source("HF", "Hugging Face checkpoint directory or hub id.")]
Timeout = Annotated[float, typer.Option(help="Time limit for the ranks, in seconds.")]


def conclude(
    check: "partial[Report]",
    report: Annotated[
        Path | None,
        typer.Option(
            help="Write report.html, report.json and junit.xml to this folder; report.json is a "
            "certificate, with hashes of the checkpoints and of the code."
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Make a check, write the files, show its report, and exit by the verdict."""
    from mcore_qwen3vl.verification.certificate import certify
    from mcore_qwen3vl.verification.report import render, write_report

    result = check()
    if report is not None:
        write_report(result, report, certify(result, check.keywords))
    console.present(json, result.to_dict(), lambda: console.output.print(render(result)))
    if not result.ok:
        raise typer.Exit(CheckFailed.exit_code)


@app.command("roundtrip")
@options.then(conclude)
def verify_roundtrip(
    src: Annotated[Path, options.source("SRC", "Hugging Face checkpoint directory or hub id.")],
    work_dir: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Directory with room for twice the checkpoint; default: the system's temporary "
            "one.",
        ),
    ] = None,
    lora: Annotated[
        Path | None,
        options.weights(
            "Check a PEFT adapter instead: load it into a model under TP 2 on the CPU "
            "and export it. Only the config of SRC is read."
        ),
    ] = None,
    workers: options.Workers = None,
    strict: options.Strict = False,
) -> "Report":
    """Convert to Megatron-Core and back, and compare every tensor and file bitwise."""
    from mcore_qwen3vl.verification.checkpoints import adapter_roundtrip, roundtrip

    if lora is not None:
        console.quiet_libraries()
        return adapter_roundtrip(src, lora, work_dir)
    return roundtrip(src, work_dir, console.byte_progress, workers=workers, strict=strict)


@app.command("tensors")
@options.then(conclude)
def verify_tensors(
    a: Annotated[
        Path, options.source("A", "A checkpoint, Hugging Face (or hub id) or Megatron-Core.")
    ],
    b: Annotated[Path, options.source("B", "The checkpoint to compare it with.")],
) -> "Report":
    """Compare two checkpoints bitwise, as Hugging Face tensors."""
    from mcore_qwen3vl.verification.checkpoints import compare_checkpoints

    with console.byte_progress("comparing") as progress:
        return compare_checkpoints(a, b, progress=progress)


@app.command("audit")
@options.then(conclude)
def verify_audit(
    examined: Annotated[
        Path,
        options.source(
            "EXAMINED", "Megatron-Core checkpoint, by any known maker, or Hugging Face checkpoint."
        ),
    ],
    hf: Annotated[
        Path, options.source("HF", "Hugging Face checkpoint (or hub id) that it was made from.")
    ],
) -> "Report":
    """Judge somebody's conversion on one page, and say what was done to each wrong tensor.

    Tensors are compared bit for bit, after rounding those of HF to the dtype of EXAMINED.
    """
    from mcore_qwen3vl.verification.audit import audit

    with console.byte_progress("auditing") as progress:
        return audit(examined, hf, progress=progress)


@app.command("manifest")
@options.then(conclude)
def verify_manifest(
    path: Annotated[
        Path, typer.Argument(metavar="DIR", help="Checkpoint that convert hf-to-mcore wrote.")
    ],
    workers: options.Workers = None,
) -> "Report":
    """Compare every tensor with the checksums in DIR/manifest.json, without the source."""
    from mcore_qwen3vl.verification.checkpoints import check_manifest

    with console.byte_progress("checking") as progress:
        return check_manifest(path, workers=workers, progress=progress)


@app.command("certificate")
@options.then(conclude)
def verify_certificate(
    file: Annotated[
        Path, typer.Argument(help="report.json, which another command wrote with --report.")
    ],
) -> "Report":
    """Check a report that was handed over: its verdict, the code, the versions and every input.

    Nothing of its command is run; give that command again to repeat the comparison.
    """
    from mcore_qwen3vl.verification.certificate import check_certificate

    return check_certificate(file)


@app.command("parity")
@options.then(conclude)
@options.layout_flags()
def verify_parity(
    hf: HFSource,
    layout: Layout,
    batches: Annotated[
        str | None, typer.Option(help="Comma-separated kinds of batches; default: all of them.")
    ] = None,
    gradients: Annotated[bool, typer.Option(help="Compare gradients and an AdamW step.")] = True,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp64"],
        typer.Option(
            help="Dtype of both models. fp64 tells an error from rounding where fp32 does not."
        ),
    ] = "fp32",
    device: Annotated[
        Literal["cpu", "cuda"],
        typer.Option(
            help="Device of the Megatron-Core model. If a machine has fewer GPUs than ranks, the "
            "ranks share them."
        ),
    ] = "cpu",
    spec: options.Spec = "torch",
    lora: Annotated[
        str | None,
        typer.Option(
            metavar="ADAPTER",
            help="PEFT adapter directory; or language, language-aligner or all, for an adapter "
            "there with random factors.",
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        options.weights(
            "Megatron-Core checkpoint, by any known maker, to load our model from; default: HF.",
            "DIR",
        ),
    ] = None,
    compile_pointwise: Annotated[
        bool,
        typer.Option(
            "--compile-pointwise", help="Compile pointwise operations, as the flag of train does."
        ),
    ] = False,
    timeout: Timeout = 600.0,
) -> "Report":
    """Compare logits, loss and every gradient under a parallel layout with Hugging Face's.

    With --lora the reference is PEFT's model, and only the adapter is trained. With --checkpoint
    our model has the weights of a Megatron-Core checkpoint, to check how it was converted.
    If something differs, `verify trace` names the first module at which the models part.
    """
    console.quiet_libraries()
    from mcore_qwen3vl.verification.parity.comparison import verify_parity as verify

    return verify(
        hf,
        layout,
        None if batches is None else batches.split(","),
        gradients=gradients,
        dtype=dtype,
        device=device,
        spec=spec,
        lora=lora,
        checkpoint=checkpoint,
        compile_pointwise=compile_pointwise,
        timeout=timeout,
        progress=console.count_progress,
        say=lambda line: console.messages.print(console.plain(line), soft_wrap=True),
    )


@app.command("trace")
@options.then(conclude)
@options.layout_flags()
def verify_trace(
    hf: HFSource,
    layout: Layout,
    mcore: Annotated[
        Path | None,
        typer.Argument(
            metavar="MCORE",
            help="Megatron-Core checkpoint to examine; default: HF is loaded directly.",
        ),
    ] = None,
    image: Annotated[list[Path] | None, typer.Option(help="An image; may be repeated.")] = None,
    video: Annotated[list[Path] | None, typer.Option(help="A video; may be repeated.")] = None,
    prompt: Annotated[str | None, typer.Option(help="What to ask about images and videos.")] = None,
    batch: Annotated[
        str, typer.Option(help="Without --prompt: the parity batch to use.")
    ] = "mixed",
    gradients: Annotated[
        bool, typer.Option("--gradients", help="Compare gradients of the loss as well.")
    ] = False,
    lora: Annotated[
        Path | None,
        options.weights("A PEFT adapter for both models; PEFT's model is the reference."),
    ] = None,
    timeout: Timeout = 600.0,
) -> "Report":
    """Find the first place where the two models differ, and name the weights and settings there.

    Hugging Face's model runs on this machine in float32 and float64, which takes 12 bytes a
    parameter (24 with --gradients) besides ours in float32 on the CPU. For a model too large for
    that, trace a copy with fewer layers.
    """
    console.quiet_libraries()
    from mcore_qwen3vl.runtime import cpu

    cpu.install()
    from mcore_qwen3vl.verification.parity.case import ParityCase
    from mcore_qwen3vl.verification.trace.tracing import from_prompt, trace

    if (image or video) and prompt is None:
        raise BadInput("--image and --video need a --prompt that asks about them.")
    micro = None
    if prompt is not None:
        micro = from_prompt(
            hf, prompt, image or [], video or [], multiple=ParityCase(layout=layout).length_multiple
        )
    return trace(
        hf,
        mcore,
        layout=layout,
        micro=micro,
        batch=batch,
        gradients=gradients,
        lora=lora,
        timeout=timeout,
    )


@app.command("resume")
@options.then(conclude)
def verify_resume(
    a: Annotated[
        Path, typer.Argument(metavar="A", help="Folder of a run's checkpoints, its --save.")
    ],
    b: Annotated[
        Path,
        typer.Argument(
            metavar="B",
            help="Another run's: the same one stopped and resumed, or under another layout.",
        ),
    ],
    logs: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A B", help="Their files of --log-json."),
    ] = None,
    records: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A B", help="Their folders of --log-records."),
    ] = None,
    loosen: Annotated[
        float,
        typer.Option(
            min=1.0,
            help="Multiply all limits by this: over many steps, rounding drives runs apart.",
        ),
    ] = 1.0,
) -> "Report":
    """Compare two runs of training step by step, and name the first thing that differs.

    Of each step that both have logged or saved: records, learning rate, losses and norms; settings,
    position in the data, schedule, random states (under one layout), moments and weights. Nothing
    is computed, and a tensor is read in the pieces in which A stored it.
    """
    from mcore_qwen3vl.verification.runs import compare_runs

    return compare_runs(a, b, logs=logs, records=records, loosen=loosen)


@app.command("rollout")
@options.then(conclude)
@options.layout_flags(small_layout, without=("vpp",))
@options.data_flags("allow_dropped", "trust_data")
def verify_rollout(
    server: Annotated[
        str,
        typer.Argument(
            metavar="SERVER",
            help="Address of a server with vLLM's OpenAI API, as http://HOST:8000; a key is read "
            "from OPENAI_API_KEY.",
        ),
    ],
    checkpoint: Checkpoint,
    data: Annotated[
        Path, options.data_set(f"{DATA_SETS} Prompts are its records without the last answer.")
    ],
    layout: Layout,
    reading: dict[str, Any],
    prompts: Annotated[
        int, typer.Option(min=1, help="How many records to use, from the beginning.")
    ] = 16,
    temperature: Annotated[
        float,
        typer.Option(
            help="Of the server's sampling, and what logits are divided by; 0 is greedy, and they "
            "are then not divided."
        ),
    ] = 1.0,
    top_p: Annotated[float, typer.Option(help="Of the server's sampling; 1 is off.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Of the server's sampling; 0 is off.")] = 0,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 64,
    seed: Annotated[int, typer.Option(help="Of the server's sampling.")] = 0,
    model: Annotated[
        str | None, typer.Option(help="The server's name of the model; default: its first.")
    ] = None,
    split: Split = "train",
    preprocess: Preprocess = None,
    chat_template_kwargs: ChatTemplateKwargs = None,
    dtype: Annotated[
        Literal["config", "bf16", "fp16", "fp32"],
        typer.Option(
            help="Dtype in which the server is expected to compute; config: as the checkpoint's "
            "config says."
        ),
    ] = "config",
    spec: options.Spec = "torch",
    hf_model: ConfigSource = None,
    lora: Adapter = None,
    cpu: Cpu = False,
    timeout: Annotated[
        float, typer.Option(help="How long to wait for an answer of the server, in seconds.")
    ] = 600.0,
) -> "Report":
    """Say what makes a server's log-probabilities differ from the trained model's.

    The server answers prompts of DATA, and CHECKPOINT scores its answers. The first of these that
    explains the difference is named: tokens of the prompt, pixels and grids, the meaning of
    log-probabilities (temperature, masks), rounding, weights of the language model or the tower.
    """
    quiet_and_choose_backend(cpu)
    from mcore_qwen3vl.inference import unused_by
    from mcore_qwen3vl.verification.rollout.comparison import RolloutRequest, compare_rollout
    from mcore_qwen3vl.verification.rollout.server import Sampling

    request = RolloutRequest(
        checkpoint, server=server, data=data, model=model, prompts=prompts,
        sampling=Sampling(temperature, top_p, top_k, max_tokens, seed), split=split,
        preprocess=preprocess, chat_template_kwargs=chat_template_kwargs, timeout=timeout,
        layout=layout, spec=spec, dtype=dtype, hf=hf_model, lora=lora, **reading,
    )  # fmt: skip
    report = compare_rollout(request, on_cpu=cpu)
    console.print_unused([*unused_by(request, "verify rollout"), *report.unused])
    return report


@app.command("search")
@options.then(conclude)
@options.layout_flags()
def verify_search(
    hf: HFSource,
    layout: Layout,
    data: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="JSONL file whose first records train; default: made up.",
        ),
    ] = None,
    flags: Annotated[
        str, typer.Option(metavar="'FLAG ...'", help="Flags of `train` that every run has.")
    ] = "",
    minutes: Annotated[float, typer.Option(help="How long to search.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Which runs are drawn.")] = 0,
    device: Annotated[
        Literal["cpu", "cuda"],
        typer.Option(help="What computes the runs; on cuda, ranks share the GPUs of one machine."),
    ] = "cpu",
) -> "Report":
    """Look for disagreements in a configuration: short runs at random, judged by oracles.

    The model that runs has the kind, heads, experts, vocabulary and processor of HF, small sizes
    and random weights. Each run is compared with one rank, with the run that was never stopped, and
    with a plain loop of transformers.
    """
    console.quiet_libraries()
    from mcore_qwen3vl.verification.search.of_user import search_model

    words = shlex.split(flags)
    return search_model(
        hf, layout, data=data, flags=words, minutes=minutes, seed=seed, device=device
    )
