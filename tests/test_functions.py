"""A user's function is found by the rule that the documentation has, and no file is by accident."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mcore_qwen3vl.data.config import parse_sources
from mcore_qwen3vl.data.records.hooks import find_hook
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.functions import find_function
from mcore_qwen3vl.losses.tokens import find_loss

FINDERS = (find_function, find_hook, find_loss)


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file in the current folder, which is no place of modules."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "to_be_found_by_its_path.py"
    file.write_text("def double(value, weights=None):\n    return 2 * value\nnumber = 1\n")
    find_function.cache_clear()
    find_hook.cache_clear()
    return file


@pytest.mark.parametrize("find", FINDERS)
def test_a_file_by_its_path(find: object, own_file: Path) -> None:
    for name in (own_file.name, f"./{own_file.name}", str(own_file)):
        assert find(f"{name}:double")(4) == 8  # type: ignore[operator]


@pytest.mark.parametrize(
    ("find", "called", "wrong"),
    [
        (find_loss, "losses, weights", "losses"),
        (find_loss, "losses, weights", "losses, weights, power"),
        (find_loss, "losses, weights", "losses, weights, *, power"),
        (find_hook, "record", ""),
        (find_hook, "record", "record, folder"),
    ],
)
def test_a_function_of_other_arguments_is_refused(
    find: object, called: str, wrong: str, own_file: Path
) -> None:
    own_file.write_text(f"def own({wrong}):\n    return 1\n")
    with pytest.raises(BadInput, match=rf"own is called as f\({called}\), and it is defined as"):
        find(f"{own_file}:own")  # type: ignore[operator]


@pytest.mark.parametrize("find", FINDERS)
def test_a_function_of_a_class(find: object, own_file: Path) -> None:
    """As an entry point may name it."""
    own_file.write_text(
        "class Own:\n    def double(value, weights=None):\n        return 2 * value\n"
    )
    assert find(f"{own_file}:Own.double")(4) == 8  # type: ignore[operator]


@pytest.mark.parametrize("find", FINDERS)
def test_no_module_is_found_in_the_current_folder(
    find: object, own_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has two remedies, and both work."""
    said = rf"{own_file.name} lies in the current folder.* name it {own_file.name}:double, or set P"
    with pytest.raises(BadInput, match=said):
        find(f"{own_file.stem}:double")  # type: ignore[operator]
    assert find(f"{own_file.name}:double")(4) == 8  # type: ignore[operator]
    monkeypatch.syspath_prepend(own_file.parent)  # as PYTHONPATH=. does
    assert find(f"{own_file.stem}:double")(3) == 6  # type: ignore[operator]
    del sys.modules[own_file.stem]


def test_a_mixture_names_a_file_relative_to_itself(
    own_file: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture = own_file.parent / "mixture.yaml"
    hook = f"{own_file.name}:double"
    mixture.write_text(
        f"datasets:\n  - {{path: a.jsonl, preprocess: {hook}}}\n"
        "  - {path: b.jsonl, preprocess: 'installed:function'}\n  - {path: c.jsonl}\n"
    )
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    by_file, by_module, without = (
        source.reading.preprocess for source in parse_sources([str(mixture)])
    )
    assert by_file == str(own_file) + ":double"
    assert find_hook(by_file)(4) == 8
    assert by_module == "installed:function"
    assert without is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("def other(): pass", "AttributeError: .*no attribute 'f'"),
        ("def f(:", "SyntaxError"),
        ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
        ("import neighbour\ndef f(): pass", "No module named 'neighbour'"),
        ("f = 1", "is of type int, and no function"),
    ],
)
def test_what_cannot_be_imported_is_named(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(content)
    (tmp_path / "neighbour.py").write_text("")
    name = f"{tmp_path}/bad.py:f"
    for find, flag in ((find_loss, "--loss"), (find_hook, "--preprocess")):
        with pytest.raises(BadInput, match=f"^{flag} {name} .*{said}"):
            find(name)


@pytest.mark.parametrize("name", ["no/such.py:f", "no.such:f", ":f", "math:", "a:b:c"])
def test_what_is_not_there_is_named(name: str) -> None:
    with pytest.raises(BadInput, match=rf"{name} cannot be imported: .*Name it module:function"):
        find_function(name)
