"""The search within one configuration: a user's kind of model, layout, flags and records.

The model that runs is small: of the kind, heads, experts, vocabulary and processor of the user's,
with other sizes and random weights, so that a run takes seconds on any machine.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from mcore_qwen3vl.config import Architecture, read_config_file
from mcore_qwen3vl.converters.hf.companions import companion_files
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime.launch import check_gpus, describe_device
from mcore_qwen3vl.runtime.lifetime import scratch_folder
from mcore_qwen3vl.tiny.tiny_checkpoint import FamilyName, tiny_config, write_random_weights
from mcore_qwen3vl.verification import measurement
from mcore_qwen3vl.verification.report import Report
from mcore_qwen3vl.verification.search import axes, records
from mcore_qwen3vl.verification.search.axes import Axis
from mcore_qwen3vl.verification.search.case import Case, Device, Flag
from mcore_qwen3vl.verification.search.oracles import ORACLES
from mcore_qwen3vl.verification.search.running import Bench
from mcore_qwen3vl.verification.search.search import Search

MOST_RECORDS = 32
"""Records of the user's that are read, from the first on."""

_KEPT_TEXT = (
    *("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings"),
    *("num_attention_heads", "num_key_value_heads", "norm_topk_prob", "num_experts"),
    *("num_experts_per_tok", "decoder_sparse_step", "tie_word_embeddings"),
    *("linear_num_key_heads", "linear_num_value_heads"),
)
_KEPT_VISION = ("patch_size", "spatial_merge_size", "temporal_patch_size", "in_channels")
_KEPT = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def write_small_copy(model: Path, out: Path, layers: int = 4) -> Path:
    """Write a small checkpoint of the same kind as `model`, with random weights.

    It has the heads, experts, vocabulary and processor of `model`, and other sizes.
    """
    config, architecture = read_config_file(model), Architecture.from_hf(model)
    family: FamilyName = "qwen3-vl" if architecture.delta_net is None else "qwen3.5"
    small = tiny_config(
        family=family,
        moe=architecture.is_moe,
        tie=bool(config.get("tie_word_embeddings")),
        text_only=not architecture.has_vision,
    )
    if architecture.has_vision:
        for part, kept in (("text_config", _KEPT_TEXT), ("vision_config", _KEPT_VISION)):
            small[part] |= {name: config[part][name] for name in kept if name in config[part]}
        small |= {name: config[name] for name in _KEPT}
    else:
        small |= {name: config[name] for name in _KEPT_TEXT if name in config}
    described = out.with_suffix(".json")
    described.write_text(json.dumps(small), "utf-8")
    write_random_weights(described, out, layers=layers)
    for name, file in companion_files(model).items():
        if not (out / name).exists():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, out / name)
    return out


def search_model(
    model: Path,
    layout: Layout,
    *,
    data: Path | None = None,
    flags: Sequence[str] = (),
    minutes: float = 10.0,
    seed: int = 0,
    cases: int | None = None,
    device: Device = "cpu",
) -> Report:
    """Search for disagreements of a model's kind under a layout with some flags.

    Args:
        model: a Hugging Face checkpoint; its weights are not read.
        data: a JSONL file; the search uses its first records. None: they are made up.
        flags: words of the command line of training, without paths.
        cases: end after so many cases, too.
        device: what computes the runs; ranks share the GPUs of a machine with fewer.

    Raises:
        BadInput: the flags, the data or the layout are unfit, or there is no GPU.
    """
    gpus = ""
    if device == "cuda":
        check_gpus()
        gpus = describe_device(device, layout.world_size)  # before a bench hides them
    chunks = layout.pp * layout.vpp
    with scratch_folder("mcore-qwen3vl-search-") as folder:
        small = write_small_copy(model, folder / "model", layers=max(4, chunks))
        layout.validate(Architecture.from_hf(small))
        drawn = _axes(small, layout, data, _flags(flags))
        search = Search(Bench(folder), seed, (*drawn, axes.on_gpus) if device == "cuda" else drawn)
        search.run(time.monotonic() + 60 * minutes, cases)
        report = _report(search, model, small, layout)  # a finding's report reads the small model
        report.environment |= {"device": gpus} if gpus else {}
        return report


def _flags(words: Sequence[str]) -> tuple[Flag, ...]:
    """Return the flags of a command line with their values."""
    found: list[list[str]] = []
    for word in words:
        if word.startswith("--"):
            found.append([word])
        elif found:
            found[-1].append(word)
        else:
            raise BadInput(f"{word!r} is no flag: --flags takes flags of `mcore-qwen3vl train`.")
    return tuple(map(tuple, found))


def _axes(
    model: Path, layout: Layout, data: Path | None, flags: tuple[Flag, ...]
) -> tuple[Axis, ...]:
    """Return the axes of a user's search: records, length, stop and end are still drawn."""
    theirs = _records_of(data) if data else None
    has_vision = Architecture.from_hf(model).has_vision
    makers = records.CONVERSATIONS if has_vision else records.without_media(records.CONVERSATIONS)

    def fixed(rng: Random, case: Case) -> Case:
        made = records.lines(rng, makers, 6, bad=False)
        lines = made if theirs is None else tuple(rng.sample(theirs, min(6, len(theirs))))
        media = None if data is None else str(data.resolve().parent)
        rows = int(replace(case, flags=flags).value("--micro-batch-size")) * layout.dp
        return replace(
            case, model=(str(model),), records=lines, media=media, flags=flags,
            layout=str(layout), batch=rows * rng.choice((1, 2)), steps=rng.choice((1, 2, 3)),
        )  # fmt: skip

    return (fixed, axes.stop, axes.end)


def _records_of(data: Path) -> list[str]:
    """Return the first records of a JSONL file."""
    if data.suffix != ".jsonl":
        raise BadInput(f"{data} is no .jsonl file: the search takes the first records of one.")
    lines: list[str] = []
    with data.open(encoding="utf-8") as file:
        for line in file:
            if line.strip():
                lines.append(line.rstrip("\n"))
            if len(lines) == MOST_RECORDS:
                break
    if not lines:
        raise BadInput(f"{data} has no records.")
    return lines


def _report(search: Search, model: Path, small: Path, layout: Layout) -> Report:
    """Return a report with a finding for each oracle."""
    copy = (
        "python - <<'END'\nfrom pathlib import Path\n"
        f"from {__name__} import write_small_copy\n"
        f"write_small_copy(Path({str(model.resolve())!r}), Path('small'))\nEND\n"
    )
    report = Report(f"A search within {model.name} under {layout}")
    wrong = {finding.verdict.oracle: finding for finding in search.findings}
    ran = search.counts["ran"]
    report.environment = {
        "layout": str(layout), "seed": search.seed, "runs judged": ran,
        "refused": search.counts["refused"],
    }  # fmt: skip
    for oracle in ORACLES if ran or wrong else ():
        name = oracle.__name__
        flaw = ""
        if name in wrong:
            flaw = f"{copy}{wrong[name].report()}".replace(str(small), "small")
        report.findings.append(measurement.Finding("oracles", name, flaw=flaw))
    report.environment["judged by"] = search.judgements
    return report
