"""Imports go one way: a package imports only what is listed before it, and there is no cycle.

Imports inside functions and under ``TYPE_CHECKING`` count, because they tie packages together.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path

import pytest

import mcore_qwen3vl
from mcore_qwen3vl.files import package_modules

ROOT = Path(__file__).parents[1]

ORDER = (
    "safe_path",
    "errors",
    "time_limit",
    "unused.fields",
    "flags",
    "part",
    "lazy",
    "hf_kernels",
    "memory_labels",
    "files",
    "json_and_yaml",
    "writer_lock",
    "html_pages",
    "certificate_file",
    "functions",
    "console",
    "machine",
    "config",
    "labels",
    "layout",
    "megatron_config",
    "launch.catalogue",
    "published_configs",
    "tiny",
    "converters.storage",
    "converters.mapping",
    "converters.identify",
    "converters.hf",
    "converters.megatron_checkpoint",
    "converters.other_keys",
    "converters.formats",
    "converters.torch_pickle",
    "converters.torch_dist",
    "converters.offline",
    "converters.adapters",
    "converters.legacy",
    "converters.convert",
    "converters.live",
    "converters.export",
    "converters.describe",
    "converters.cost",
    "runtime",
    "kernels",
    "model",
    "data.records",
    "data.task_inputs",
    "data.sidecar",
    "data.record_form",
    "data.config",
    "data.processor",
    "data.readers",
    "data.indexes",
    "data.places",
    "data.unread",
    "data.datasets",
    "data.content",
    "data.order",
    "data.scores",
    "data.sizes",
    "data.encoding",
    "data",
    "model_card",
    "unused.folder",
    "settings",
    "forward",
    "losses",
    "inference",
    "generation",
    "training",
    "verl",
    "scoring",
    "simulated_gpu",
    "rehearsal",
    "verification.measurement",
    "verification.report",
    "verification.figures",
    "verification.checkpoints",
    "verification.audit",
    "verification.parity",
    "verification.trace",
    "verification.curves",
    "verification.runs",
    "verification.rollout",
    "verification.certificate",
    "verification.search",
    "api",
    "demos",
    "launch",
    "cli",
    "__main__",
)
"""Packages from the lowest up. Each may import itself and those before it."""

ALONE = "simulated_gpu"
"""The package that is fit to be installed alone: it imports itself relatively, and no other."""


def sources() -> dict[str, Path]:
    """Return every module of the package, by its name without ``mcore_qwen3vl.``."""
    return {
        path.removesuffix(".py").replace("/", ".").removesuffix("__init__").rstrip("."): file
        for path, file in package_modules().items()
    }


def package_of(module: str) -> str | None:
    """Return the entry of `ORDER` for `module`: itself, or a package around it."""
    return next((p for p in ORDER if module == p or module.startswith(f"{p}.")), None)


def imported(module: str, source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each import of this project in the source of `module`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 1 and package_of(module) == ALONE:
            around = ".".join(filter(None, ("mcore_qwen3vl", ALONE, node.module)))
            names = [f"{around}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            raise AssertionError(f"line {node.lineno}: a relative import")
        else:
            continue
        for name in names:
            if name.startswith("mcore_qwen3vl."):
                yield node.lineno, name.removeprefix("mcore_qwen3vl.")


def upward(modules: Mapping[str, str]) -> list[str]:
    """Return the imports of something that comes after the module's own package in `ORDER`."""
    wrong = []
    for module, source in modules.items():
        own = package_of(module)
        for line, name in imported(module, source):
            other = package_of(name)
            if own is not None and other is not None and ORDER.index(other) > ORDER.index(own):
                wrong.append(f"{module}:{line} imports {name}")
    return wrong


def cycles(modules: Mapping[str, str]) -> list[list[str]]:
    """Return groups of modules that import each other in a circle, the longest first."""
    edges = {
        module: {found for _, name in imported(module, source) if (found := _module(name, modules))}
        for module, source in modules.items()
    }
    reach: dict[str, set[str]] = {}
    for start in edges:
        seen: set[str] = set()
        todo = list(edges[start] - {start})
        while todo:
            if (at := todo.pop()) not in seen:
                seen.add(at)
                todo += edges[at] - {at}
        reach[start] = seen
    rings = {frozenset(b for b in reach[a] if a in reach[b]) for a in reach if a in reach[a]}
    return sorted((sorted(ring) for ring in rings), key=len, reverse=True)


