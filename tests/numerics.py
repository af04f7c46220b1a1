"""The tests that compute, as other processors would run them: ``make numerics``.

An instruction set, a library's choice of routine and the number of threads change the order of
sums, and so the last bits. A test that holds only for one machine's order fails here.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time

SETTINGS: tuple[dict[str, str], ...] = (
    {},
    {"ATEN_CPU_CAPABILITY": "default"},
    {"ATEN_CPU_CAPABILITY": "avx2"},
    {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    {"MKL_CBWR": "COMPATIBLE"},
    {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    {"OMP_NUM_THREADS": "2"},
    {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    },
    {"PYTEST_ADDOPTS": "-p tests.other_library"},
)
"""Environment variables of each run; the first is the machine as it is, with one thread."""

COMPUTING = [
    "tests/model",
    "tests/converters/adapters",
    "tests/converters/test_live.py",
    "tests/converters/test_load_into_model.py",
    "tests/converters/offline/test_to_hf.py",
    "tests/data/encoding",
    "tests/generation",
    "tests/losses",
    "tests/scoring",
    "tests/training",
    "tests/verification",
]

QUICK = [
    "tests/converters/adapters/test_merge.py",
    "tests/model/test_recompute.py",
    "tests/model/test_vision.py",
]

PROBE = """
import hashlib, os, torch
if "tests.other_library" in os.environ.get("PYTEST_ADDOPTS", ""):
    import tests.other_library
from torch.nn import functional as F
draw = torch.Generator().manual_seed(0)
a, b = torch.randn(131, 640, generator=draw), torch.randn(640, 77, generator=draw)
for made in (a @ b, a.bfloat16() @ b.bfloat16(), torch.stack([F.silu(a), a.exp(), a.softmax(-1)])):
    print(hashlib.sha256(made.float().numpy().tobytes()).hexdigest())
"""
KINDS = ("products", "products in bf16", "functions")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.numerics", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the last two at once, on three files")
    options, arguments = parser.parse_known_args()
    chosen = (SETTINGS[-2] | SETTINGS[-1],) if options.quick else SETTINGS
    tests = [*(QUICK if options.quick else COMPUTING), "-m", "not slow", *arguments]
    usual, wrong, rows = _bits({}), 0, []
    for setting in chosen:
        name = " ".join(f"{key}={value}" for key, value in setting.items()) or "as it is"
        print(f"--- {name}", flush=True)
        start = time.monotonic()
        run = subprocess.Popen(
            [sys.executable, "-m", "pytest", *tests],
            env=_environment(setting),
            stdout=subprocess.PIPE,
            text=True,
        )
        failed: list[str] = []
        for line in run.stdout or ():
            print(line, end="", flush=True)
            failed += re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", line)
        wrong += run.wait() != 0
        others = zip(KINDS, usual, _bits(setting), strict=True)
        changed = ", ".join(kind for kind, here, there in others if here != there)
        seconds = time.monotonic() - start
        result = "passed" if run.returncode == 0 else ", ".join(failed) or "did not run"
        rows.append(f"| {name} | {changed or 'nothing'} | {result} | {seconds:.0f} |")
    print("\n| setting | changes the bits of | result | seconds |\n|---|---|---|---|")
    print("\n".join(rows))
    return int(wrong > 0)


def _environment(setting: dict[str, str]) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **setting}


def _bits(setting: dict[str, str]) -> list[str]:
    """Return digests of what `PROBE` computes, one for each of `KINDS`."""
    command = [sys.executable, "-c", PROBE]
    found = subprocess.run(
        command, env=_environment(setting), capture_output=True, text=True, check=True
    )
    return found.stdout.split()


if __name__ == "__main__":
    sys.exit(main())
