"""``make release``: builds sdist and wheel, checks them as CONTRIBUTING.md says, fills dist/."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
UV = os.environ.get("UV", "uv")  # uv tells its own path to what it runs
TEST = re.compile(r"(^|/)((tests?|benchmarks)/|test_[^/]*$|conftest\.py$)")

# What runs in each installation, in one folder; the smallest cannot write a model.
WHOLE = ("--version", "--help", "launch copy scripts", "tiny hf --moe", "inspect hf", "demo")
SMALL = ("convert hf-to-mcore hf mc", "convert mcore-to-hf mc back", "verify tensors hf back")


def run_command(*command: str | Path, cwd: Path) -> str:
    """Run a command without the checkout on Python's path, and return what it prints."""
    print("$", *command, flush=True)
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    ran = subprocess.run(command, cwd=cwd, env=variables, stdout=subprocess.PIPE, text=True)
    if ran.returncode:
        sys.exit(f"{ran.stdout}It ended with exit code {ran.returncode}.")
    return ran.stdout


def tracked_names(root: Path) -> list[str]:
    """Return the names of the files that git tracks, or would if they were added."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    return subprocess.check_output(listing, cwd=root, text=True).splitlines()


def package_files(root: Path) -> dict[str, bytes]:
    """Return what a wheel of a checkout must hold; symbolic links put two more folders in it."""
    return {
        name if name.startswith("mcore_qwen3vl/") else f"mcore_qwen3vl/{name}": file.read_bytes()
        for name in tracked_names(root)
        if name.startswith(("mcore_qwen3vl/", "converters/", "launch/"))
        and (file := root / name).is_file()
    }


def archived_files(archive: Path) -> dict[str, bytes]:
    """Return the files of a wheel, or of an sdist by their names in its one folder."""
    if archive.suffix == ".whl":
        wheel = zipfile.ZipFile(archive)
        return {name: wheel.read(name) for name in wheel.namelist()}
    with tarfile.open(archive) as sdist:
        streams = [(member.name, sdist.extractfile(member)) for member in sdist.getmembers()]
        return {name.partition("/")[2]: stream.read() for name, stream in streams if stream}


def flaws(archive: dict[str, bytes], package: dict[str, bytes]) -> list[str]:
    """Return what is wrong with the files of a wheel or an sdist."""
    common, surplus = package.keys() & archive.keys(), archive.keys() - package.keys()
    said = [f"lacks {name}" for name in package.keys() - archive.keys()]
    said += [f"has another {name}" for name in common if package[name] != archive[name]]
    said += [f"has the test {name}" for name in archive if TEST.search(name)]
    said += [f"has {n}, unknown to git" for n in surplus if "/" in n and "-info/" not in n]
    licences = [content for name, content in archive.items() if name.endswith("LICENSE")]
    if licences != [(ROOT / "LICENSE").read_bytes()]:
        said.append(f"has {len(licences)} files LICENSE and not the one of the checkout")
    return sorted(said)


def smallest_packages() -> list[str]:
    """Return what docs/installation.md installs besides torch to convert and nothing else."""
    page = (ROOT / "docs" / "installation.md").read_text()
    (line,) = re.findall(r"^pip install (numpy .*)$", page, re.MULTILINE)
    return line.split()


def install(environment: Path, *steps: list[str | Path]) -> Path:
    """Make an environment, install in it step by step, and return the package's command."""
    run_command(UV, "venv", "--python", sys.executable, environment, cwd=ROOT)
    for words in steps:
        run_command(UV, "pip", "install", "--no-config", "--python", environment, *words, cwd=ROOT)
    return environment / "bin" / "mcore-qwen3vl"


def build_and_check(work: Path, outside: Path) -> None:
    """Build into `work`/dist, and exit if anything is wrong."""
    run_command(
        UV, "build", "--quiet", "--out-dir", work / "dist", cwd=ROOT
    )  # the wheel from the sdist
    run_command(UV, "build", "--quiet", "--wheel", "--out-dir", work / "direct", cwd=ROOT)
    wheel, sdist = sorted((work / "dist").glob("mcore_*"))
    said = [f"the wheel {f}" for f in flaws(archived_files(wheel), package_files(ROOT))]
    said += [f"the sdist {f}" for f in flaws(archived_files(sdist), package_files(ROOT))]
    if archived_files(wheel) != archived_files(work / "direct" / wheel.name):
        said.append("the checkout builds another wheel than the sdist")
    if said:
        sys.exit("\n".join(said))
    run_command(UV, "tool", "run", "twine", "check", "--strict", sdist, wheel, cwd=work)
    whole = install(work / "whole", [f"{wheel}[data,logging,lora,plots]"])
    for line in WHOLE:
        run_command(whole, *line.split(), cwd=outside)
    small = install(work / "small", ["torch", *smallest_packages()], ["--no-deps", wheel])
    for line in SMALL:
        run_command(small, *line.split(), cwd=outside)


if __name__ == "__main__":
    (version,) = re.findall('= "(.+)"', (ROOT / "mcore_qwen3vl" / "__init__.py").read_text())
    if re.findall("\n## (.+)", (ROOT / "CHANGELOG.md").read_text())[0] != version:
        sys.exit(f"The first heading of CHANGELOG.md is not {version}, the package's version.")
    if run_command("git", "status", "--porcelain", cwd=ROOT):
        sys.exit("A release is built from a commit: commit or remove what git status shows.")
    work = ROOT / "build" / "release"
    shutil.rmtree(work, ignore_errors=True)
    try:
        with tempfile.TemporaryDirectory() as outside:
            build_and_check(work, Path(outside))
        shutil.rmtree(ROOT / "dist", ignore_errors=True)
        (work / "dist").rename(ROOT / "dist")
    finally:
        shutil.rmtree(work, ignore_errors=True)
