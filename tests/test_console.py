"""Libraries' notes are hidden, and foreign text cannot steer the terminal."""

from __future__ import annotations

import ast
import io
import logging
import os
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from mcore_qwen3vl import console
from mcore_qwen3vl.cli import data, main
from mcore_qwen3vl.console import byte_progress, plain, quiet_libraries, table, visible
from mcore_qwen3vl.data.inspection import DataReport, Flaw
from mcore_qwen3vl.files import package_modules
from mcore_qwen3vl.training.logs.summary import show_summary
from mcore_qwen3vl.verification import audit
from mcore_qwen3vl.verification.measurement import Finding
from mcore_qwen3vl.verification.report import Report, html, junit, render


def test_notes_of_libraries_are_not_shown_and_warnings_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", logging.WARNING)
    quiet_libraries()
    logging.basicConfig(level=logging.INFO)  # megatron.training does so when it is imported
    logging.getLogger("a.library").info("saved")
    logging.getLogger("a.library").warning("careful")
    assert capsys.readouterr() == ("", "warning: careful\n")


def test_text_of_others_does_not_steer_the_terminal() -> None:
    text = "a\x1b]0;title\x07\r\x9b2J[bold]\tb\nc\x85d\u2028e\u202ef\u2066g\u200fh é✓"
    assert plain(text) == (
        r"a\x1b]0;title\x07\r\x9b2J\[bold]\tb\nc\x85d\u2028e\u202ef\u2066g\u200fh é✓"
    )
    assert visible("a\tb\n\rc\u2029", lines=True) == "a\tb\n" + r"\rc\u2029"