def _module(name: str, modules: Mapping[str, str]) -> str | None:
    """Return the module that ``from a import b`` reads: ``a.b`` if that is one, otherwise ``a``."""
    if name in modules:
        return name
    parent = name.rpartition(".")[0]
    return parent if parent in modules else None


def borrowed(source: str) -> set[str]:
    """Return the names that a module imports from others, without those of its ``__all__``."""
    tree = ast.parse(source)
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    names = {alias.asname or alias.name for node in imports for alias in node.names}
    lists = (node for node in tree.body if isinstance(node, ast.Assign))
    offered = (node.value for node in lists if ast.unparse(node.targets[0]) == "__all__")
    return names.difference(*map(ast.literal_eval, offered))


def taken_on_the_way(modules: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    """Return the imports of a name from one of `modules` that itself has borrowed it."""
    names = {module: borrowed(source) for module, source in modules.items()}
    return [
        f"{module}:{line} imports {name}"
        for module, source in [*modules.items(), *others.items()]
        for line, name in imported(module, source)
        if name not in modules and name.rpartition(".")[2] in names[name.rpartition(".")[0]]
    ]


@pytest.fixture(scope="module")
def modules() -> dict[str, str]:
    return {name: file.read_text(encoding="utf-8") for name, file in sources().items()}


def test_every_module_has_its_place(modules: dict[str, str]) -> None:
    placeless = {
        "",
        "converters",
        "unused",
        "verification",
    }  # outer packages, which hold docstrings only
    assert [m for m in modules if package_of(m) is None and m not in placeless] == []


def test_the_folders_beside_the_package_are_in_it(modules: dict[str, str]) -> None:
    """Each is a relative link, and no module is imported by the name of its folder."""
    for folder in ("converters", "launch"):
        link = ROOT / "mcore_qwen3vl" / folder
        assert link.readlink() == Path("..", folder)
        assert folder in modules
    bare = re.compile(r"^\s*(?:from|import) (?:converters|launch)\b", re.MULTILINE)
    beside = (file for name in ("tests", "benchmarks") for file in (ROOT / name).rglob("*.py"))
    files = [*sources().values(), *beside]
    assert [f for f in files if bare.search(f.read_text(encoding="utf-8"))] == []


def test_imports_go_one_way(modules: dict[str, str]) -> None:
    assert upward(modules) == []


def test_a_package_is_one_layer() -> None:
    """No other stands between two of its parts, but where a small part serves lower layers."""
    layers = [top for top, _ in groupby(entry.partition(".")[0] for entry in ORDER)]
    assert {top for top in layers if layers.count(top) > 1} == {"launch", "unused"}


def picture() -> tuple[list[list[str]], list[str]]:
    """Return the layers that docs/design.md draws, lowest first, and the parts of converters."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    drawing = re.search(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert drawing is not None
    names = [line[:52].split() for line in drawing[1].splitlines()]
    parts = re.search(r"checkpoints, downwards: (.*?)\n \S", drawing[1], re.DOTALL)
    assert parts is not None
    return [layer for layer in names if layer][::-1], re.findall(r"\w+", parts[1])[::-1]


def test_the_picture_of_the_design_page_has_this_order() -> None:
    (alone, *layers), converters = picture()
    height = {name: at for at, layer in enumerate(layers) for name in layer}
    drawn = [entry for entry in ORDER if entry != ALONE]
    names = [entry if entry in height else entry.partition(".")[0] for entry in drawn]
    assert alone == [ALONE]
    assert set(names) == height.keys()
    heights = [height[name] for name in names]
    wrong = [a for a, h, above in zip(drawn, heights, heights[1:], strict=False) if h > above]
    assert wrong == []
    assert [e.partition(".")[2] for e in ORDER if e.startswith("converters.")] == converters


def test_the_simulated_gpu_imports_nothing_else_of_ours(modules: dict[str, str]) -> None:
    """It does not even know the name of the package around it."""
    own = {name: source for name, source in modules.items() if package_of(name) == ALONE}
    names = {found for name, source in own.items() for _, found in imported(name, source)}
    assert {name for name in names if package_of(name) != ALONE} == set()
    assert [name for name, source in own.items() if "mcore_qwen3vl" in source] == []


def test_no_module_imports_itself_in_a_circle(modules: dict[str, str]) -> None:
    assert cycles(modules) == []


def test_no_module_imports_the_functions_of_the_package_itself(modules: dict[str, str]) -> None:
    """They are for other programs: here a name is imported from its home."""
    pairs = ((m, name) for m, source in modules.items() for _, name in imported(m, source))
    assert [pair for pair in pairs if pair[1] in mcore_qwen3vl.__all__] == []


def test_a_name_is_imported_from_its_home(modules: dict[str, str]) -> None:
    """Or from a module that offers it by ``__all__``, but from none that merely imports it."""
    beside = (file for name in ("tests", "benchmarks") for file in (ROOT / name).rglob("*.py"))
    others = {str(f.relative_to(ROOT)): f.read_text(encoding="utf-8") for f in beside}
    assert taken_on_the_way(modules, others) == []
    line = "from mcore_qwen3vl.data.encoding.balanced import Size, pack_samples"
    assert taken_on_the_way(modules, {"it": line}) == ["it:1 imports data.encoding.balanced.Size"]


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("model.decoder.attention", "from mcore_qwen3vl.training.run import main"),
        ("converters.storage.boxes", "from mcore_qwen3vl.converters.mapping import table"),
        ("training.run", "import mcore_qwen3vl.verification.parity.matrix"),
        ("data.readers", "from mcore_qwen3vl.data.encoding.batch import Batch"),
        ("data.encoding.batch", "def f():\n    from mcore_qwen3vl.cli import app"),
        ("runtime.launch", "def f():\n    from mcore_qwen3vl.simulated_gpu import is_preloaded"),
        ("config", "if TYPE_CHECKING:\n    from mcore_qwen3vl.layout import Layout"),
        ("losses.loss", "from mcore_qwen3vl.training.forward_step import ForwardStep"),
        ("settings.run", "if TYPE_CHECKING:\n    from mcore_qwen3vl.losses.loss import Loss"),
    ],
)
def test_a_planted_import_is_found(modules: dict[str, str], module: str, line: str) -> None:
    planted = {module: f"{modules[module]}\n{line}\n"}
    (found,) = upward(planted)
    assert found.startswith(f"{module}:")


def test_a_planted_circle_is_found(modules: dict[str, str]) -> None:
    line = "from mcore_qwen3vl.model.decoder.attention import Attention"
    planted = {**modules, "model.inputs": f"{modules['model.inputs']}\ndef f():\n    {line}\n"}
    assert any({"model.inputs", "model.decoder.attention"} <= set(ring) for ring in cycles(planted))


def test_training_imports_neither_the_videos_decoder_nor_transformer_engine(tmp_path: Path) -> None:
    """A machine without PyAV's libraries can train on images. In a GPU container on a login node,
    where the first commands are tried, Transformer Engine finds no driver; its kernels need a GPU.
    """
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('it found no driver')\n")
    program = (
        "import sys; sys.modules['av'] = None\n"
        "from mcore_qwen3vl.runtime import cpu; cpu.install()\n"
        "assert 'torch._dynamo' not in sys.modules, 'it loads the compiler, which takes seconds'\n"
        "import mcore_qwen3vl.data.inspection, mcore_qwen3vl.data.loader\n"
        "import mcore_qwen3vl.generation.generate\n"
        "import megatron.core.optimizer, megatron.core.transformer.moe.moe_utils\n"
        "from megatron.core.extensions.transformer_engine import HAVE_TE; print(HAVE_TE)"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "False\n", done.stderr
