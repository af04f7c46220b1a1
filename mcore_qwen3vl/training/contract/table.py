"""The table of what decides the result of a run: each row owns some flags, and has one rule.

A row's values are recorded in every checkpoint. Where a run goes on, a value may be the same. It
may have changed in a way that the row allows, and then the run states the effect. Otherwise the run
stops and names the flags to give. ``flags-without-row.txt`` has the flags that no row owns, with
the reasons.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_qwen3vl.data.config import MEDIA_BUDGETS
from mcore_qwen3vl.data.datasets import is_of_tars
from mcore_qwen3vl.flags import flag_of
from mcore_qwen3vl.losses.registry import exchanging_losses, flags_of_losses
from mcore_qwen3vl.training.arguments.settings import Settings
from mcore_qwen3vl.training.contract.data_sets import (
    OtherData,
    OtherValidation,
    data_sets,
    files_of_loss,
    require_data_sets,
    say_beside,
    say_data_sets,
    sources_of,
    validation,
)
from mcore_qwen3vl.training.contract.reading import CONTENT, OtherReading, content_of_reading
from mcore_qwen3vl.training.contract.rules import (
    AllowedChange,
    Change,
    ChangeRule,
    Elsewhere,
    Notice,
    RefusedChange,
    Steered,
    Steering,
    Values,
    values_before,
    values_now,
)


@dataclass(frozen=True)
class Facts:
    """What a run's values are read from.

    Attributes:
        args: Megatron's arguments, with ours among them, after their validation.
        settings: the settings of this run; None: the arguments are those of an old checkpoint.
        length_multiple: what the length of a packed sample is a multiple of, by the layout.
    """

    args: argparse.Namespace
    settings: Settings | None = None
    length_multiple: int = 1


Reader = Callable[[Facts], Values]
Words = Callable[[Any, Values], str]
"""Says a value in words, given the other values of its row."""


@dataclass(frozen=True)
class ContractRow:
    """A row of the contract.

    Attributes:
        name: what it is, as messages and the documentation call it.
        flags: ``dest`` names of the flags that it owns.
        rule: what becomes of a change.
        read: returns the values to record; None: those of `flags`, as they are.
        compared: names of the values that are compared; None: all.
        words: says a value, if no flag has it.
        numbers: names of the values that are numbers, lists of them, or None.
        check: raises ValueError for other values that cannot be compared.
    """

    name: str
    flags: tuple[str, ...]
    rule: ChangeRule
    read: Reader | None = None
    compared: tuple[str, ...] | None = None
    words: Mapping[str, Words] = field(default_factory=dict)
    numbers: tuple[str, ...] = ()
    check: Callable[[Values], None] = lambda values: None

    def require_comparable(self, values: Values) -> None:
        """Raise ValueError if the values of a file cannot be compared."""
        for name in self.numbers:
            value = values.get(name)
            for each in value if isinstance(value, list) else [value]:
                if each is not None and type(each) not in (int, float):
                    raise ValueError(f"{self.name}: {name} is {each!r}, and no number")
        self.check(values)

    def values(self, facts: Facts) -> Values:
        """Return the row's values as plain data; without what the facts do not say."""
        return _flags(*self.flags)(facts) if self.read is None else self.read(facts)

    def findings(self, before: Values, now: Values, steering: Steering) -> Iterator[Notice]:
        """Yield what is to be said of the values that differ."""
        known = [name for name in now if name in before]
        changes = [
            Change(
                name, before[name], now[name], self.say(name, before), self.say(name, now)
            )
            for name in known
            if before[name] != now[name] and (self.compared is None or name in self.compared)
        ]  # fmt: skip
        if changes:
            yield from self.rule.judge(self.name, changes, before, now, steering)

    def say(self, name: str, values: Values) -> str:
        """Return a value in words: by default as the command line has it."""
        words = self.words.get(name)
        return words(values[name], values) if words else spell(name, values[name])


_OFF = {
    "shuffle": "--no-shuffle",
    "muon_split_qkv": "--muon-no-split-qkv",
    "fp8_wgrad": "--no-fp8-wgrad",
    "add_bias_linear": "--disable-bias-linear",
}
"""Switches that are on unless a flag turns them off."""
_OTHERWISE_CALLED = {
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
    "layernorm_epsilon": "--norm-epsilon",
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
    "microbatch_group_size_per_vp_stage": "--microbatch-group-size-per-virtual-pipeline-stage",
}


