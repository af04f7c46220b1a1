"""The ``--lora-*`` flags, and the PEFT adapter config that they describe."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, get_args

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.config import (
    ATTENTION,
    DELTA_NET,
    EXPERTS,
    MERGERS,
    MLP,
    ROUTER,
    SCORE,
    VISION,
    AdapterConfig,
    Preset,
    preset_targets,
)
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.flags import File, Flag, Name, flag_of
from mcore_qwen3vl.settings.run import RunSettings

RANK = 16
"""Default of ``--lora-rank``; vLLM takes no larger one by default."""

_PLAIN = re.compile(r"[\w.\-]+")
_ASKING = ("lora_rank", "lora_target", "lora_config", "lora_init")
_DETAILS = ("lora_alpha", "lora_dropout", "lora_modules_to_save", "lora_rslora")
_PARAMETERS = (".weight", "gate_up_proj", "experts.down_proj")
"""Suffixes of the names that PEFT takes for parameters, not for modules."""

_EMBEDDINGS = ("embed_tokens", "lm_head")
_NAMES = (
    *(*ATTENTION, *DELTA_NET, *MLP, *MERGERS, *VISION, *EXPERTS),
    *(ROUTER, "mlp.gate", *_EMBEDDINGS),
)


@dataclass(frozen=True)
class LoraSettings:
    """The adapter that trains; any of the first four fields makes the run a LoRA run."""

    lora_rank: Annotated[int | None, Flag("R")] = None
    """train adapters of this rank; default 16"""
    lora_target: tuple[Name, ...] | None = None
    """what to adapt: language, language-aligner, all (default: language), all-linear, a regular
    expression, or PEFT's names of modules (q_proj, attn.qkv, lm_head) and of parameters
    (mlp.experts.gate_up_proj, mlp.gate.weight)"""
    lora_config: File | None = None
    """take all LoRA settings from an adapter_config.json"""
    lora_init: Annotated[str | None, Flag("ADAPTER")] = None
    """continue from this PEFT adapter, with its config"""
    lora_alpha: float | None = None
    """updates are scaled by alpha / rank; default 2 * rank"""
    lora_dropout: float | None = None
    """dropout on the input of A; default 0"""
    lora_rslora: bool = False
    """scale by alpha / sqrt(rank) instead"""
    lora_modules_to_save: tuple[Name, ...] | None = None
    """also train these whole: embed_tokens, lm_head, merger, visual, gate"""

    @property
    def trains_adapter(self) -> bool:
        """Whether this is a LoRA run; a detail of LoRA must not stand alone (BadInput)."""
        if any(getattr(self, name) is not None for name in _ASKING):
            return True
        if details := [flag_of(name) for name in _DETAILS if getattr(self, name)]:
            raise BadInput(
                f"{', '.join(details)} is set, but nothing asks for LoRA: add --lora-rank {RANK} "
                "or --lora-target language."
            )
        return False

    def check(self, run: RunSettings) -> None:
        """Raise BadInput if a LoRA run's flags are out of range, or do not fit the others."""
        if not self.trains_adapter:
            return
        if self.lora_rank is not None and self.lora_rank < 1:
            raise BadInput(f"--lora-rank is {self.lora_rank}; ranks start at 1.")
        if not 0 <= (self.lora_dropout or 0.0) < 1:
            raise BadInput(
                f"--lora-dropout is {self.lora_dropout:g}; it must be a probability below 1."
            )
        model, checkpoints = run.model, run.checkpoints
        if run.training.freeze or run.training.trainable:
            raise BadInput(
                "--freeze and --trainable choose among the model's own weights, and LoRA freezes "
                "them all: name what else trains with --lora-modules-to-save."
            )
        if checkpoints.ckpt_format != "torch_dist":
            raise BadInput(
                f"--ckpt-format {checkpoints.ckpt_format} cannot store an adapter without its "
                "base: leave it out."
            )
        if model.load_hf and checkpoints.pretrained_checkpoint:
            raise BadInput("--load-hf and --pretrained-checkpoint both give the base: drop one.")
        if (checkpoints.save or model.save_hf) and not run.start:
            raise BadInput(
                "LoRA saves adapters alone, so the weights beside them must be given again each "
                "time: add --load-hf DIR, or --pretrained-checkpoint DIR for a Megatron-Core "
                "checkpoint."
            )

    def check_targets(self, architecture: Architecture) -> None:
        """Raise BadInput for a name in ``--lora-target`` of no module, or that stands alone."""
        # As far as possible without PEFT, which takes seconds to import.
        modules, _ = _targets_for_peft(self.lora_target or ("language",), architecture)
        known = {name.rpartition(".")[2] for name in _NAMES}
        for name in () if isinstance(modules, str) else modules or ():
            if (last := name.rpartition(".")[2]) not in known:
                close = get_close_matches(last, [*known, *get_args(Preset)], 1, 0.75)
                meant = f" Did you mean {close[0]}?" if close else ""
                raise BadInput(
                    f"--lora-target {name} names no module of the model.{meant} There are "
                    f"{', '.join(dict.fromkeys(_NAMES))}, and the choices "
                    f"{', '.join(get_args(Preset))} and all-linear."
                )

    def adapter_config(
        self, architecture: Architecture, scored_by: str | None = None
    ) -> AdapterConfig:
        """Return the adapter config that the flags ask for, or raise BadInput if they disagree.

        `scored_by` is the flag of the loss that trains the head ``score``, if one does.
        """
        source = self.lora_config or self.lora_init
        if source is None:
            return _with_weight_tying(
                self._with_score(self._config_from_flags(architecture), scored_by), architecture
            )
        decides = "lora_config" if self.lora_config else "lora_init"  # and no other flag
        names = (name for name in (*_ASKING, *_DETAILS) if name != decides)
        if others := [flag_of(name) for name in names if getattr(self, name)]:
            raise BadInput(f"{flag_of(decides)} decides this already: drop {', '.join(others)}.")
        config = self._with_score(AdapterConfig.from_file(Path(source)), scored_by)
        init = config.raw.get("init_lora_weights", True)
        if self.lora_config and init is not True:
            raise BadInput(
                f"{source} has init_lora_weights {init!r}: only PEFT's default (true) is "
                "supported. Create the adapter with PEFT, and pass it as --lora-init."
            )
        if self.lora_init:
            require_tying(config, architecture, source)
            return config
        return _with_weight_tying(config, architecture)

    def _with_score(self, config: AdapterConfig, scored_by: str | None) -> AdapterConfig:
        """Return `config` with the head ``score``, as PEFT makes it for tasks that have one."""
        modules = config.modules_to_save or ()
        if (SCORE in modules) == (scored_by is not None):
            return config
        if SCORE in modules:
            raise BadInput(
                f"The adapter trains {SCORE}, the head of a reward model or a classifier: add "
                "--task reward or classify, or leave it out of modules_to_save."
            )
        if self.lora_init:
            raise BadInput(
                f"{self.lora_init} has no head {SCORE}, which {scored_by} trains: name an "
                "adapter that has it, or leave --lora-init out."
            )
        return replace(
            config, modules_to_save=(*modules, SCORE), raw={**config.raw, "task_type": "SEQ_CLS"}
        )

    def _config_from_flags(self, architecture: Architecture) -> AdapterConfig:
        """Return the config of a new adapter, with our defaults for flags that are not given."""
        rank = RANK if self.lora_rank is None else self.lora_rank
        modules, parameters = _targets_for_peft(self.lora_target or ("language",), architecture)
        config = AdapterConfig(
            r=rank,
            lora_alpha=2 * rank if self.lora_alpha is None else self.lora_alpha,
            lora_dropout=self.lora_dropout or 0.0,
            use_rslora=self.lora_rslora,
            target_modules=modules,
            target_parameters=parameters,
            modules_to_save=self.lora_modules_to_save or None,
        )
        config.require_supported("the command line")
        return config


