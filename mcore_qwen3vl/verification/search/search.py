"""Draws cases, judges them, and reports each thing that is wrong with the smallest case that shows
it.

``python -m mcore_qwen3vl.verification.search --minutes 30 --seed 7``
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, get_args

from mcore_qwen3vl.console import quiet_libraries
from mcore_qwen3vl.errors import BadInput, CheckFailed, Unfinished
from mcore_qwen3vl.runtime.launch import check_gpus
from mcore_qwen3vl.runtime.lifetime import scratch_folder
from mcore_qwen3vl.verification.search.axes import AXES, Axis, draw, on_gpus
from mcore_qwen3vl.verification.search.case import Case, Device, paste
from mcore_qwen3vl.verification.search.oracles import ORACLES, Oracle, Verdict, judge
from mcore_qwen3vl.verification.search.running import Bench
from mcore_qwen3vl.verification.search.shrinking import shrink
from mcore_qwen3vl.verification.search.table import write_table

SHRINKING_SECONDS = 180.0


@dataclass(frozen=True)
class Counterexample:
    """Something wrong, with the smallest case that was found for it.

    Attributes:
        number: which case of the search it was.
    """

    number: int
    verdict: Verdict
    case: Case

    def covers(self, case: Case, verdict: Verdict) -> bool:
        """Return whether another case that fails is most likely the same finding."""
        if verdict.kind != self.verdict.kind or not set(self.case.model) <= set(case.model):
            return False
        names = {name for name, *_ in case.flags}
        split = self.case.layout != "single"
        return (
            {name for name, *_ in self.case.flags} <= names
            and (not split or case.layout != "single")
            and (self.case.stop is None or case.stop is not None)
        )

    def report(self) -> str:
        """Return what is wrong, and the commands of the case."""
        return f"# {self.verdict.oracle}: {self.verdict.text}\n{paste(self.case)}\n"


@dataclass
class Search:
    """A search in one process.

    Attributes:
        seed: cases are those of this seed, whatever was found.
        first, every: of all cases this process takes those from `first`, `every` apart.
    """

    bench: Bench
    seed: int
    axes: tuple[Axis, ...] = AXES
    oracles: tuple[Oracle, ...] = ORACLES
    first: int = 0
    every: int = 1
    findings: list[Counterexample] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    judged: Counter[str] = field(default_factory=Counter)
    """How many cases each oracle knew, by its name."""

    @property
    def judgements(self) -> str:
        """How many cases each oracle knew, in words."""
        return _judgements(self.judged)

    def case(self, number: int) -> Case:
        """Return the case of a number."""
        return draw(Random(f"{self.seed}:{number}"), self.axes)

    def run(
        self,
        until: float,
        most: int | None = None,
        heard: Callable[[Counterexample], None] = lambda finding: None,
        stop_at_first: bool = False,
    ) -> None:
        """Judge cases until a moment of the monotonic clock, or until so many."""
        number = self.first
        while time.monotonic() < until and (most is None or number < most):
            case = self.case(number)
            outcome, verdict = judge(case, self.bench, self.oracles)
            self.counts["refused" if outcome.refusal else "ran"] += 1
            self.judged.update(outcome.judged_by)
            if verdict is not None:
                if any(one.covers(case, verdict) for one in self.findings):
                    self.counts["found again"] += 1
                else:
                    self._note(number, case, verdict, heard)
                    if stop_at_first:
                        return
            self.bench.clear()
            number += self.every

    def _note(
        self, number: int, case: Case, verdict: Verdict, heard: Callable[[Counterexample], None]
    ) -> None:
        """Shrink a case that fails, and note it."""
        seen = {case: verdict}

        def still_fails(smaller: Case) -> bool:
            self.counts["shrinking"] += 1
            _, other = judge(smaller, self.bench, self.oracles)
            self.bench.clear()
            if other is None or other.kind != verdict.kind:
                return False
            seen[smaller] = other
            return True

        smallest = shrink(case, still_fails, SHRINKING_SECONDS)
        finding = Counterexample(number, seen[smallest], smallest)
        self.findings.append(finding)
        heard(finding)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the search's own command line."""
    parser = argparse.ArgumentParser(description=__doc__, prog="make search")
    parser.add_argument("--minutes", type=float, default=5.0, help="how long to search")
    parser.add_argument("--seed", type=int, default=0, help="which cases to draw")
    parser.add_argument("--cases", type=int, help="end after so many cases")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument(
        "--device",
        choices=get_args(Device),
        default="cpu",
        help="what computes the runs; cuda has one worker, whose ranks share the GPUs",
    )
    parser.add_argument("--findings", type=Path, help="folder for a file of each finding")
    parser.add_argument("--case", type=Path, help="judge the case of such a file alone")
    parser.add_argument(
        "--table", type=Path, help="try each flag alone, and add lines to this file"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Search as a command line says; return 0, or 1 if something is wrong."""
    given = make_parser().parse_args(argv)
    if given.device == "cuda":
        check_gpus()
        given.workers = 1
        if given.table:
            raise BadInput("--table tries flags on the CPU: leave --device out.")
    quiet_libraries()
    with scratch_folder("mcore-qwen3vl-search-") as folder:
        if given.case:
            return _judge_again(given.case, Bench(folder))
        begun = time.monotonic()
        bench = Bench(folder)
        if given.table:
            return _try_flags(bench, folder, begun + 60 * given.minutes, given.table, given.workers)
        counts, judged, findings = _run_workers(
            bench, folder, begun + 60 * given.minutes, given.seed, given.cases, given.workers,
            given.findings, given.device,
        )  # fmt: skip
    seconds = time.monotonic() - begun
    cases = counts["ran"] + counts["refused"]
    print(
        f"{cases} cases in {seconds / 60:.1f} minutes ({60 * cases / seconds:.0f} a minute), "
        f"{counts['refused']} of them refused; {findings} findings, "
        f"{counts['found again']} cases found one again"
    )
    print(f"judged by {_judgements(judged)}")
    return CheckFailed.exit_code if findings else 0


def _judgements(judged: Mapping[str, int]) -> str:
    names = (oracle.__name__ for oracle in ORACLES)
    return ", ".join(f"{name} {judged.get(name, 0)}" for name in names)


def _try_flags(bench: Bench, folder: Path, until: float, file: Path, workers: int) -> int:
    """Add lines to the table of flags, in forks of this process; return 3 if flags remain."""

    def work(worker: int, put: Callable[[Any], None]) -> None:
        put(write_table(file, bench.moved_to(folder / str(worker)), until, worker, workers))

    left = list(_in_forks(work, workers))
    print(f"{file}: {sum(left)} flags remain" if any(left) else f"{file} has all flags")
    return Unfinished.exit_code if any(left) else 0


def _in_forks(work: Callable[[int, Callable[[Any], None]], None], workers: int) -> Iterator[Any]:
    """Call ``work(worker, put)`` in forks of this process; yield what they put, as it comes.

    Raises:
        Unfinished: a fork raised, which printed its traceback; what the others put has come before.
    """
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()

    def run(worker: int) -> None:
        whole = False
        try:
            work(worker, lambda result: results.put((result, None)))
            whole = True
        except Exception:
            traceback.print_exc()
        finally:
            results.put((None, whole))

    processes = [context.Process(target=run, args=(worker,)) for worker in range(workers)]
    for process in processes:
        process.start()
    ends: list[bool] = []
    while len(ends) < workers:
        told, whole = results.get()
        if whole is None:
            yield told
        else:
            ends.append(whole)
    for process in processes:
        process.join()
    if not all(ends):
        raise Unfinished("A process of the search has ended with the error above.")


def _judge_again(file: Path, bench: Bench) -> int:
    """Judge the case that a file of ``--findings`` holds."""
    lines = [line for line in file.read_text("utf-8").splitlines() if line.startswith("# case: ")]
    if not lines:
        raise BadInput(f"{file} has no line that begins with '# case: '.")
    _, verdict = judge(Case.of_json(lines[0].removeprefix("# case: ")), bench)
    print("nothing is wrong" if verdict is None else f"{verdict.oracle}: {verdict.text}")
    return 0 if verdict is None else CheckFailed.exit_code


def _run_workers(
    bench: Bench, folder: Path, until: float, seed: int, most: int | None, workers: int,
    kept: Path | None, device: Device,
) -> tuple[Counter[str], Counter[str], int]:  # fmt: skip
    """Search in forks of this process, which share the cases.

    It returns the counts, those of each oracle, and the number of findings.
    """

    def work(worker: int, put: Callable[[Any], None]) -> None:
        bench.moved_to(folder / str(worker))
        axes = AXES if device == "cpu" else (*AXES, on_gpus)
        search = Search(bench, seed, axes, first=worker, every=workers)
        try:
            search.run(until, most, heard=put)
        finally:
            put((search.counts, search.judged))

    counts: Counter[str] = Counter()
    judged: Counter[str] = Counter()
    findings: list[Counterexample] = []
    for told in _in_forks(work, workers):
        if not isinstance(told, Counterexample):
            counts += told[0]
            judged += told[1]
        elif not any(one.covers(told.case, told.verdict) for one in findings):
            findings.append(told)
            _show(told, kept, len(findings), seed)
    return counts, judged, len(findings)


def _show(finding: Counterexample, kept: Path | None, number: int, seed: int) -> None:
    print(f"\n# finding {number}, case {finding.number} of seed {seed}")
    print(finding.report(), flush=True)
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        file = kept / f"{seed}-{finding.number}.sh"
        file.write_text(f"{finding.report()}# case: {finding.case.to_json()}\n", "utf-8")
