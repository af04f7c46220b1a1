"""Preference data, and a plain DPO loop over Hugging Face's model, one sequence at a time."""

from __future__ import annotations

import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_qwen3vl.losses.kto import Kto
from mcore_qwen3vl.losses.preference import Preference
from mcore_qwen3vl.tiny.records import write_image_qa
from mcore_qwen3vl.verification.curves import (
    CLIP,
    Job,
    StepMetrics,
    adamw,
    batch_order,
    encode_conversation,
    sample_order,
)
from tests.training.one_step import Plain, plain_model


def write_pairs(folder: Path, samples: int) -> Path:
    """Write image questions, each with its own answer and another's, in all forms of a record."""
    file = write_image_qa(folder, samples)
    records = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    lines = []
    for i, (*shared, answer) in enumerate(records):
        other = records[(i + 7) % samples][-1]["content"] + " or not"[: i % 8]
        chosen, rejected = [answer], [{"role": "assistant", "content": other}]
        if i % 3 == 0:
            record: dict[str, Any] = {"chosen": shared + chosen, "rejected": shared + rejected}
        elif i % 3 == 1:
            record = {"messages": shared, "chosen": answer["content"], "rejected": other}
        else:
            record = {"messages": shared, "chosen": chosen, "rejected": rejected[0]}
        lines.append(json.dumps(record))
    file.write_text("\n".join(lines) + "\n")
    return file


