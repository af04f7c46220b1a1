"""Every launch script's final command passes Megatron's own validation at its stated size."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.published_configs import PUBLISHED

LAUNCH = Path(__file__).parents[2] / "launch"
TASKS = ("sft", "pretrain", "lora")
OTHERS = ("dpo_8b", "sft_qwen3.8_2.4t_a95b")
SCRIPTS = [script for task in TASKS for script in sorted(LAUNCH.glob(f"{task}_*.sh"))]
SCRIPTS += [LAUNCH / f"{name}.sh" for name in OTHERS]


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer Megatron's questions about device and Transformer Engine like an H100 node."""
    from megatron.core.transformer.moe import moe_utils

    for fused in [name for name in vars(moe_utils) if name.startswith("fused_")]:
        monkeypatch.setattr(moe_utils, fused, object())
    for module in ("training.arguments", "core.transformer.transformer_config"):
        monkeypatch.setattr(f"megatron.{module}.is_te_min_version", lambda *_, **__: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr("megatron.training.arguments.get_device_arch_version", lambda: 9)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def final_command(script: Path, *arguments: str, **environment: str) -> list[str]:
    """Return the words of the command that the script would run."""
    command = ["bash", str(script), *arguments, "--dry-run"]
    clean = {"PATH": "/usr/bin:/bin", **environment}
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=clean)
    return shlex.split(shown.stdout)


def parsed(script: Path, tmp_path: Path, *arguments: str, **env: str) -> Any:
    """Return the script's `Parsed` flags, validated by Megatron for the ranks that it starts."""
    from mcore_qwen3vl.training.arguments.parser import validate

    words = final_command(
        script, "--hf-model", str(config_of(script)), "--data-path", "train.jsonl",
        "--save", str(tmp_path), "--load-hf", str(tmp_path), *arguments, **env,
    )  # fmt: skip
    nodes, gpus = (int(words[words.index(w) + 1]) for w in ("--nnodes", "--nproc-per-node"))
    entry = next(i for i, word in enumerate(words) if word.endswith("/train.py"))
    return validate(words[entry + 1 :], nodes * gpus)


def config_of(script: Path) -> Path:
    return PUBLISHED / f"{script.stem.split('_', 1)[1]}.json"


def test_there_is_a_script_for_every_size_and_task() -> None:
    others = {"qwen3.5_0.8b", "qwen3.8_2.4t_a95b"}
    sizes = {config.stem for config in PUBLISHED.glob("*.json")} - others
    assert len(sizes) == 9
    every = {f"{task}_{size}" for task in TASKS for size in sizes}
    assert {script.stem for script in LAUNCH.glob("*_*.sh")} == every | {*OTHERS}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_megatron_accepts_the_flags_which_describe_the_model(script: Path, tmp_path: Path) -> None:
    from mcore_qwen3vl.model.transformer_config import transformer_config
    from mcore_qwen3vl.training.data_provider import data_config
    from mcore_qwen3vl.training.model import fields_from_flags

    run = parsed(script, tmp_path)
    args = run.args
    architecture = Architecture.from_hf(config_of(script))
    assert args.global_batch_size % (args.micro_batch_size * args.data_parallel_size) == 0
    assert args.padded_vocab_size == architecture.vocab_size
    assert data_config(run.settings).packing
    config = transformer_config(architecture, spec="te", **fields_from_flags(args))
    assert config.num_layers == architecture.num_hidden_layers
    assert config.num_moe_experts == (architecture.num_experts or None)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_stated_nodes_agree(script: Path) -> None:
    text = script.read_text()
    slurm = re.search(r"--nodes=(\d+)", text)
    own = re.search(r"^NODES=\$\{NODES:-\$\{SLURM_NNODES:-(\d+)\}\}$", text, re.MULTILINE)
    assert slurm is not None
    assert own is not None
    assert slurm[1] == own[1]


