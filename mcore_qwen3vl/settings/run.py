"""The settings of a run but those of its loss: our own flags, and what we read of Megatron's.

Each field of a dataclass is a flag. ``--hf-model`` supplies the architecture, so no size is ever
typed.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_type_hints

from mcore_qwen3vl.data.config import DataConfig, MediaLimits
from mcore_qwen3vl.data.records.reading import Reading
from mcore_qwen3vl.flags import File, Flag, Folder, Name, make_from_flags
from mcore_qwen3vl.settings.schedule import ScheduleSettings

Patterns = tuple[Annotated[str, Flag("PATTERN")], ...]
Paths = Annotated[tuple[str, ...] | None, Flag("PATH", nargs="*")]


@dataclass(frozen=True)
class ModelSettings:
    """The model, where its weights come from and where they go."""

    hf_model: Folder | None = None
    """Hugging Face checkpoint, hub id or converted checkpoint: its config gives the architecture,
    its tokenizer and processor prepare the data. Weights are not read here."""
    load_hf: Folder | None = None
    """Start from these Hugging Face weights (a directory or hub id), under any layout."""
    save_hf: Folder | None = None
    """Export Hugging Face checkpoints here; with LoRA, PEFT adapters."""
    save_hf_interval: int | None = None
    """Export every N iterations too."""
    model_card: bool = False
    """Write a model card into each export, for the hub: README.md with base, data, settings and
    versions, by names and without paths."""
    certificate: tuple[Annotated[str, Flag("FILE")], ...] = ()
    """With --model-card: quote the verdicts of these report.json, which verify --report writes."""
    cpu: bool = False
    """Run on the CPU with gloo."""
    fp32: bool = False
    """Weights and computation in float32, the default with --cpu. On GPUs the default is --bf16,
    because fused attention needs half precision."""

    @property
    def folder(self) -> Path:
        """The folder of ``--hf-model``, which every run has."""
        assert self.hf_model is not None, "check_surroundings asks for --hf-model"
        return Path(self.hf_model)


@dataclass(frozen=True)
class TrainingSettings:
    """What trains, how long, with which loss, and what is written about it."""

    freeze: Patterns = ()
    """vision, aligner, language, or regular expressions for the start of names"""
    trainable: Patterns = ()
    """freeze the rest; vision, aligner, language, or regular expressions for the start of names"""
    vision_lr_mult: float = 1.0
    """learning rate of the vision blocks / lr"""
    aligner_lr_mult: float = 1.0
    """learning rate of the mergers / lr"""
    num_epochs: int | None = None
    """read the training data N times, each record once an epoch, in place of --train-iters"""
    loss: Name = "cross_entropy"
    """what is minimised; :func:`mcore_qwen3vl.losses.registry.help_of_loss` makes the help"""
    keep_activations: bool | None = None
    """keep the outputs of the decoder's norms, SwiGLU and rotary embedding for the backward pass
    instead of recomputing them: more memory, a little less compute (default: no, but always where
    activations are offloaded)"""
    head_chunk: Annotated[int | None, Flag("TOKENS")] = None
    """tokens whose logits are in memory at a time, forward and backward (default: as many as take
    half a GiB)"""
    log_json: File | None = None
    """append each logged iteration's numbers, unrounded"""
    log_records: Folder | None = None
    """append the names of each step's records to a file there for each data-parallel rank"""
    log_to: tuple[Annotated[str, Flag("TRACKER")], ...] = ()
    """send the numbers of --log-json to experiment trackers: mlflow, swanlab, trackio, wandb, or a
    function (module:function or file.py:function)"""
    log_project: Name | None = None
    """with --log-to: MLflow's experiment, or the others' project; default: mcore-qwen3vl"""
    log_run: Name | None = None
    """with --log-to: the run's name; default: the tracker's"""
    verbose: bool = False
    """show all that Megatron prints, instead of a progress bar"""
    peak_tflops: float | None = None
    """peak of one device, for the MFU; A100, H100, H200 and B200 are known"""
    early_stop_patience: int | None = None
    """end the run after N validations in a row without a lower loss than before"""
    keep_best: bool = False
    """save a checkpoint after each validation with the lowest loss so far, in place of the one
    before; validation.json in --save names it. --save-hf exports it, as best"""
    on_corrupt_checkpoint: Literal["fallback", "stop"] = "fallback"
    """when the latest checkpoint cannot be read: use the one before it, or stop"""
    recompute_vision: bool | None = None
    """keep only the inputs of the vision tower's blocks for the backward pass (default: with
    --recompute-granularity full)"""
    compile_pointwise: bool | None = None
    """compile the rotary embedding of --spec torch to one kernel with torch.compile (default: on
    GPUs, where a C compiler is)"""