def name_of_flag(name: str) -> str:
    """Return the flag of a ``dest`` name."""
    return _OFF.get(name) or _OTHERWISE_CALLED.get(name) or flag_of(name)


def spell(name: str, value: Any) -> str:
    """Return a setting as the command line has it, such as ``--seed 3`` or ``no --packing``."""
    flag, is_switch = name_of_flag(name), isinstance(value, bool)
    if value is None or value == [] or (is_switch and value is (name in _OFF)):
        return f"no {flag}"
    words = [] if is_switch else value if isinstance(value, list) else [value]
    return " ".join([flag, *map(str, words)])


def plain(value: Any) -> Any:
    """Return a value as JSON has it: enums and dtypes by their name, tuples as lists."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return str(value)


def _flags(*names: str) -> Reader:
    """Return a reader of arguments as they are."""

    def read(facts: Facts) -> Values:
        return {
            name: plain(getattr(facts.args, name)) for name in names if hasattr(facts.args, name)
        }

    return read


# The data.


def _data_sets(facts: Facts) -> Values:
    return {} if facts.settings is None else data_sets(facts.settings)


def _validation(facts: Facts) -> Values:
    return {} if facts.settings is None else validation(facts.settings)


def _files_of_loss(facts: Facts) -> Values:
    return {} if facts.settings is None else files_of_loss(facts.settings)


def _mixture(facts: Facts) -> Values:
    if facts.settings is None:
        return {}
    sources = sources_of(facts.settings)
    total = sum(source.weight for source in sources)
    return {
        # Shares of two mixture files may differ in their last digit.
        "shares": [round(source.weight / total, 12) for source in sources],
        "epochs": [source.epochs for source in sources],
        "max_samples": [source.max_samples for source in sources],
    }


def _say(words: str) -> Words:
    return lambda value, _: words


def _say_list(what: str) -> Words:
    return lambda value, _: f"{what} {' '.join('-' if v is None else f'{v:.6g}' for v in value)}"


_READING = (
    *("preprocess", "train_on", "chat_template_kwargs", "overlong"),
    *("max_decoded_pixels", "max_sample_seconds"),
    *("document_end", "allow_dropped"),
    *MEDIA_BUDGETS,
)


def _reading(facts: Facts) -> Values:
    values = dict(_flags(*_READING, "packing")(facts))
    return {**values, **(content_of_reading(facts.settings) if facts.settings else {})}


def _order(facts: Facts) -> Values:
    names = ["shuffle", "seed"]
    # Records that have a number are in a permutation, and go through no buffer.
    if facts.settings and any(is_of_tars(source.path) for source in sources_of(facts.settings)):
        names += ["shuffle_buffer"]
    return _flags(*names)(facts)


def _packs(facts: Facts) -> Values:
    values = dict(_flags("packing")(facts))
    if values["packing"]:
        values |= _flags("packing_buffer", "seq_length")(facts)
        if facts.settings is not None:
            values["balance"] = facts.settings.data.balance
            values["length_multiple"] = facts.length_multiple
    return values


@dataclass(frozen=True)
class _Packs:
    """Refuses what would change packs that wait to be read, or leave no room for their samples."""

    text = (
        "refused: packs that wait to be read were made with the checkpoint's values. "
        "`--packing-buffer` is kept, unless given. A layout that pads each sample to a larger "
        "multiple (2 x CP) is refused too, a smaller one is allowed"
    )

    def judge(
        self, row: str, changes: Sequence[Change], before: Values, now: Values, steering: Steering
    ) -> Iterator[Notice]:
        others = [change for change in changes if change.setting != "length_multiple"]
        if others:
            why = "packs that wait to be read were made with the checkpoint's values"
            yield from RefusedChange(why).judge(row, others, before, now, steering)
            return
        for change in changes:
            if change.before % change.after:
                text = f"{row}: {change.was} in the checkpoint, {change.is_now} in this command: "
                text += "packs that wait to be read may have no room. Give the checkpoint's "
                yield Notice(row, f"{text}--context-parallel-size, or a smaller one.", refused=True)


def _rows(facts: Facts) -> Values:
    """Return the length of rows that hold one record each; with packs it has another row."""
    return {} if facts.args.packing else _flags("seq_length")(facts)


_LENGTH = ("num_epochs", "train_iters", "train_samples")


@dataclass(frozen=True)
class _Length:
    """Allows a longer run, and a shorter one whose records have one order."""

    text = (
        "allowed: the run ends at another step. With more `--num-epochs` the next epoch begins "
        "where the last one ended, and each record comes once in each; fewer are refused. The "
        "schedule has a row of its own"
    )

    def judge(
        self, row: str, changes: Sequence[Change], before: Values, now: Values, steering: Steering
    ) -> Iterator[Notice]:
        was, is_now = before.get("num_epochs"), now.get("num_epochs")
        if was and is_now and is_now < was:
            text = f"{row}: the run was begun with --num-epochs {was}, and this command has "
            text += f"{is_now}. Give {was} or more; Ctrl-C ends a run earlier, with a checkpoint."
            yield Notice(row, text, refused=True)
            return
        asked = [change for change in changes if was != is_now or change.setting != "num_epochs"]
        if asked and not (was == is_now and was):  # the same epochs, in steps of another batch
            text = (
                f"{row}: {values_now(asked)} in place of {values_before(asked)}: the run ends at "
            )
            yield Notice(row, f"{text}another step")


# The steps and the optimizer.


_LAYOUT = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel"),
    "micro_batch_size",
)
_SPLIT = (
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("pipeline_model_parallel_layout", "num_layers_per_virtual_pipeline_stage"),
    *("num_virtual_stages_per_pipeline_rank", "account_for_embedding_in_pipeline_split"),
    *("account_for_loss_in_pipeline_split", "hierarchical_context_parallel_sizes"),
    "microbatch_group_size_per_vp_stage",
)


def _batch(facts: Facts) -> Values:
    """Return the batch, or how it grows; beside that Megatron has a batch of one pass."""
    values = _flags(
        "global_batch_size", "step_batch_size_schedule", "decrease_batch_size_if_needed"
    )
    found = dict(values(facts))
    if found.get("step_batch_size_schedule"):
        del found["global_batch_size"]
    return found


def _layout(facts: Facts) -> Values:
    """Return the layout, and what is computed of a micro-batch by itself, in words."""
    args = facts.args
    balancing = plain(getattr(args, "moe_router_load_balancing_type", None))
    balances = {"aux_loss", "seq_aux_loss"} & {
        *(balancing if isinstance(balancing, list) else [balancing])
    }
    parts = {
        "the exchanged answers of KTO's baseline": getattr(args, "loss", None)
        in exchanging_losses(),
        "the balancing loss of experts": getattr(args, "num_experts", None)
        and balances == {"aux_loss"}
        and getattr(args, "moe_aux_loss_coeff", None) not in (None, 0.0, [0.0]),
        "what experts drop": getattr(args, "moe_expert_capacity_factor", None) is not None,
    }
    of_micro_batch = [words for words, holds in parts.items() if holds]
    return {**_flags(*_LAYOUT, *_SPLIT)(facts), "of_micro_batch": of_micro_batch}


@dataclass(frozen=True)
class _Layout:
    """Allows every layout, and says what a micro-batch of another size changes."""

    text = (
        "allowed: results differ by their rounding. With another `--micro-batch-size` so does what "
        "is computed of each micro-batch: the exchanged answers of KTO's baseline, the balancing "
        "loss of experts (`aux_loss`) and what experts drop"
    )

    def judge(
        self, row: str, changes: Sequence[Change], before: Values, now: Values, steering: Steering
    ) -> Iterator[Notice]:
        effect = "results differ by their rounding"
        changed = any(change.setting == "micro_batch_size" for change in changes)
        if changed and (parts := now["of_micro_batch"]):
            effect = f"{' and '.join(parts)} are of other micro-batches from the next step on"
        yield from AllowedChange(effect).judge(row, changes, before, now, steering)


def _skipped_steps(facts: Facts) -> Values:
    """Return the steps to skip, which are hidden from Megatron's loop."""
    if facts.settings is None:
        return {}
    return {"iterations_to_skip": list(facts.settings.loop.iterations_to_skip)}