def test_optional_flags_are_accepted(tmp_path: Path) -> None:
    from mcore_qwen3vl.model.transformer_config import transformer_config
    from mcore_qwen3vl.training.model import fields_from_flags

    args = parsed(LAUNCH / "sft_30b_a3b.sh", tmp_path, FP8="1", TP_OVERLAP="1", DEEPEP="1").args
    assert args.fp8 == "e4m3"
    assert args.moe_router_padding_for_quantization
    assert args.tp_comm_overlap
    assert args.moe_token_dispatcher_type == "flex"
    assert args.moe_flex_dispatcher_backend == "deepep"
    architecture = Architecture.from_hf(config_of(LAUNCH / "sft_30b_a3b.sh"))
    assert transformer_config(architecture, spec="te", **fields_from_flags(args)).fp8 == "e4m3"


HIDING = ("sft_30b_a3b", "pretrain_30b_a3b", "pretrain_235b_a22b")


@pytest.mark.parametrize("name", HIDING)
def test_layouts_that_hide_the_exchange_of_experts(name: str, tmp_path: Path) -> None:
    """Megatron and our checks accept them, and all layers are on some stage."""
    from mcore_qwen3vl.model.transformer_config import transformer_config
    from mcore_qwen3vl.training.model import fields_from_flags

    args = parsed(LAUNCH / f"{name}.sh", tmp_path, EP_OVERLAP="1").args
    assert args.overlap_moe_expert_parallel_comm
    assert args.recompute_granularity is None
    assert args.global_batch_size % (args.micro_batch_size * args.data_parallel_size) == 0
    architecture = Architecture.from_hf(config_of(LAUNCH / f"{name}.sh"))
    fields = fields_from_flags(args)
    assert transformer_config(architecture, spec="te", **fields).num_layers == args.num_layers


