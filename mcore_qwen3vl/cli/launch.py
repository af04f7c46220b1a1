"""``mcore-qwen3vl launch``: training scripts and configurations, installed with the package."""

from __future__ import annotations

import shutil
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from mcore_qwen3vl import console
from mcore_qwen3vl.cli.options import Json
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import new_folder

app = typer.Typer(help="Scripts that start training on a cluster.", no_args_is_help=True)


def scripts() -> dict[str, Path]:
    """Return the scripts for users and the configurations for VERL and clusters, by name."""
    kinds = ("sft_*.sh", "pretrain_*.sh", "lora_*.sh", "dpo_*.sh", "*.yaml")
    files = (script for kind in kinds for script in sorted(_folder().glob(kind)))
    return {script.stem: script for script in files}


@app.command("list")
def list_scripts(json: Json = False) -> None:
    """Name every script, and what it is for."""
    entries = [{"name": n, "file": s.name, "what": _title(s)} for n, s in scripts().items()]
    rows = [(entry["name"], console.plain(entry["what"])) for entry in entries]
    console.present(
        json, entries, console.output.print, console.table("", "name", "what", rows=rows)
    )
    if not json:
        console.say("launch show NAME prints one; launch copy DIR writes all of them to DIR.")


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(help="A script's name, as `launch list` prints it.")],
) -> None:
    """Print a script."""
    script = scripts().get(name.removesuffix(".sh").removesuffix(".yaml"))
    if script is None:
        raise BadInput(f"There is no script {name}. The scripts are {', '.join(scripts())}.")
    print(script.read_text(encoding="utf-8"), end="")


@app.command("copy")
def copy(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to make.")],
    json: Json = False,
) -> None:
    """Write all scripts to a directory, to be changed and run there."""
    with new_folder(path) as partial:
        for file in sorted(_folder().iterdir()):
            if file.suffix in (".sh", ".yaml") or file.name == "train.py":
                shutil.copy(file, partial)
    said = (
        f"{len(scripts())} scripts in {path}; bash {path / 'sft_2b.sh'} --dry-run prints a command"
    )
    console.present(json, {"out": path, "scripts": list(scripts())}, console.say, said)


def _folder() -> Path:
    folder = files("mcore_qwen3vl.launch")
    assert isinstance(folder, Path)  # not a zip archive
    return folder


def _title(script: Path) -> str:
    lines = script.read_text(encoding="utf-8").splitlines()
    return next(x for x in lines if x.startswith("# ")).removeprefix("# ")