_HYPERPARAMETERS = {
    "adam": ("adam_beta1", "adam_beta2", "adam_eps"),
    "sgd": ("sgd_momentum",),
    "lion": ("lion_beta1", "lion_beta2"),
    "muon": (
        *("muon_momentum", "muon_split_qkv", "muon_nesterov", "muon_scale_mode"),
        *("muon_fp32_matmul_prec", "muon_coefficient_type", "muon_num_ns_steps", "muon_tp_mode"),
        *("muon_extra_scale_factor", "muon_scalar_optimizer"),
    ),
}
_FACTORS = tuple(name for kind in ("adam", "sgd", "lion") for name in _HYPERPARAMETERS[kind])
HYPERPARAMETERS = tuple(name for names in _HYPERPARAMETERS.values() for name in names)


def _hyperparameters(facts: Facts) -> Values:
    """Return those of the optimizer alone; beside Muon and its like, Adam updates the vectors."""
    optimizer = str(getattr(facts.args, "optimizer", "adam"))
    names = _HYPERPARAMETERS.get(optimizer, HYPERPARAMETERS)
    return _flags(*names)(facts)


RATES = (
    *("lr", "min_lr", "vision_lr_mult", "aligner_lr_mult", "decoupled_lr", "decoupled_min_lr"),
    "lr_warmup_init",
)
STYLES = ("lr_decay_style", "lr_wsd_decay_style")
_DURATIONS = (
    *("lr_decay_iters", "lr_decay_samples", "lr_wsd_decay_iters", "lr_wsd_decay_samples"),
    *("lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples"),
)


