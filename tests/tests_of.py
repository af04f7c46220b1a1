"""Which tests run a file: ``make tests-of FILE=mcore_qwen3vl/data/parts.py``.

``make test-contexts`` runs the suite with this module as a plugin. The plugin notes each file of
ours if a test calls a function of it: in pytest's process, in its forked ranks, and in commands
that it starts. The interpreter tells it (:mod:`sys.monitoring`), so that code of others costs
nothing after its first call. Work that tests share counts for the first one alone: what a fixture
of the session makes, and what a process does after the end of its test.

Without a record, the tests of a file are those with its name, and otherwise those that import it.
"""

from __future__ import annotations

import ast
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parents[1]
OURS = ("mcore_qwen3vl", "converters", "launch")
VARIABLE = "MCORE_QWEN3VL_TEST_CONTEXTS"
"""Names the record; processes that a test starts note what they run where it is set."""
RECORD = ROOT / "build" / "test-contexts.tsv"


class Recorder:
    """Appends a line for each test and file that it runs to `record`; forks go on with it."""

    def __init__(self, record: str, test: str | None = None) -> None:
        self.record = record
        self.test = test
        self._called: set[int] = set()  # code objects that live as long as the process
        self._noted: set[tuple[str | None, str]] = set()
        self._files: dict[str, str | None] = {}

    def install(self) -> None:
        tool, start = sys.monitoring.COVERAGE_ID, sys.monitoring.events.PY_START
        if sys.monitoring.get_tool(tool) is not None:  # pytest's worker began as a command
            sys.monitoring.free_tool_id(tool)
        sys.monitoring.use_tool_id(tool, "tests-of")
        sys.monitoring.register_callback(tool, start, self._on_start)
        sys.monitoring.set_events(tool, start)

    def begin(self, nodeid: str) -> None:
        self.test = nodeid.split("[")[0]
        self._called.clear()

    def _on_start(self, code: CodeType, offset: int) -> object:
        if id(code) in self._called:
            return None
        file = self._file(code.co_filename)
        # Bodies of modules and classes run for whichever test imports them first.
        if file is None or not code.co_flags & 1:  # CO_OPTIMIZED: a function
            return sys.monitoring.DISABLE
        self._called.add(id(code))
        if self.test is not None and (self.test, file) not in self._noted:
            self._noted.add((self.test, file))
            self._append(f"{self.test}\t{file}\n")
        return None

    def _file(self, name: str) -> str | None:
        """Return a file of ours as git has it, whose links are followed; else None."""
        if name not in self._files:
            path = Path(os.path.realpath(name))
            inside = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in OURS
            self._files[name] = path.relative_to(ROOT).as_posix() if inside else None
        return self._files[name]

    def _append(self, line: str) -> None:
        # Ranks write at once, and tests limit the size of files and the number of open ones.
        try:
            file = os.open(self.record, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        except OSError:
            return
        try:
            os.write(file, line.encode())
        except OSError:
            return
        finally:
            os.close(file)


recorder: Recorder | None = None


def record_in_this_process() -> None:
    """Note what this process runs, if a test started it; `follow/sitecustomize.py` calls this."""
    if record := os.environ.get(VARIABLE):
        test = os.environ.get("PYTEST_CURRENT_TEST", "").split("[")[0].split(" (")[0]
        Recorder(record, test or None).install()


def pytest_configure(config: pytest.Config) -> None:
    global recorder
    record = Path(os.environ.get(VARIABLE) or RECORD)
    if not hasattr(config, "workerinput"):  # the process that collects what workers do
        record.parent.mkdir(parents=True, exist_ok=True)
        record.unlink(missing_ok=True)
        followed = [str(Path(__file__).with_name("follow")), os.environ.get("PYTHONPATH")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, followed))
    os.environ[VARIABLE] = str(record)
    recorder = Recorder(str(record))
    recorder.install()


def pytest_runtest_logstart(nodeid: str) -> None:
    if recorder is not None:
        recorder.begin(nodeid)


def by_name(file: str) -> list[str]:
    """Return the tests of a file by the rule of CONTRIBUTING.md, as paths that exist."""
    source = Path(file.removeprefix("mcore_qwen3vl/"))
    folder, name = Path("tests") / source.parent, source.stem.strip("_")
    if source.stem == "__init__":
        return [str(folder)] if (ROOT / folder).is_dir() else []
    beside = {path.stem for path in (ROOT / file).parent.glob(f"{name}_*.py")}
    found = [folder / f"test_{name}.py"]
    found += [folder / name] * any((ROOT / folder / name).glob("test_*.py"))
    found += [
        folder / path.name
        for path in sorted((ROOT / folder).glob(f"test_{name}_*.py"))
        # test_step_time.py is of step_time.py, if there is one, and not of step.py.
        if not any(f"{path.stem}_".startswith(f"test_{other}_") for other in beside)
    ]
    return [str(path) for path in found if (ROOT / path).exists()]


def by_import(file: str) -> list[str]:
    """Return the tests that import a file; if none does, those that import what imports it."""
    importers: dict[str, set[str]] = defaultdict(set)
    for folder in (*OURS, "tests"):
        for path in (ROOT / folder).resolve().rglob("*.py"):
            importer = path.relative_to(ROOT).as_posix()
            for module in _imported_modules(path):
                importers[module].add(importer)
    seen, reached = {file}, {file}
    while reached:
        reached = {one for each in reached for one in importers[_module(each)]} - seen
        if tests := sorted(one for one in reached if Path(one).name.startswith("test_")):
            return tests
        seen |= reached
    return []


def _imported_modules(path: Path) -> Iterator[str]:
    """Yield each name that a file imports, anywhere in it: modules, and what it takes of them."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _module(file: str) -> str:
    """Return the name by which a file is imported: the package has a link to the converters."""
    if file.startswith("converters/"):
        file = f"mcore_qwen3vl/{file}"
    return ".".join(Path(file).with_suffix("").parts).removesuffix(".__init__")


def by_record(file: str, record: Path) -> list[str]:
    """Return the tests that ran a file: its own first, then those that run the fewest others."""
    tests_of: dict[str, set[str]] = defaultdict(set)
    files_of: Counter[str] = Counter()
    for line in set(record.read_text("utf-8").splitlines()):
        test, _, ran = line.partition("\t")
        tests_of[ran].add(test)
        files_of[test] += 1
    own = tuple(by_name(file))
    return sorted(tests_of[file], key=lambda test: (not test.startswith(own), files_of[test], test))


def main(words: list[str], record: Path = RECORD) -> int:
    if len(words) != 1 or not (ROOT / words[0]).is_file():
        print("name a file: make tests-of FILE=mcore_qwen3vl/data/parts.py", file=sys.stderr)
        return 2
    file = (ROOT / words[0]).resolve().relative_to(ROOT).as_posix()
    if record.exists():
        found = by_record(file, record)
        print(f"{len(found)} tests ran {file} when they were recorded:", file=sys.stderr)
    else:
        found, how = by_name(file), "by their names"
        if not found:
            found, how = by_import(file), "none by name; by what they import"
        print(f"nothing is recorded (make test-contexts); {how}:", file=sys.stderr)
    print(*found, sep="\n", end="\n" if found else "")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