def as_tar(pairs: Path, folder: Path) -> Path:
    """Write what :func:`write_pairs` wrote as a WebDataset, each image in its sample."""
    folder.mkdir()
    with tarfile.open(folder / "0.tar", "w") as tar:
        for index, line in enumerate(pairs.read_text().splitlines()):
            parts = {"json": re.sub(r"\d+\.png", "png", line).encode()}
            if found := re.search(r"\d+\.png", line):
                parts["png"] = (pairs.parent / found.group()).read_bytes()
            for suffix, content in parts.items():
                info = tarfile.TarInfo(f"{index:03}.{suffix}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return folder


def sides_of(record: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Return both conversations of a record that :func:`write_pairs` wrote."""
    found = []
    for value in (record["chosen"], record["rejected"]):
        turns = value if isinstance(value, list) else [value]
        turns = [{"role": "assistant", "content": t} if isinstance(t, str) else t for t in turns]
        found.append([*record.get("messages", []), *turns])
    return found


def log_prob(model: Any, sample: tuple[dict[str, Tensor], Tensor]) -> tuple[Tensor, int]:
    """Return the log-probability of the answer, from all logits, and the answer's length."""
    inputs, labels = sample
    logits = model(**inputs).logits[0, :-1]
    trained = labels[1:] != -100
    chosen = logits.log_softmax(-1).gather(1, labels[1:].clamp(min=0)[:, None])[:, 0]
    return chosen[trained].sum(), int(trained.sum())


def formula(
    policy: list[Tensor], reference: list[Tensor] | None, lengths: list[int], p: Preference
) -> Tensor:
    """Return the loss of one pair by the formula of TRL's trainer."""
    if reference is None:
        means = [one / length for one, length in zip(policy, lengths, strict=True)]
        if p.kind == "simpo":
            loss = -torch.sigmoid(p.beta * (means[0] - means[1]) - p.gamma).log()
        else:
            odds = [mean.exp() / (1 - mean.exp()) for mean in means]
            loss = -p.beta * torch.sigmoid((odds[0] / odds[1]).log()).log()
    elif p.kind == "ipo":
        gap = (policy[0] - reference[0]) / lengths[0] - (policy[1] - reference[1]) / lengths[1]
        loss = (gap - 1 / (2 * p.beta)) ** 2
    else:
        gap = (policy[0] - policy[1]) - (reference[0] - reference[1])
        right, wrong = torch.sigmoid(p.beta * gap).log(), torch.sigmoid(-p.beta * gap).log()
        loss = -(1 - p.label_smoothing) * right - p.label_smoothing * wrong
        if p.kind == "hinge":
            loss = torch.relu(1 - p.beta * gap)
    return loss - p.rpo_alpha * policy[0] / lengths[0]


def plain_step(job: Job, preference: Preference) -> Plain:
    """Run the first step of a loss without a reference, one sequence at a time."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(job.checkpoint)
    model, named = plain_model(job)
    records = [json.loads(line) for line in job.data.read_text().splitlines()]
    order = sample_order(job)[0][::2]  # every pair is named twice in a row
    total = torch.zeros([])
    for line in order:
        sides = [
            encode_conversation(processor, side, job.data.parent)
            for side in sides_of(records[line])
        ]
        policy, lengths = zip(*(log_prob(model, side) for side in sides), strict=True)
        total = total + formula(list(policy), None, list(lengths), preference) / len(order)
    return Plain.of(total, named)


def write_labelled(folder: Path, samples: int) -> Path:
    """Write image questions with right and wrong answers as labelled records, in all forms."""
    file = write_image_qa(folder, samples)
    records = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    lines = []
    for i, (asked, answer) in enumerate(records):
        label = i % 3 != 1
        if not label:
            answer = {**answer, "content": "No: " * (i % 5) + records[i - 1][-1]["content"]}
        if i % 2:
            record: dict[str, Any] = {"messages": [asked, answer]}
        else:
            record = {"prompt": [asked], "completion": [answer] if i % 4 else answer["content"]}
        lines.append(json.dumps({**record, "label": label}))
    file.write_text("\n".join(lines) + "\n")
    return file


def conversation_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the question and the answer of a record that :func:`write_labelled` wrote."""
    if "messages" in record:
        return list(record["messages"])
    answer = record["completion"]
    said = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer[0]
    return [record["prompt"][0], said]


def plain_kto_step(job: Job, kto: Kto, reference: Path | None = None) -> tuple[Plain, float]:
    """Run the first step of KTO, one sequence at a time; return the baseline, too.

    The reference is the job's checkpoint unless another is given.
    """
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(job.checkpoint)
    base = AutoModelForImageTextToText.from_pretrained(
        reference or job.checkpoint, dtype=torch.float32
    )
    model, named = plain_model(job)
    records = [json.loads(line) for line in job.data.read_text().splitlines()]

    def change(messages: list[dict[str, Any]]) -> Tensor:
        sample = encode_conversation(processor, messages, job.data.parent)
        with torch.no_grad():
            reference = log_prob(base, sample)[0]
        return log_prob(model, sample)[0] - reference

    order = batch_order(job)[0]
    exchanged = []
    with torch.no_grad():
        for lines in order:
            turns = [conversation_of(records[line]) for line in lines]
            pairs = zip(turns, turns[-1:] + turns[:-1], strict=True) if len(turns) > 1 else ()
            exchanged += [change([own[0], other[1]]) for own, other in pairs]
    baseline = max(torch.stack(exchanged).mean(), torch.zeros([]))
    losses = []
    for line in (line for lines in order for line in lines):
        moved = change(conversation_of(records[line]))
        if records[line]["label"]:
            gain, weight = moved - baseline, kto.desirable_weight
        else:
            gain, weight = baseline - moved, kto.undesirable_weight
        losses.append(weight * (1 - torch.sigmoid(kto.beta * gain)))
    return Plain.of(torch.stack(losses).mean(), named), float(baseline)


def refuse_ties(router: Any, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Refuse data where rounding decides the experts, which once put a loss off by 4e-3."""
    best = output[0].detach().softmax(-1).sort(-1, descending=True).values
    gap = (best[:, router.top_k - 1] - best[:, router.top_k]).min()
    assert gap > 1e-6, f"two experts are {gap:.1e} apart: other data, please"


def plain_curve(job: Job, preference: Preference) -> tuple[list[StepMetrics], list[float]]:
    """Return each step's loss and gradient norm, and mean margin; the base is the reference."""
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(job.checkpoint)
    base = AutoModelForImageTextToText.from_pretrained(job.checkpoint, dtype=torch.float32)
    routers = [m for m in base.modules() if type(m).__name__.endswith("TopKRouter")]
    handles = [router.register_forward_hook(refuse_ties) for router in routers]
    records = [json.loads(line) for line in job.data.read_text().splitlines()]
    samples = [
        [encode_conversation(processor, side, job.data.parent) for side in sides_of(record)]
        for record in records
    ]
    with torch.no_grad():
        reference = [[log_prob(base, side)[0] for side in pair] for pair in samples]
    for handle in handles:
        handle.remove()
    model = base
    if job.lora is not None:
        model = PeftModel.from_pretrained(base, job.lora, is_trainable=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = adamw({n: p for n, p in model.named_parameters() if p.requires_grad})
    curve, margins = [], []
    for lines in sample_order(job):
        order = lines[::2]  # every pair is named twice in a row
        optimizer.zero_grad()
        total = margin = 0.0
        for line in order:
            policy, lengths = zip(*(log_prob(model, side) for side in samples[line]), strict=True)
            loss = formula(list(policy), reference[line], list(lengths), preference) / len(order)
            loss.backward()
            total += loss.item()
            rewards = [float(p - r) for p, r in zip(policy, reference[line], strict=True)]
            margin += preference.beta * (rewards[0] - rewards[1]) / len(order)
        norm = torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        curve.append(StepMetrics(total, float(norm)))
        margins.append(margin)
    return curve, margins