def _schedule(facts: Facts) -> Values:
    """Return the schedule in samples, as Megatron's ``get_optimizer_param_scheduler`` counts."""
    args, batch = facts.args, facts.args.global_batch_size
    if args.train_samples:
        unit, decay = 1, args.lr_decay_samples or args.train_samples
        wsd, warmup = args.lr_wsd_decay_samples, args.lr_warmup_samples
    else:
        unit, decay = batch, args.lr_decay_iters or args.train_iters or 0
        wsd, warmup = args.lr_wsd_decay_iters, args.lr_warmup_iters
    decay *= unit
    fraction = args.lr_warmup_fraction
    warmup = fraction * decay if fraction is not None else (warmup or 0) * unit
    values = {"lr_decay_style": args.lr_decay_style, "warmup": warmup}
    if args.lr_decay_style != "constant":
        values["decay"] = decay
    if args.lr_decay_style == "WSD":
        values |= {"lr_wsd_decay_style": args.lr_wsd_decay_style, "wsd": wsd and wsd * unit}
    return {**values, "batch": None if args.train_samples else batch}


def _say_samples(what: str) -> Words:
    def say(samples: Any, values: Values) -> str:
        count, batch = samples or 0, values.get("batch")
        steps = f"{count / batch:g} steps, " if batch else ""
        return f"{what} of {steps}{count:g} samples"

    return say