def test_a_name_in_an_error_writes_no_line_of_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["inspect", "a\nok: all tensors are right\u2028b"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(r"error: a\nok: all tensors are right\u2028b ")


def test_a_name_writes_no_line_of_an_audit() -> None:
    names = ["model.layers.0.a\nb", "model.layers.1.a\nb", "c\nd"]
    wrong = audit.Audit("a", mistakes=dict.fromkeys(names, ("transposed", "is transposed")))
    assert [line.count("\n") for line in wrong.notes.values()] == [1]


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_a_closed_stream_changes_nothing(closed: str, tmp_path: Path) -> None:
    """As some cron jobs have them; a file that the command opens must not take the number."""
    program = (
        "import os, subprocess, sys\n"
        "from mcore_qwen3vl import console\n"
        "console.prepare_standard_streams()\n"
        "with open('done', 'w') as file:\n"
        "    console.say('a'); console.print_unused([]); console.messages.print('a')\n"
        "    console.emit_json(['a']); os.write(1, b'a'); os.write(2, b'a'); sys.stdin.read()\n"
        "    subprocess.run(['sh', '-c', 'echo a; echo a >&2; cat'], check=True)\n"
        "    file.write('b')\n"
        "sys.exit(7)\n"
    )
    shell = f'exec "$0" -c "$1" {closed}'
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    done = subprocess.run(
        ["sh", "-c", shell, sys.executable, program], cwd=tmp_path, **streams, check=False
    )
    assert (done.returncode, (tmp_path / "done").read_text()) == (7, "b"), done.stderr
    assert (b"a" in done.stdout) is (">&-" not in closed.split())
    assert (b"a" in done.stderr) is ("2>&-" not in closed.split())


HOSTILE = "[red]a[/red]\x1b[2J<script>"
"""A name that a file or a record may have; no terminal or browser may obey it."""


def print_hostile(shown: Any) -> None:
    file = io.StringIO()
    Console(file=file, width=300, force_terminal=True, highlight=False).print(shown)
    assert "\x1b[2J" not in file.getvalue()
    assert r"[red]a[/red]\x1b[2J<script>" in file.getvalue()


def test_titles_and_columns_of_tables() -> None:
    print_hostile(table(HOSTILE, "a" * 50))
    print_hostile(table("", f">{HOSTILE}", rows=[["1"]]))


@pytest.mark.parametrize("terminal", [True, False])
def test_titles_of_progress(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Console(file=io.StringIO(), width=300, force_terminal=terminal)
    monkeypatch.setattr(console, "messages", screen)
    monkeypatch.setattr(console, "_SELDOM", 0)
    with console.count_progress(f"{HOSTILE}[/]", 2, "records") as advance:
        advance(1)
    with console.progress(f"{HOSTILE}[/]") as say:
        say("a")
    assert screen.file.getvalue().count(r"[red]a[/red]\x1b[2J<script>[/]") >= 2


def test_data_check(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(console.output, "print", lambda one, **_: shown.append(one))
    bad = [Flaw(HOSTILE, HOSTILE)]
    data.show_report(DataReport(Path("a"), 1, peculiar={HOSTILE: [HOSTILE]}, bad=bad))
    assert len(shown) == 2
    for one in shown:
        print_hostile(one)


def test_verify() -> None:
    found = Finding(HOSTILE, HOSTILE, context=HOSTILE, flaw=HOSTILE)
    report = Report(HOSTILE, {HOSTILE: HOSTILE}, [found])
    print_hostile(render(report))
    assert "<script>" not in html(report)
    (case,) = ElementTree.fromstring(junit(report))  # XML has no way to write an escape
    assert r"[red]a[/red]\x1b[2J<script>" in case.attrib["name"]


@pytest.mark.parametrize("terminal", [True, False])
def test_the_summary_of_a_run(terminal: bool) -> None:
    file = io.StringIO()
    screen = Console(file=file, width=300, force_terminal=terminal, highlight=False)
    show_summary(screen, [("model", HOSTILE)])
    assert "\x1b[2J" not in file.getvalue()
    assert r"[red]a[/red]\x1b[2J<script>" in file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_slow_import_is_named_on_a_terminal(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The library loads until the line is there."""
    (tmp_path / "slow_library.py").write_text(
        "import sys; sys.said.wait(10 if sys.said.due else 0)"
    )
    monkeypatch.syspath_prepend(tmp_path)
    shown = Console(file=io.StringIO(), force_terminal=terminal)
    said: Any = threading.Event()
    said.due = terminal
    line: list[str] = []
    monkeypatch.setattr(sys, "said", said, raising=False)
    monkeypatch.setattr(shown, "print", lambda text, **_: (line.append(text), said.set()))
    monkeypatch.setattr(console, "messages", shown)
    monkeypatch.setattr(console, "_PATIENCE", 0.5)
    with console.name_slow_imports():
        import_module("slow_library")
    monkeypatch.delitem(sys.modules, "slow_library")
    assert line == ["loading slow_library and what belongs to it ..."] * terminal


def test_names_of_tensors_in_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    screen = Console(file=file, width=300, force_terminal=True)
    monkeypatch.setattr("mcore_qwen3vl.console.messages", screen)
    with byte_progress("comparing") as report:
        report(1, 2, f"{HOSTILE}[/]")  # wrong markup would be an error
    assert r"[red]a[/red]\x1b[2J<script>[/]" in file.getvalue()


@pytest.mark.parametrize(
    "surroundings",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
)
def test_other_encodings(surroundings: dict[str, str], tmp_path: Path) -> None:
    program = (
        "from pathlib import Path\n"
        "from mcore_qwen3vl import console\n"
        "console.prepare_standard_streams()\n"
        "Path('a').write_text('\\u00e9\\u2713')\n"  # as a library, without an encoding
        "console.output.print('\\u00e9\\u2713')\n"
    )
    clean = {name: text for name, text in os.environ.items() if name not in ("LC_ALL", "LANG")}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=tmp_path, env={**clean, **surroundings}, capture_output=True, check=False
    )
    assert done.stderr.decode() == ""
    assert done.stdout == rb"\xe9\u2713" + b"\n"
    assert (tmp_path / "a").read_bytes() == "é✓".encode()


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("flags", [(), ("-u",)], ids=["buffered", "unbuffered"])
def test_a_reader_that_leaves_does_not_change_the_end(
    flags: tuple[str, ...], stream: str, tmp_path: Path
) -> None:
    """As in ``verify ... | head`` under ``set -o pipefail``; what is left to do is done."""
    program = (
        "import sys\n"
        "from mcore_qwen3vl import console\n"
        "console.prepare_standard_streams()\n"
        "for _ in range(3):\n"
        "    print('a' * 100_000, file=sys.stderr)\n"
        "    print('a' * 100_000)\n"
        "    console.messages.print('a')\n"
        "    console.output.print('a')\n"
        "console.emit_json(['a'])\n"
        "open('done', 'x')\n"
        "sys.exit(7)\n"
    )
    reading, writing = os.pipe()
    os.close(reading)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: writing}
    done = subprocess.run(
        [sys.executable, *flags, "-c", program], cwd=tmp_path, **streams, check=False
    )
    os.close(writing)
    assert done.returncode == 7
    assert (tmp_path / "done").exists()
    assert b"Broken" not in (done.stdout or b"") + (done.stderr or b"")


def test_a_word_of_the_command_line_is_utf8_in_any_locale() -> None:
    program = (
        "import sys; from mcore_qwen3vl.console import as_utf8; print(ascii(as_utf8(sys.argv[1])))"
    )
    clean = {name: text for name, text in os.environ.items() if name not in ("LC_ALL", "LANG")}
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for surroundings in ({}, plain):
        printed = subprocess.check_output(
            [sys.executable, "-c", program, "é✓"], env={**clean, **surroundings}
        )
        assert printed.decode().strip() == ascii("é✓")


def test_every_text_file_has_an_encoding() -> None:
    """Without one, Python would use the locale's, which may not be UTF-8."""
    lacking = []
    for file in package_modules().values():
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and not _has_encoding(call):
                lacking.append(f"{file}:{call.lineno}")
    assert lacking == []


def _has_encoding(call: ast.Call) -> bool:
    """Return whether a call names an encoding or needs none."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    given = {keyword.arg for keyword in call.keywords}
    modes = [a.value for a in call.args if isinstance(a, ast.Constant)]
    if name in ("read_text", "write_text"):
        return "encoding" in given or bool({"utf-8", "ascii"} & set(modes))
    if name == "open" and len(call.args) == 1 and modes in (["r"], ["w"], ["a"]):
        return "encoding" in given
    return not any(one.arg == "text" and ast.unparse(one.value) == "True" for one in call.keywords)
