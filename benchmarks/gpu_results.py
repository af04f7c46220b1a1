"""What :mod:`benchmarks.gpu_check` reads of its parts: results from standard output and files.

Each reader returns results by the names that stand in the report, and raises `Mismatch` where they
do not hold.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from statistics import median
from typing import Any

from mcore_qwen3vl.simulated_gpu.device import is_preloaded

ITERATIONS = 20
"""Iterations of a training loop, each of which logs a loss."""
LOSS_TOLERANCE = 0.02
"""Relative. On the CPU, float32 differs from bf16 by 0.15 % (MoE: 0.35 %), and products of values
rounded as in FP8 by 0.8 %. Products whose weights get no gradient make 25 %."""


class Mismatch(Exception):
    """A part ran, but its results do not hold; its arguments are the reason and the results."""


def find_json(printed: str) -> dict[str, Any]:
    """Return the JSON object in standard output, among lines of NCCL and other libraries."""
    start = re.search(r"^\{", printed, re.MULTILINE)
    if start is None:
        raise ValueError("no JSON object")
    return json.JSONDecoder().raw_decode(printed, start.start())[0]


def read_verify_report(printed: str) -> dict[str, Any]:
    """Read a report of ``verify``: how much was compared, what failed, and the verdict."""
    report = find_json(printed)
    findings = report["findings"]
    failed = [f"{f['part']} {f['name']} ({f['context']})" for f in findings if not f["ok"]]
    counts = {"compared": len(findings), "failed": len(failed), "verdict": report["verdict"]}
    return counts | ({"failed first": ", ".join(failed[:3])} if failed else {})


def read_worst_kernel(printed: str) -> dict[str, Any]:
    """Return how many comparisons of attention there are, and which is the worst."""
    errors = find_json(printed)
    name = max(errors, key=errors.__getitem__)
    return {"compared": len(errors), "worst": errors[name], "in": name}


def compare_tokens(answer: Path, other: Path, printed: str) -> dict[str, Any]:
    """Read the answer of ``generate``, keep its tokens, and compare them with another spec's.

    Raises:
        Mismatch: they differ; greedy tokens of a tiny random model are far apart.
    """
    answer_json = find_json(printed)
    tokens = [reply["token_ids"] for reply in answer_json["answers"]]
    answer.write_text(json.dumps(tokens))
    if other.exists() and json.loads(other.read_text()) != tokens:
        raise Mismatch(f"the tokens are not those of {other.name}", answer_json)
    return answer_json


def compare_losses(log: Path, other: Path | None, printed: str) -> dict[str, Any]:
    """Read a run's losses, and compare them with those of another run, if any.

    Raises:
        Mismatch: a loss is missing or not finite, or differs by more than `LOSS_TOLERANCE`.
    """
    losses = _read_losses(log)
    results: dict[str, Any] = {"first loss": losses[0], "last loss": losses[-1]}
    if len(losses) != ITERATIONS or not all(map(math.isfinite, losses)):
        raise Mismatch(f"{len(losses)} losses of {ITERATIONS}, or one is no number", results)
    if other is None:
        return results
    expected = _read_losses(other) if other.exists() else []
    if len(expected) != ITERATIONS:
        raise Mismatch(f"{other.name} has no {ITERATIONS} losses to compare with", results)
    pairs = zip(losses, expected, strict=True)
    results["worst difference"] = max(abs(a - b) / max(abs(b), 1e-9) for a, b in pairs)
    results["from"] = other.stem
    if not results["worst difference"] <= LOSS_TOLERANCE:
        raise Mismatch(f"a loss differs by more than {LOSS_TOLERANCE:.0%}", results)
    return results


def _read_losses(log: Path) -> list[float]:
    return [json.loads(line)["lm loss"] for line in log.read_text().splitlines()]


def read_benchmark(printed: str) -> dict[str, Any]:
    """Read one side's seconds per step, the figures derived from them, and its peak memory."""
    (result,) = find_json(printed)["results"].values()
    names = (
        "seconds", "tokens/s", "MFU", "reserved GB", "kernel ms", "launches", "note",
        "modelled seconds", "profile",
    )  # fmt: skip
    shown = {name: result[name] for name in names if result.get(name) is not None}
    return {"peak GB": result["peak memory GB"], **shown}


def read_log(printed: str) -> dict[str, Any]:
    """Read the fullest rank's peak and reserve and an iteration's seconds from Megatron's log.

    The peak is that after the second iteration, when Adam's moments are there; the seconds are the
    median from the fourth iteration on, when everything is compiled.
    """
    pattern = r"after 2 iterations\).*?max allocated: ([\d.]+).*?max reserved: ([\d.]+)"
    mib = zip(*re.findall(pattern, printed), strict=True)
    peak, reserved = (max(map(float, ranks)) * 2**20 / 1e9 for ranks in mib)
    times = re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", printed)
    seconds = median(float(time) / 1e3 for time in times[3:] or times)
    return {"peak GB": peak, "seconds": seconds, "reserved GB": reserved}


def read_profile(printed: str) -> dict[str, Any]:
    """Read what the report has of a profile: times and counts of an iteration.

    Raises:
        Mismatch: it has no kernel; the simulated GPU's has none.
    """
    found = find_json(printed)
    gap = found["longest gaps"][0]
    groups = [f"{g} {of['ms']:.1f} in {of['launches']:.0f}" for g, of in found["groups"].items()]
    idle = [f"{phase} {ms:.1f}" for phase, ms in found["idle ms by phase"].items()]
    results = {
        "ms": found["ms without profile"],
        "busy": found["busy without profile"],
        "busy ms": found["busy ms"],
        "launches": found["launches"],
        "kernels, ms": ", ".join(groups),
        "profiled ms": found["ms"],
        "idle ms": ", ".join(idle),
        "longest gap": f"{gap['ms']:.1f} ms in {gap['phase']}: {gap['host']}",
        **found["allocator"],
    }
    if not results["launches"] and not is_preloaded():
        raise Mismatch("PyTorch's profiler has recorded no kernel", results)
    return results


def read_rehearsal(printed: str) -> dict[str, Any]:
    """Read the first role's peak and the step's seconds from a rehearsal."""
    report = find_json(printed)
    step = report["step"]["seconds"]
    return {"peak GB": report["roles"][0]["peak"] / 1e9, "modelled seconds": step}