WEIGHT_DECAY = (
    *("weight_decay", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style"),
    *("apply_wd_to_qk_layernorm", "no_weight_decay_cond_type"),
)

_PRECISION = (
    *("bf16", "fp16", "fp8", "fp8_recipe", "fp8_quantizer_factory", "fp8_margin", "fp8_interval"),
    *("fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_wgrad", "fp8_output_proj"),
    *("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
    *("fp4", "fp4_recipe", "fp4_quantizer_factory", "fp8_param_gather", "fp4_param_gather"),
    *("te_precision_config_file", "fp32_residual_connection", "attention_softmax_in_fp32"),
    *("accumulate_allreduce_grads_in_fp32", "grad_reduce_in_bf16", "moe_router_dtype"),
    *("disable_bf16_reduced_precision_matmul", "loss_scale", "initial_loss_scale"),
    *("min_loss_scale", "loss_scale_window", "hysteresis", "main_grads_dtype"),
    *("ddp_reduce_scatter_with_fp32_accumulation", "megatron_fsdp_main_params_dtype"),
    *("megatron_fsdp_main_grads_dtype", "megatron_fsdp_grad_comm_dtype"),
)
_STATE = (
    *("use_distributed_optimizer", "use_precision_aware_optimizer", "main_params_dtype"),
    *("exp_avg_dtype", "exp_avg_sq_dtype", "use_megatron_fsdp", "use_torch_fsdp2"),
)


def _state(facts: Facts) -> Values:
    """Return what decides how the optimizer's state is stored."""
    values = dict(_flags(*_STATE)(facts))
    if not values["use_distributed_optimizer"]:  # which has float32 weights of its own in any case
        values["half"] = bool(facts.args.bf16 or facts.args.fp16)
    return values


def _mtp(facts: Facts) -> Values:
    """Return the MTP layers, which Megatron's own argument hides."""
    return {
        "mtp_num_layers": getattr(facts.args, "trained_mtp_layers", None),
        **_flags("mtp_loss_scaling_factor")(facts),
    }


@dataclass(frozen=True)
class _KeepMTP:
    """Refuses to drop the MTP layer, unless nothing is written."""

    text = (
        "refused where the command leaves out the layer that the run trained: its checkpoints and "
        "exports would lack the layer; another factor is allowed, from the next step on"
    )

    def judge(
        self, row: str, changes: Sequence[Change], before: Values, now: Values, steering: Steering
    ) -> Iterator[Notice]:
        layers = before.get("mtp_num_layers")
        if layers and not now.get("mtp_num_layers"):
            text = f"{row}: the run trained mtp.*, the MTP layer, and this "
            text += "command would drop it from its checkpoints and exports: add --mtp-num-layers "
            yield Notice(row, f"{text}{layers}.", refused=True)
        else:
            yield from AllowedChange(FROM_HERE).judge(row, changes, before, now, steering)


FROM_HERE = "it holds from the next step on"

_MODEL = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
    *("group_query_attention", "kv_channels", "normalization", "layernorm_epsilon", "swiglu"),
    *("layernorm_zero_centered_gamma", "add_bias_linear", "add_qkv_bias", "qk_layernorm"),
    *("rotary_base", "rotary_percent", "rotary_interleaved", "mrope_section", "vocab_size"),
    *("position_embedding_type", "max_position_embeddings", "make_vocab_size_divisible_by"),
    *("padded_vocab_size", "untie_embeddings_and_output_weights", "multi_latent_attention"),
    *("num_experts", "moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk"),
    *("moe_shared_expert_intermediate_size", "moe_router_score_function"),
    *("moe_router_num_groups", "moe_router_pre_softmax", "moe_router_topk_scaling_factor"),
    *("moe_router_enable_expert_bias", "apply_query_key_layer_scaling", "hf_model"),
)
_ADAPTER = (
    *("lora_rank", "lora_target", "lora_config", "lora_init", "lora_alpha", "lora_rslora"),
    "lora_modules_to_save",
)
_ROUTING = (
    *("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff"),
    *("moe_input_jitter_eps", "moe_expert_capacity_factor", "moe_token_drop_policy"),
    "moe_expert_rank_capacity_factor",
)

ROWS: tuple[ContractRow, ...] = (
    ContractRow(
        "data sets",
        ("data_path", "train_data_path"),
        OtherData(),
        _data_sets,
        compared=("content",),
        words={"content": say_data_sets},
        check=require_data_sets,
    ),
    ContractRow(
        "mixture",
        (),
        RefusedChange("each data set has a position of its own in the order of the mixture"),
        _mixture,
        words={
            "shares": _say_list("the shares"),
            "epochs": _say_list("the epochs"),
            "max_samples": _say_list("max_samples"),
        },
        numbers=("shares", "epochs", "max_samples"),
    ),
    ContractRow(
        "reading of records",
        _READING,
        OtherReading("records that are read from here on are read so"),
        _reading,
        compared=(*_READING, *CONTENT),
        words={name: _say(words) for name, words in CONTENT.items()},
    ),
    ContractRow(
        "order",
        ("shuffle", "seed", "shuffle_buffer"),
        RefusedChange("a position in the data would name other records"),
        _order,
    ),
    ContractRow(
        "packs",
        ("packing", "balance", "packing_buffer"),
        _Packs(),
        _packs,
        words={"length_multiple": lambda value, _: f"lengths that are multiples of {value}"},
        numbers=("length_multiple",),
    ),
    ContractRow(
        "row length",
        ("seq_length",),
        AllowedChange("longer samples are left out, or cut, from here on"),
        _rows,
    ),
    ContractRow(
        "validation",
        ("valid_data_path", "eval_iters", "eval_global_batch_size", "eval_micro_batch_size"),
        OtherValidation(),
        _validation,
        compared=("content", "samples", "micro_batch", "mixture", "beside"),
        words={
            "content": say_data_sets,
            "samples": lambda value, _: f"the first {value} samples" if value else "all samples",
            "micro_batch": lambda value, _: f"micro-batches of {value}",
            "mixture": _say("other settings of its data sets"),
            "beside": say_beside,
        },
        numbers=("samples", "micro_batch"),
        check=require_data_sets,
    ),
    ContractRow("length of the run", _LENGTH, _Length(), numbers=_LENGTH),
    ContractRow(
        "batch",
        ("global_batch_size", "step_batch_size_schedule", "decrease_batch_size_if_needed"),
        Steered(of_command=True),
        _batch,
        numbers=("global_batch_size",),
    ),
    ContractRow(
        "skipped steps",
        ("iterations_to_skip",),
        AllowedChange("steps that are ahead are skipped so"),
        _skipped_steps,
    ),
    ContractRow(
        "optimizer",
        ("optimizer",),
        RefusedChange(
            "its state is another one. --no-load-optim goes on with a new state, at the same step"
        ),
    ),
    ContractRow("hyperparameters", HYPERPARAMETERS, Steered(), _hyperparameters, numbers=_FACTORS),
    ContractRow("learning rate", RATES, Steered(), numbers=RATES),
    ContractRow(
        "schedule",
        (*STYLES, *_DURATIONS),
        Steered(),
        _schedule,
        compared=(*STYLES, "warmup", "decay", "wsd"),
        words={
            "warmup": _say_samples("a warm-up"),
            "decay": _say_samples("a length"),
            "wsd": _say_samples("a decay at the end"),
        },
        numbers=("warmup", "decay", "wsd", "batch"),
    ),
    ContractRow("weight decay", WEIGHT_DECAY, Steered(), numbers=WEIGHT_DECAY[:3]),
    ContractRow("gradient clipping", ("clip_grad",), AllowedChange(FROM_HERE)),
    ContractRow(
        "optimizer's state",
        _STATE,
        RefusedChange(
            "it is stored otherwise. --no-load-optim goes on with a new state, at the same step"
        ),
        _state,
        words={"half": lambda value, _: "16-bit weights" if value else "float32 weights"},
    ),
    ContractRow(
        "what trains",
        ("freeze", "trainable"),
        AllowedChange(
            "the optimizer's state of what no longer trains is dropped; a parameter that did not "
            "train before is refused, because its state was not saved"
        ),
    ),
    ContractRow(
        "adapter",
        _ADAPTER,
        Elsewhere("refused: the checkpoint's `adapter_config.json` is compared"),
        lambda facts: {},
    ),
    ContractRow(
        "loss",
        ("loss", "task"),
        RefusedChange("another loss is another run"),
    ),
    ContractRow("settings of the loss", flags_of_losses(), AllowedChange(FROM_HERE)),
    ContractRow(
        "files of the loss",
        (),
        AllowedChange(
            "the loss compares with these scores of a reference, or likeliest tokens of a teacher, "
            "from the next step on"
        ),
        _files_of_loss,
        words={"beside": say_beside},
    ),
    ContractRow(
        "MTP",
        ("mtp_num_layers", "mtp_loss_scaling_factor"),
        _KeepMTP(),
        _mtp,
    ),
    ContractRow("routing of experts", _ROUTING, AllowedChange(FROM_HERE)),
    ContractRow(
        "dropout", ("hidden_dropout", "attention_dropout", "lora_dropout"), AllowedChange(FROM_HERE)
    ),
    ContractRow(
        "precision",
        (*_PRECISION, "fp32"),
        AllowedChange("results are rounded otherwise from here on"),
        _flags(*_PRECISION),
    ),
    ContractRow(
        "layout",
        (*_LAYOUT, *_SPLIT),
        _Layout(),
        _layout,
        compared=_LAYOUT,
    ),
    ContractRow(
        "data workers",
        ("num_workers",),
        Elsewhere(
            "kept, unless given: any number where records have one order, the same number for each "
            "rank with `--packing`, the same total for tars and with `--no-balance`; refused "
            "otherwise"
        ),
        lambda facts: {},
    ),
    ContractRow("layers' code", ("spec",), AllowedChange("results differ by their rounding")),
    ContractRow(
        "model",
        _MODEL,
        Elsewhere("refused: the config in `hf` of the checkpoint is compared"),
        lambda facts: {},
    ),
)


FLAGS_WITHOUT_ROW = Path(__file__).with_name("flags-without-row.txt")


def reasons_for_no_row() -> dict[str, str]:
    """Return why a flag that reaches a run belongs to no row, by its ``dest`` name."""
    found: dict[str, str] = {}
    reason = ""
    for line in FLAGS_WITHOUT_ROW.read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            found |= dict.fromkeys(line.split(), reason)
        elif line and not line.startswith("#"):
            reason = line.rstrip(":")
    return found


def owner_of(name: str) -> ContractRow | None:
    """Return the row that owns the flag with the ``dest`` `name`, or None."""
    return next((row for row in ROWS if name in row.flags), None)


def markdown() -> str:
    """Return the table of the documentation."""
    lines = ["| what | flags | if a command differs from the checkpoint |", "|---|---|---|"]
    for row in ROWS:
        flags = " ".join(f"`{name_of_flag(name)}`" for name in row.flags)
        lines.append(f"| {row.name} | {flags} | {row.rule.text} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