def require_tying(config: AdapterConfig, architecture: Architecture, where: str) -> None:
    """Raise BadInput if `config` trains a tied output layer and embedding apart."""
    if config != _with_weight_tying(config, architecture):
        raise BadInput(
            f"{where} trains embed_tokens or lm_head without ensure_weight_tying: PEFT then trains "
            "two copies of what this model ties, and Megatron has one. Make it with "
            "ensure_weight_tying, or without these modules."
        )


def _targets_for_peft(
    names: tuple[str, ...], architecture: Architecture
) -> tuple[str | tuple[str, ...] | None, tuple[str, ...] | None]:
    """Return ``target_modules`` and ``target_parameters``."""
    presets = [name for name in names if name in get_args(Preset)]
    if presets:
        if len(names) > 1:
            raise BadInput(
                f"--lora-target {' '.join(names)}: {presets[0]} cannot be combined with other "
                "names. Write all names as PEFT has them, or use --lora-config."
            )
        return preset_targets(presets[0], architecture)
    if len(names) == 1 and (names[0] == "all-linear" or not _PLAIN.fullmatch(names[0])):
        return names[0], None
    parameters = tuple(name for name in names if name.endswith(_PARAMETERS))
    modules = tuple(name for name in names if name not in parameters)
    return modules or None, parameters or None


def _with_weight_tying(config: AdapterConfig, architecture: Architecture) -> AdapterConfig:
    """Return `config` with PEFT's weight tying on, if it trains embeddings that the model ties."""
    modules = config.modules_to_save or ()
    named = any(name.rpartition(".")[2] in _EMBEDDINGS for name in modules)
    tied = architecture.tie_word_embeddings and named
    return replace(config, ensure_weight_tying=True) if tied else config
