"""The comparison of a server's answers with the trained model, from the data set to the report."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.config import DataConfig, MediaLimits, parse_sources
from mcore_qwen3vl.data.datasets import CrudeSamples
from mcore_qwen3vl.data.processor import load_processor, require_fitting
from mcore_qwen3vl.data.records.reading import BadSample, Reading
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.generation.sampling import load_generation_config
from mcore_qwen3vl.inference import (
    CheckedModel,
    ModelRequest,
    hf_folder_of,
    on_all_ranks,
    require_device,
)
from mcore_qwen3vl.model.inputs import length_multiple
from mcore_qwen3vl.unused.fields import Unused
from mcore_qwen3vl.verification.measurement import Finding, Measurement
from mcore_qwen3vl.verification.report import Report
from mcore_qwen3vl.verification.rollout.causes import (
    CAUSES,
    KINDS,
    PROMPT,
    Cause,
    Compared,
    Limits,
    Vocabulary,
    explain,
    explain_prompt,
    root_mean_square,
)
from mcore_qwen3vl.verification.rollout.on_rank import (
    Meaning,
    ReadySequences,
    score_on_rank,
    with_answer,
)
from mcore_qwen3vl.verification.rollout.prompts import Kind, Prompt, PromptReader
from mcore_qwen3vl.verification.rollout.server import Answer, Refused, Sampling, Server

PROMPTS = 16
_AT_ONCE = 8
"""Requests that a server has at a time."""
_TEMPERATURES = tuple(tenth / 10 for tenth in range(1, 21))
"""Those by which a server may divide the logits, whatever it was asked for."""


@dataclass(frozen=True)
class RolloutRequest(ModelRequest):
    """The server, the prompts and the trained model.

    The server is expected to compute in `dtype`, too.

    Attributes:
        server: address of a server with vLLM's OpenAI API.
        data: any data set of training; the last answers of its records are not used.
        model: the server's name of the model; None: its first.
        prompts: how many records to use, from the beginning.
    """

    server: str
    data: Path
    model: str | None = None
    prompts: int = PROMPTS
    sampling: Sampling = field(default_factory=Sampling)
    media_limits: MediaLimits = field(default_factory=MediaLimits)
    split: str = "train"
    preprocess: str | None = None
    chat_template_kwargs: str | None = None
    allow_dropped: bool = False
    trust_data: bool = False
    timeout: float = 600.0


@dataclass
class RolloutComparison(Report):
    """The report on a server; `causes` are those that explain the differences, the first first."""

    causes: list[Cause] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)
    unused: dict[Unused, None] = field(default_factory=dict)

    @property
    def notes(self) -> dict[str, str]:
        paragraphs = {}
        if self.causes:
            lines = (f"{cause.name}: {cause.why}." for cause in self.causes)
            paragraphs["What explains the difference"] = "\n".join(lines)
        if self.figures:
            paragraphs["How far apart"] = "\n".join(self.figures)
        if self.not_compared:
            paragraphs["Not compared"] = "\n".join(self.not_compared)
        return paragraphs


def compare_rollout(request: RolloutRequest, *, on_cpu: bool = False) -> RolloutComparison:
    """Ask the server, score its answers with the trained model, and explain the differences.

    Raises:
        BadInput: the checkpoint, the data or the layout cannot be used, the server cannot be
            reached or does not send what is needed, or no prompt can be compared.
    """
    if "RANK" in os.environ:
        raise BadInput("verify rollout starts its ranks itself: run it without torchrun.")
    require_device(on_cpu=on_cpu, purpose="verify rollout")  # before the server works in vain
    half, expects_half = _half_of(request)
    models = [
        CheckedModel(replace(request, dtype=dtype), "verify rollout") for dtype in ("fp32", half)
    ]
    folder, architecture = models[0].folder, models[0].architecture
    processor = load_processor(folder)
    require_fitting(processor, architecture)
    config = _data_config(request, architecture)
    reading = Reading(
        preprocess=request.preprocess, chat_template_kwargs=request.chat_template_kwargs
    )
    sources = parse_sources([str(request.data)], reading)
    samples = CrudeSamples(sources, split=request.split, trust=request.trust_data)
    server = Server(request.server, request.model, timeout=request.timeout)
    reader = PromptReader(samples, sources, processor, config)
    prompts = reader.read(request.prompts)
    report = RolloutComparison(f"{server.address} and {request.checkpoint.name}")
    report.unused = prompts.unused
    report.not_compared = [f"{place}: {why}" for place, why in prompts.errors.items()]
    vocabulary = _vocabulary(processor, architecture)
    equal = list(_ask(server, prompts.prompts, request.sampling, vocabulary, report))
    if not report.findings:
        raise BadInput("No prompt can be compared: " + "; ".join(report.not_compared[:3]))
    if equal:
        sequences = ReadySequences(
            [with_answer(prompt.plan, answer.token_ids) for prompt, answer in equal],
            architecture,
            config,
            processor.tokenizer.pad_token_id,
            reader.scale,
            length_multiple(request.layout.cp, request.layout.tp, request.layout.sp),
        )
        meanings = _meanings(request.sampling, folder)
        job = partial(score_on_rank, models, sequences, meanings)
        scored = on_all_ranks(job, request.layout, on_cpu=on_cpu, purpose="verify rollout")
        answers = list(_compared(equal, *scored))
        if answers:
            _judge(report, answers, meanings, half=expects_half)
    report.environment = {
        "layout": str(request.layout),
        "dtype": f"{half if expects_half else 'fp32'} expected of both",
        "sampling": ", ".join(f"{k} {v:g}" for k, v in asdict(request.sampling).items()),
        "server's model": server.model,
    }
    return report


_SHORT: dict[str, Literal["bf16", "fp16"]] = {"bfloat16": "bf16", "float16": "fp16"}


def _half_of(request: RolloutRequest) -> tuple[Literal["bf16", "fp16"], bool]:
    """Return the half precision whose rounding is measured, and whether it is expected."""
    if request.dtype in ("bf16", "fp16"):
        return request.dtype, True
    folder = hf_folder_of(request.checkpoint, request.hf, "verify rollout")
    named = _SHORT.get(Architecture.from_hf(folder).dtype)
    return named or "bf16", named is not None and request.dtype == "config"


def _data_config(request: RolloutRequest, architecture: Architecture) -> DataConfig:
    """Return the settings of reading; the longest prompt leaves room for an answer."""
    layout = request.layout
    multiple = length_multiple(layout.cp, layout.tp, layout.sp)
    longest = architecture.max_position_embeddings - request.sampling.max_tokens
    if longest < multiple:
        raise BadInput(
            f"--max-tokens {request.sampling.max_tokens} leaves no room for a prompt in the "
            f"model's {architecture.max_position_embeddings} positions: ask for fewer."
        )
    return DataConfig(
        longest - longest % multiple,
        length_multiple=multiple,
        media_limits=request.media_limits,
        allow_dropped=request.allow_dropped,
        trust_data=request.trust_data,
    )


def _vocabulary(processor: Any, architecture: Architecture) -> Vocabulary:
    images = processor.image_processor
    return Vocabulary(
        processor.tokenizer,
        architecture.vocab_size,
        {processor.image_token_id: "image", processor.video_token_id: "video"},
        (images.patch_size * images.merge_size) ** 2,
    )


def _meanings(sampling: Sampling, folder: Path) -> list[Meaning]:
    """Return the meanings that a server's log-probabilities may have; the first is ours.

    Training divides logits by the temperature and leaves no token out. Servers may do neither, or
    both, by what they were asked for or by the defaults that the checkpoint names.
    """
    temperature = sampling.temperature or 1.0  # greedy: nothing is divided, and nothing left out
    expected = Meaning(temperature)
    asked = Meaning(temperature, sampling.top_k, sampling.top_p)
    usual = load_generation_config(folder)
    named = Meaning(usual.temperature or 1.0, usual.top_k or 0, usual.top_p or 1.0)
    others = [Meaning(), asked, named, replace(named, top_k=0, top_p=1.0)]
    others += [Meaning(divisor) for divisor in _TEMPERATURES]
    return list(dict.fromkeys([expected, *others]))


def _ask(
    server: Server,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    vocabulary: Vocabulary,
    report: RolloutComparison,
) -> Iterator[tuple[Prompt, Answer]]:
    """Ask the server, and yield prompts that it sees as we do, with its answers.

    Findings on the prompts, and what makes them differ, go into `report`.
    """

    def answer(prompt: Prompt) -> Answer | str:
        try:
            return server.answer(prompt.conversation, sampling)
        except Refused as error:
            return f"the server refuses it: {error}"
        except BadSample as error:
            return str(error)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(pool.map(answer, prompts))
    causes: dict[str, Cause] = {}
    for prompt, said in zip(prompts, answers, strict=True):
        if isinstance(said, str):
            report.not_compared.append(f"{prompt.place}: {said}")
            continue
        ours = prompt.plan.input_ids.tolist()
        their_text = partial(server.text_of, said.prompt_ids)
        cause = explain_prompt(ours, said.prompt_ids, vocabulary, their_text)
        if cause is None and max(said.token_ids, default=0) >= vocabulary.rows:
            why = f"the answer has the token {max(said.token_ids)}, beyond {vocabulary.rows} rows"
            cause = Cause(PROMPT, f"{why} of the model's embedding: the server has other tokens")
        part = PROMPT if cause is None else cause.name
        flaw = "" if cause is None else cause.why
        report.findings.append(
            Finding(
                part, prompt.place, Measurement(count=len(ours)), context=prompt.kind, flaw=flaw
            )
        )
        if cause is None:
            yield prompt, _without_placeholders(prompt, said, vocabulary, report)
        elif cause.name not in causes:
            causes[cause.name] = Cause(cause.name, f"{prompt.place}: {cause.why}")
    report.causes = sorted(causes.values(), key=lambda cause: CAUSES.index(cause.name))


def _without_placeholders(
    prompt: Prompt, answer: Answer, vocabulary: Vocabulary, report: RolloutComparison
) -> Answer:
    """Return an answer up to the first token that stands for pixels; an answer has no pixels."""
    ids = answer.token_ids
    end = next((i for i, token in enumerate(ids) if token in vocabulary.placeholders), None)
    if end is None:
        return answer
    report.not_compared.append(
        f"{prompt.place}: its answer from token {end} on, which is {vocabulary.text([ids[end]])}: "
        "the server does not forbid it"
    )
    return replace(answer, token_ids=ids[:end], log_probs=answer.log_probs[:end])


def _compared(
    equal: Sequence[tuple[Prompt, Answer]],
    exact: dict[int, np.ndarray],
    rounded: dict[int, np.ndarray],
) -> Iterator[Compared]:
    for number, (prompt, answer) in enumerate(equal):
        if answer.token_ids:
            yield Compared(
                prompt.place,
                prompt.kind,
                np.array(answer.log_probs),
                exact[number][:-1],
                rounded[number][:-1],
                float(exact[number][-1].max()),
            )


def _judge(
    report: RolloutComparison,
    answers: Sequence[Compared],
    meanings: Sequence[Meaning],
    *,
    half: bool,
) -> None:
    """Compare log-probabilities, and add findings, causes and figures to `report`."""
    report.causes += explain(answers, meanings, half=half)
    limits = Limits.of(answers, 0)
    for kind in KINDS:
        some = [one for one in answers if one.kind == kind]
        if not some:
            continue
        for one in some:
            measured = Measurement(float(one.off().max()), one.largest, len(one.server))
            allowed = limits.allowed(half) / one.largest
            report.findings.append(
                Finding("log-probabilities", one.place, measured, allowed, context=kind)
            )
        errors = np.concatenate([one.off() for one in some])
        if half:
            scale = max(one.largest for one in some)
            measured = Measurement(root_mean_square(errors), scale, len(errors))
            allowed = limits.allowed_mean / scale
            report.findings.append(
                Finding("root mean square", "all answers", measured, allowed, context=kind)
            )
        report.figures.append(_figures(kind, some, errors))
    report.figures.append(
        f"rounding explains {limits.fine:.1e} of a log-probability in float32, and "
        f"{limits.half:.1e} in half precision ({limits.mean:.1e} on average)"
    )


def _figures(kind: Kind, answers: Sequence[Compared], errors: np.ndarray) -> str:
    chances = np.concatenate([np.abs(np.exp(one.server) - np.exp(one.exact[0])) for one in answers])
    return (
        f"{kind}: {len(answers)} answers of {len(errors)} tokens; a log-probability differs by at "
        f"most {errors.max():.1e} and {errors.mean():.1e} on average, a probability by at most "
        f"{chances.max():.1e}"
    )