@pytest.mark.parametrize("name", ["lora_30b_a3b", "sft_235b_a22b", "sft_8b"])
def test_a_script_without_such_a_layout_says_so(name: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        final_command(LAUNCH / f"{name}.sh", EP_OVERLAP="1", CHECK_RANKS="0")
    assert refused.value.returncode == 2
    assert all(other in refused.value.stderr for other in HIDING)


def test_the_users_flags_win_but_not_over_the_architecture(tmp_path: Path) -> None:
    script = LAUNCH / "sft_2b.sh"
    assert parsed(script, tmp_path, "--lr", "3e-6").args.lr == 3e-6
    with pytest.raises(BadInput, match=r"--hidden-size sets hidden_size to 4096.*says 2048"):
        parsed(script, tmp_path, "--hidden-size", "4096")


SBATCH = r"""#!/bin/bash
# As Slurm does: a copy of the script runs elsewhere, with the job's variables.
spool=$(mktemp -d)
cp "$1" "$spool/slurm_script"
export SLURM_JOB_ID=7 SLURM_JOB_NODELIST="n[1-2]" SLURM_SUBMIT_DIR=$PWD
export SLURM_NNODES=${SLURM_NNODES:-2} SLURM_GPUS_ON_NODE=${SLURM_GPUS_ON_NODE:-8}
export COMMAND="$(realpath "$1") ${*:2}"
exec bash "$spool/slurm_script" "${@:2}"
"""
SCONTROL = r"""#!/bin/sh
case "$*" in
    "show hostnames n[1-2]") printf 'n1\nn2\n' ;;
    "show job 7") printf 'JobId=7 JobName=x\n   Command=%s\n   WorkDir=/w\n' "$COMMAND" ;;
    *) exit 1 ;;
esac
"""


@pytest.fixture
def sbatch(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function to submit a script to a simulated Slurm, which runs it at once.

    It runs from another folder than the script's.
    """
    for name, text in (("sbatch", SBATCH), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def submit(script: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [tmp_path / "sbatch", script, *flags, "--dry-run"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={"PATH": f"{tmp_path}:/usr/bin:/bin", **environment},
            check=False,
        )

    return submit


def test_a_dry_run_refuses_wrong_flags_and_notes_what_is_missing_here(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    command = ["bash", str(LAUNCH / "sft_8b.sh"), "--hf-model", str(PUBLISHED / "8b.json")]

    def dry(*flags: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *flags, "--dry-run"],
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": path, "NODES": "2", "HOME": str(tmp_path)},
        )

    done = dry("--train-itres", "3")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--train-itres. Did you mean --train-iters?" in done.stderr
    assert "invalid int value: 'many'" in dry("--train-iters", "many").stderr
    done = dry("--data-path", "gone.jsonl")
    assert done.returncode == 0
    assert "note: this would be refused here: The data set gone.jsonl does not" in done.stderr
    words = shlex.split(done.stdout)
    assert words[words.index("--node-rank") + 1] == "NODE_RANK"
    assert words[words.index("--master-addr") + 1] == "MASTER_ADDR"


def test_a_flag_that_is_overridden_is_not_in_the_command() -> None:
    appended = ("--lr=3e-6", "--freeze", "vision", "a b", "--num-workers", "1", "--lr", "4e-6")
    words = final_command(LAUNCH / "sft_8b.sh", *appended)
    flags = [word for word in words if word.startswith("--")]
    assert len(flags) == len(set(flags))
    assert words[-7:] == ["--freeze", "vision", "a b", "--num-workers", "1", "--lr", "4e-6"]


def test_a_warm_up_in_steps_overrides_the_scripts_part_of_all_steps(tmp_path: Path) -> None:
    words = final_command(LAUNCH / "sft_8b.sh", "--lr-warmup-iters", "5")
    assert [word for word in words if "warmup" in word] == ["--lr-warmup-iters"]
    args = parsed(LAUNCH / "sft_8b.sh", tmp_path, "--lr-warmup-iters=5").args
    assert (args.lr_warmup_iters, args.lr_warmup_fraction) == (5, None)


@pytest.mark.parametrize("name", ["sft_30b_a3b", "pretrain_2b", "lora_235b_a22b"])
def test_sbatch_starts_one_torchrun_a_node(
    name: str, sbatch: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = sbatch(LAUNCH / f"{name}.sh", "--data-path", "/data/a/train.jsonl")
    assert (done.returncode, done.stderr) == (0, "")
    words = shlex.split(done.stdout)
    assert words[:2] == ["srun", "--ntasks-per-node=1"]
    assert words[words.index("--nnodes") + 1] == "2"
    assert words[words.index("--rdzv-endpoint") + 1] == "n1:29500"
    assert str(LAUNCH / "train.py") in words
    assert words[words.index("--data-path") + 1] == "/data/a/train.jsonl"


def test_sbatch_of_scripts_that_were_copied_and_changed(
    tmp_path: Path, sbatch: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """Their own common.sh is used, not the one in a folder launch/ where they are submitted."""
    for folder in ("launch", "mine"):
        shutil.copytree(LAUNCH, tmp_path / folder)
    common = tmp_path / "mine" / "common.sh"
    common.write_text(common.read_text().replace("--clip-grad 1.0", "--clip-grad 0.25"))
    done = sbatch(Path("mine/sft_30b_a3b.sh"))
    assert "--clip-grad 0.25" in done.stdout
    assert str(tmp_path / "mine" / "train.py") in done.stdout


def test_the_slurm_job_says_how_many_nodes_and_gpus(
    sbatch: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = sbatch(LAUNCH / "sft_8b.sh", SLURM_NNODES="4", SLURM_GPUS_ON_NODE="4")
    words = shlex.split(done.stdout)
    assert [words[words.index(w) + 1] for w in ("--nnodes", "--nproc-per-node")] == ["4", "4"]
    done = sbatch(LAUNCH / "sft_8b.sh", SLURM_NNODES="4", NODES="2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("error: NODES is 2 and the Slurm job has 4 nodes: leave NODES out.\n")


@pytest.mark.parametrize("asked", ["4", "h100:4"])
def test_a_job_with_a_part_of_a_nodes_gpus_starts_as_many_ranks(
    asked: str, sbatch: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """With --exclusive, Slurm says that all 8 are on the node, and shows 4 to what srun starts."""
    job = {"SLURM_GPUS_PER_NODE": asked, "SLURM_GPUS_ON_NODE": "8"}
    words = shlex.split(sbatch(LAUNCH / "sft_8b.sh", **job).stdout)
    assert words[words.index("--nproc-per-node") + 1] == "4"


SRUN = r"""#!/bin/sh
if [ -n "$SAVES" ]; then printf "$SAVES" > save/latest_checkpointed_iteration.txt; fi
exit "$ENDS"
"""


@pytest.mark.parametrize(
    ("ends", "before", "saves", "state", "requeued"),
    [
        ("1", "", "4", "RUNNING", True),
        ("143", "4", "6", "RUNNING", True),
        ("1", "4", "", "RUNNING", False),
        ("1", "", "", "RUNNING", False),
        ("143", "4", "6", "COMPLETING", False),
        ("0", "4", "8", "RUNNING", False),
    ],
)
def test_a_job_goes_back_into_the_queue_if_its_run_has_saved(
    ends: str, before: str, saves: str, state: str, requeued: bool, tmp_path: Path
) -> None:
    """Otherwise it would fail in the same way again. A cancelled job is no longer running."""
    (tmp_path / "save").mkdir()
    if before:
        (tmp_path / "save" / "latest_checkpointed_iteration.txt").write_text(before)
    for name, text in {
        "srun": SRUN,
        "squeue": f'#!/bin/sh\ntest "$*" = "--noheader --format %T --jobs 7" && echo {state}\n',
        "scontrol": '#!/bin/sh\necho "$*" >> asked.txt\n',
        "python3": "#!/bin/sh\n",  # checks the flags
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "n1", "REQUEUE": "1"}
    done = subprocess.run(
        ["bash", str(LAUNCH / "sft_8b.sh"), "--save", "save"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", **job, "ENDS": ends, "SAVES": saves},
        check=False,
    )
    assert done.returncode == int(ends), done.stderr
    asked = (tmp_path / "asked.txt").read_text().splitlines()
    assert ("requeue 7" in asked) == requeued
    assert ("REQUEUE=1" in done.stderr) == (ends != "0" and state == "RUNNING")


def test_nodes_off_slurm() -> None:
    words = final_command(LAUNCH / "sft_8b.sh", NODES="4")
    assert words[words.index("--nnodes") + 1] == "4"


@pytest.mark.parametrize(
    ("name", "flags", "environment", "message"),
    [
        ("sft_8b", (), {"NODES": "3"}, r"24 ranks take 12 samples .* --global-batch-size 72"),
        ("sft_8b", ("--global-batch-size=60",), {"NODES": "4"}, "append --global-batch-size 64"),
        ("sft_8b", ("--tensor-model-parallel-size", "16"), {}, "cannot be divided by TP 16"),
        ("sft_30b_a3b", ("--expert-model-parallel-size", "32"), {}, "divided by EP 32 x ETP 1"),
        ("sft_235b_a22b", (), {"NODES": "3"}, "divided by TP 4 x PP 8 x CP 2 = 64"),
        ("sft_8b", (), {"NODES": "four"}, "'four' is not a number"),
        ("sft_8b", ("--global-batch-size=064",), {}, "--global-batch-size is '064'"),
        ("sft_8b", (), {"FP8": "true"}, "FP8 is 'true': 1 switches it on"),
        ("sft_8b", (), {"REQUEUE": "3"}, "REQUEUE is '3': 1 switches it on"),
    ],
)  # fmt: skip
def test_ranks_that_cannot_be_divided_are_refused(
    name: str, flags: tuple[str, ...], environment: dict[str, str], message: str
) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        final_command(LAUNCH / f"{name}.sh", *flags, **environment)
    assert refused.value.returncode == 2
    assert refused.value.stdout == ""
    assert re.search(message, refused.value.stderr)


@pytest.mark.parametrize("name", ["NODES", "GPUS_PER_NODE"])
def test_a_count_is_never_evaluated(name: str, tmp_path: Path) -> None:
    """Bash runs the command of ``PATH[$(command)]`` in an arithmetic expression."""
    value = f"PATH[$(touch {tmp_path / 'ran'})]"
    with pytest.raises(subprocess.CalledProcessError) as refused:
        final_command(LAUNCH / "sft_8b.sh", **{name: value}, CHECK_RANKS="0")
    assert refused.value.returncode == 2
    assert "is not a number of nodes, GPUs" in refused.value.stderr
    assert not (tmp_path / "ran").exists()


def test_help_is_about_the_script_and_starts_nothing() -> None:
    done = subprocess.run(
        ["bash", str(LAUNCH / "sft_8b.sh"), "--lr", "1e-5", "--help"],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("Qwen3-VL-8B, full fine-tuning")
    assert "MASTER_PORT" in done.stdout
    assert "train --help [WORD]" in done.stdout
    assert "SBATCH" not in done.stdout


def test_several_nodes_are_not_started_without_their_names() -> None:
    """Without the address of the first, each would wait for the others at its own."""
    command = ["bash", str(LAUNCH / "sft_8b.sh")]
    environment = {"PATH": "/usr/bin:/bin", "NODES": "2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "MASTER_ADDR" in done.stderr


@pytest.mark.parametrize(("flags", "job"), [(["--save", "run"], {}), ([], {"SLURM_JOB_ID": "7"})])
def test_requeue_needs_a_job_and_a_folder_of_checkpoints(
    flags: list[str], job: dict[str, str]
) -> None:
    command = ["bash", str(LAUNCH / "sft_8b.sh"), *flags]
    environment = {"PATH": "/usr/bin:/bin", "REQUEUE": "1", **job}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: REQUEUE=1 needs a Slurm job, and --save with")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lrr", "1e-5"], "error: unrecognized arguments: --lrr. Did you mean --lr "),
        (["--data-path", "gone.jsonl"], "error: The data set gone.jsonl does not exist"),
        (["--expert-model-parallel-size", "2"], "error: EP is 2, but this model is dense"),
        ([], "started"),
    ],
)
def test_flags_are_checked_once_before_ranks_start(
    flags: list[str], message: str, dense: Path, data: Path, tmp_path: Path
) -> None:
    torchrun = tmp_path / "torchrun"
    torchrun.write_text("#!/bin/sh\necho started\n")
    torchrun.chmod(0o755)
    usable = ["--hf-model", str(dense), "--data-path", str(data)]
    layout = ["--tensor-model-parallel-size", "2"]
    done = subprocess.run(
        ["bash", str(LAUNCH / "sft_8b.sh"), *usable, *layout, *flags],
        env={"PATH": f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == (0 if message == "started" else 2)
    assert done.stdout.startswith(message)
    assert len(done.stdout.splitlines()) == 1


def test_what_a_script_sets_can_be_taken_back(tmp_path: Path) -> None:
    flags = (
        *("--pipeline-model-parallel-layout", "none", "--recompute-granularity", "none"),
        *("--recompute-method", "none", "--recompute-num-layers=none", "--context-parallel-size"),
        *("1", "--pipeline-model-parallel-size", "1", "--sequence-parallel", "none"),
        *("--tensor-model-parallel-size", "1", "--global-batch-size", "128"),
    )
    args = parsed(LAUNCH / "sft_235b_a22b.sh", tmp_path, *flags).args
    assert args.pipeline_model_parallel_layout is None
    assert (args.recompute_granularity, args.recompute_method) == (None, None)
    assert (args.recompute_num_layers, args.sequence_parallel) == (None, False)
    assert args.data_parallel_size == 128


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_the_torch_spec_can_be_appended(script: Path, tmp_path: Path) -> None:
    """The script leaves out flags that only Transformer Engine knows and no flag can undo."""
    args = parsed(script, tmp_path, "--spec", "torch").args
    assert args.spec == ["torch"]
    assert args.moe_grouped_gemm == bool(args.num_experts)
    assert not args.moe_permute_fusion


@pytest.mark.parametrize("spec", ["te", "torch"])
def test_weight_gradients_are_accumulated_by_their_product(spec: str, tmp_path: Path) -> None:
    """This needs no Apex: PyTorch's product takes its place in Megatron's linear layers."""
    args = parsed(LAUNCH / "sft_8b.sh", tmp_path, "--spec", spec).args
    assert args.gradient_accumulation_fusion


def test_nothing_waits_inside_the_backward_pass_and_one_rank_gathers_the_optimizer(
    tmp_path: Path,
) -> None:
    args = parsed(LAUNCH / "sft_8b.sh", tmp_path).args
    assert not args.check_for_nan_in_loss_and_grad
    assert args.dist_ckpt_optim_fully_reshardable
    assert args.distrib_optim_fully_reshardable_mem_efficient