@dataclass(frozen=True)
class DataSources:
    """How records are read, for data sets that do not say so themselves."""

    preprocess: Annotated[str | None, Flag("MODULE:FUNCTION")] = None
    """function (module:function or file.py:function), or name of an entry point, that turns a
    record of any shape into one of a known format; for data sets that name no function of their
    own"""
    train_on: Annotated[str | None, Flag("TURNS")] = None
    """turns of the assistant to train on: all, last, or a regular expression that must match in the
    turn's text, or in the tool calls or the reasoning of a turn without text; for data sets that
    choose none of their own; default: all"""
    chat_template_kwargs: Annotated[str | None, Flag("JSON")] = None
    """arguments of the chat template as a JSON object, such as {"enable_thinking": false}; those of
    a data set and of a record win"""

    @property
    def reading(self) -> Reading:
        """How records are read where a data set does not say so."""
        return Reading(
            preprocess=self.preprocess,
            train_on=self.train_on,
            chat_template_kwargs=self.chat_template_kwargs,
        )


@dataclass(frozen=True)
class CheckpointSettings:
    """Megatron's flags about checkpoints. ``mcore-qwen3vl train --help`` describes all of its."""

    save: Folder | None = None
    save_interval: Annotated[int | None, Flag(aliases=("--persistent-save-interval",))] = None
    save_retain_interval: int | None = None
    load: Folder | None = None
    pretrained_checkpoint: Folder | None = None
    ckpt_step: int | None = None
    ckpt_format: str = "torch_dist"
    finetune: bool = False
    exit_on_missing_checkpoint: bool = False
    async_save: bool = False
    async_strategy: str = "nvrx"
    use_persistent_ckpt_worker: bool = False
    no_save_optim: bool = False
    no_load_optim: bool = False


@dataclass(frozen=True)
class LoopSettings:
    """Megatron's flags about data, length and validation; 0: not set yet.

    ``--seq-length`` and ``--micro-batch-size`` are fields of the data config.
    """

    data_path: Paths = None
    train_data_path: Paths = None
    valid_data_path: Paths = None
    train_iters: int | None = None
    """As the command line says; Megatron's own changes: see `training.run.Run`."""
    train_samples: int | None = None
    skip_train: bool = False
    iterations_to_skip: tuple[int, ...] = ()
    exit_interval: int | None = None
    global_batch_size: int = 0
    rampup_batch_size: tuple[int, int, int] | None = None
    step_batch_size_schedule: str | None = None
    num_workers: int = 2
    seed: int = 1234
    optimizer: str | None = None
    use_distributed_optimizer: bool = False
    eval_iters: int = 0
    """As the command line says; the data provider counts those of all the data."""
    eval_interval: int = 0
    eval_micro_batch_size: int = 0
    eval_global_batch_size: int = 0
    full_validation: bool = False
    mtp_num_layers: int | None = None
    mtp_loss_scaling_factor: float = 0.1

    def leaves_out(self, step: int) -> bool:
        """Return whether ``--iterations-to-skip`` names this step, counted from 1."""
        return step in self.iterations_to_skip

    @property
    def training_data(self) -> tuple[str, ...]:
        """What ``--train-data-path`` or ``--data-path`` says."""
        return self.train_data_path or self.data_path or ()


@dataclass(frozen=True)
class ParallelSettings:
    """Megatron's flags about ranks, which :class:`mcore_qwen3vl.layout.Layout` reads."""

    rank: int = 0
    world_size: int = 1
    data_parallel_size: int = 1
    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    pipeline_model_parallel_size: int = 1
    pipeline_model_parallel_layout: str | None = None
    decoder_first_pipeline_num_layers: int | None = None
    decoder_last_pipeline_num_layers: int | None = None
    num_virtual_stages_per_pipeline_rank: int | None = None
    virtual_pipeline_model_parallel_size: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    microbatch_group_size_per_vp_stage: Annotated[
        int | None, Flag(name="--microbatch-group-size-per-virtual-pipeline-stage")
    ] = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    use_megatron_fsdp: bool = False
    use_torch_fsdp2: bool = False

    @property
    def has_own_split(self) -> bool:
        """Whether one of :data:`OWN_SPLIT` splits the pipeline."""
        return any(getattr(self, name) for name in OWN_SPLIT)


OWN_SPLIT = (
    "num_layers_per_virtual_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Splits over the pipeline that `Layout` does not describe; Megatron checks them.

Any two stages may differ in them.
"""


@dataclass(frozen=True)
class ComputeSettings:
    """Megatron's flags about precision, recomputation, kernels and experts."""

    spec: Annotated[tuple[str, ...] | None, Flag("NAME", nargs="*")] = None
    bf16: bool = False
    fp16: bool = False
    fp8: Annotated[str | None, Flag(name="--fp8-format")] = None
    fp8_recipe: str = "delayed"
    fp4: Annotated[str | None, Flag(name="--fp4-format")] = None
    fp4_recipe: str = "nvfp4"
    loss_scale: float | None = None
    initial_loss_scale: float = 2.0**32
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    recompute_modules: tuple[str, ...] | None = None
    fine_grained_activation_offloading: bool = False
    cpu_offloading_num_layers: int = 0
    tp_comm_overlap: bool = False
    cuda_graph_impl: str = "none"
    delay_wgrad_compute: bool = False
    defer_embedding_wgrad_compute: bool = False
    overlap_moe_expert_parallel_comm: bool = False
    moe_token_dispatcher_type: str | None = None
    moe_flex_dispatcher_backend: str | None = None
    moe_permute_fusion: bool = False
    moe_router_load_balancing_type: str | tuple[str, ...] | None = None
    moe_router_padding_for_fp8: bool = False
    moe_router_padding_for_quantization: bool = False
    moe_expert_capacity_factor: float | None = None
    moe_token_drop_policy: str = "probs"
    moe_routing_trace_path: Folder | None = None
    moe_aux_loss_coeff: float | tuple[float, ...] | None = None
    moe_z_loss_coeff: float | None = None
    padded_vocab_size: int | None = None
    flash_attention_version: int | None = None
    deterministic_mode: bool = False
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    moe_input_jitter_eps: float | None = None

    @property
    def params_dtype(self) -> str:
        """The dtype of the model's weights, which are saved and exported in it: torch's name."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else "float32"

    @property
    def layer_spec(self) -> Literal["te", "torch"]:
        """The layers' implementation, which the parser has set."""
        return "te" if self.spec == ("te",) else "torch"


@dataclass(frozen=True)
class LogSettings:
    """Megatron's flags about logs."""

    log_interval: int = 100
    tensorboard_dir: Folder | None = None
    wandb_project: Name | None = None
    wandb_exp_name: Name | None = None
    wandb_save_dir: Folder | None = None


NOT_READ_EARLY = frozenset(
    {
        *("rank", "world_size", "data_parallel_size", "virtual_pipeline_model_parallel_size"),
        *("padded_vocab_size", "moe_aux_loss_coeff", "moe_router_load_balancing_type"),
    }
)
"""Fields that have their values only after Megatron's validation."""


@dataclass(frozen=True)
class RunSettings:
    """All settings of a run but those of its loss; the last six are Megatron's.

    They are made once of the command line, before megatron is imported, and once more of what
    Megatron's validation makes of it. Nothing changes them afterwards.
    """

    model: ModelSettings
    training: TrainingSettings
    sources: DataSources
    data: DataConfig
    """What the flags alone say; :func:`..data_provider.data_config` adds what follows."""
    checkpoints: CheckpointSettings
    loop: LoopSettings
    schedule: ScheduleSettings
    parallel: ParallelSettings
    compute: ComputeSettings
    logs: LogSettings

    @property
    def start(self) -> str | None:
        """The checkpoint whose weights training starts from, if a flag names one."""
        return self.checkpoints.pretrained_checkpoint or self.model.load_hf

    @classmethod
    def from_flags(cls, flags: argparse.Namespace, *, balances: bool, **others: Any) -> Self:
        """Take the values of parsed flags, or raise BadInput for one that no data config has.

        Where no flag says it, `balances` says whether packs are balanced.
        """
        balance = flags.balance
        if balance is None:
            balance = bool(flags.packing and balances)
        data = make_from_flags(
            DataConfig, flags, media_limits=make_from_flags(MediaLimits, flags), balance=balance
        )
        hints = get_type_hints(cls)
        kinds = {
            f.name: hints[f.name]
            for f in fields(cls)
            if is_dataclass(hints[f.name]) and f.name not in others
        }
        parts = {
            name: make_from_flags(kind, flags)
            for name, kind in kinds.items()
            if kind is not DataConfig
        }
        return cls(data=data, **parts, **others)
