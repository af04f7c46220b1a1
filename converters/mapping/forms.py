"""Forms of a Hugging Face checkpoint: how its tensors are called, and which head it stores.

The table speaks of `CURRENT` names and of the head that the config calls for. What else is
published is a row here; a reader translates names, and a writer translates them back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from mcore_qwen3vl.converters.storage.boxes import Shape
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.labels import Labels

LM_HEAD = "lm_head.weight"
SCORE = "score.weight"
SCORE_BIAS = "score.bias"
INPUT_EMBEDDING = "model.language_model.embed_tokens.weight"
FIRST_QUERY = "model.language_model.layers.0.self_attn.q_proj.weight"


@dataclass(frozen=True)
class Names:
    """One way of calling the tensors.

    Attributes:
        key: what a record of a form says.
        prefixes: how a name starts in `CURRENT`, and how it starts here.
        parts: what else in a name is called otherwise, in `CURRENT` and here.
        left_out: patterns of names here that belong to no Qwen3-VL and are not read.
        note: what a user should know; empty for nothing.
        read_by_transformers: whether transformers' class of it loads a model that is stored so.
    """

    key: str
    prefixes: tuple[tuple[str, str], ...] = ()
    parts: tuple[tuple[str, str], ...] = ()
    left_out: tuple[str, ...] = ()
    note: str = ""
    read_by_transformers: bool = True

    def stored_name(self, name: str) -> str:
        """Return what this form calls the tensor that the table calls `name`."""
        for current, here in self.parts:
            name = name.replace(current, here)
        for current, here in self.prefixes:
            if name.startswith(current):
                return here + name.removeprefix(current)
        return name

    def store[Value](self, values: Mapping[str, Value]) -> dict[str, Value]:
        """Return `values`, under the table's names, under those of this form."""
        return {self.stored_name(name): value for name, value in values.items()}

    def current_name(self, name: str) -> str:
        """Return what the table calls the tensor that this form calls `name`."""
        for current, here in self.parts:
            name = name.replace(here, current)
        for current, here in self.prefixes:
            if name.startswith(here):
                return current + name.removeprefix(here)
        return name

    def leaves_out(self, name: str) -> bool:
        """Return whether what is called `name` here is not read."""
        return any(re.search(pattern, name) for pattern in self.left_out)


CURRENT = Names("current")
BASE = Names(
    "base",
    (("model.language_model.", "language_model."), ("model.visual.", "visual.")),
    note="Tensors are named as Qwen3VLModel saves them, without the prefix `model.`.",
)
OLD = Names(
    "old",
    (("model.language_model.", "model."), ("model.visual.", "visual.")),
    note="Tensors have the names `model.layers` and `visual.` of older transformers, which "
    "transformers 5 does not load: `--expert-layout v5` of `convert` writes its names.",
    read_by_transformers=False,
)
TEXT_ONLY = Names("text", (("model.language_model.", "model."),))
"""The names of a language model alone, which has no vision tower."""
VISION_PARTS = ("blocks", "deepstack_merger_list", "merger", "patch_embed", "pos_embed")
COSMOS = Names(
    "cosmos3",
    (
        *((f"model.language_model.{part}", part) for part in ("embed_tokens.", "layers.", "norm.")),
        *((f"model.visual.{part}.", f"{part}.") for part in VISION_PARTS),
    ),
    left_out=(
        r"\.add_q_proj\.",
        r"\.add_k_proj\.",
        r"\.add_v_proj\.",
        r"\.to_add_out\.",
        r"\.norm_added_q\.",
        r"\.norm_added_k\.",
        r"moe_gen",
        r"^proj_out\.",
        r"^proj_in\.",
        r"^time_embedder\.",
        r"^audio_proj_out\.",
        r"^audio_proj_in\.",
        r"^audio_modality_embed$",
        r"^action_proj_out\.",
        r"^action_proj_in\.",
        r"^action_modality_embed$",
    ),
    note="Tensors are named as in Cosmos3 checkpoints; their reasoner, a Qwen3-VL, is read: "
    "`--expert-layout v5` of `convert` writes Qwen3-VL's names.",
    read_by_transformers=False,
)
"""Source: transformers' ``conversion_mapping`` of ``cosmos3_omni``, and the keys that its
``Cosmos3OmniPreTrainedModel`` ignores."""
COSMOS_NEW = replace(
    COSMOS,
    key="cosmos3, newer",
    parts=(
        (".self_attn.q_proj.", ".self_attn.to_q."),
        (".self_attn.k_proj.", ".self_attn.to_k."),
        (".self_attn.v_proj.", ".self_attn.to_v."),
        (".self_attn.o_proj.", ".self_attn.to_out."),
        (".self_attn.q_norm.", ".self_attn.norm_q."),
        (".self_attn.k_norm.", ".self_attn.norm_k."),
    ),
)


def names_in_transformers(*, has_vision: bool) -> Names:
    """Return how transformers' class of a model calls its tensors."""
    return CURRENT if has_vision else TEXT_ONLY


NAMES = {names.key: names for names in (CURRENT, BASE, OLD, TEXT_ONLY, COSMOS, COSMOS_NEW)}

LANGUAGE_MODEL, TIED_COPY, HEADLESS, CLASSIFIER = "language model", "tied copy", "none", "score"
HEADS = {
    LANGUAGE_MODEL: "",
    TIED_COPY: f"Embeddings are tied, and {LM_HEAD} is stored too; it equals the embedding and is "
    "kept once.",
    HEADLESS: f"This is a headless model, without {LM_HEAD} (if the embedding is its head, set "
    "tie_word_embeddings, at the top level of config.json, to true): it can be converted, and "
    "trained and scored with --task embedding, but all else needs a language model's head.",
    CLASSIFIER: f"This model has a classifier's head ({SCORE}), as reward models and rerankers "
    "have: it can be converted, and trained and scored with --task reward if it has one label, "
    "else with --task classify, but all else needs a language model's head.",
}
"""The kinds of head, as a record of a form has them, and what a user should know of each."""


@dataclass(frozen=True)
class HeadForm:
    """A head, with what the config does not say of it.

    Attributes:
        kind: one of `HEADS`.
        labels: rows of a classifier's ``score.weight``; 0 for others.
        bias: whether a classifier has ``score.bias``.
    """

    kind: str = LANGUAGE_MODEL
    labels: int = 0
    bias: bool = False

    @property
    def is_language_model(self) -> bool:
        """Whether the model predicts tokens, as everything that runs it needs."""
        return self.kind in (LANGUAGE_MODEL, TIED_COPY)

    @property
    def in_megatron(self) -> HeadForm:
        """The same head where a tied one is stored once."""
        return AS_CONFIG if self.kind == TIED_COPY else self


AS_CONFIG = HeadForm()
"""A language model's, tied to the embedding or not as the config says."""


def head_of(labels: Labels | None) -> HeadForm:
    """Return the head of a running model; None stands for logits, and no labels for no head."""
    if labels is None:
        return AS_CONFIG
    return HeadForm(CLASSIFIER, len(labels)) if labels else HeadForm(HEADLESS)


@dataclass(frozen=True)
class Form:
    """How one checkpoint is stored.

    Attributes:
        split_experts: how the table's names of those tensors of fused experts start that are
            written one by one, a tensor for each matrix of each expert.
    """

    names: Names = CURRENT
    head: HeadForm = AS_CONFIG
    split_experts: tuple[str, ...] = ()

    @property
    def for_transformers(self) -> Form:
        """The form that transformers would save the same model in."""
        names = self.names if self.names.read_by_transformers else CURRENT
        return Form(names, self.head.in_megatron)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know, one sentence or two each."""
        return tuple(filter(None, (HEADS[self.head.kind], self.names.note)))

    @property
    def record(self) -> dict[str, str | int | list[str]]:
        """What tells this form from another, for JSON."""
        head = self.head
        names = {"names": self.names.key}
        split = {"split_experts": list(self.split_experts)} if self.split_experts else {}
        return {**names, "head": head.kind, "labels": head.labels, "bias": head.bias, **split}

    def require_language_model(self, path: object) -> None:
        """Raise BadInput if the model at `path` has no head that predicts tokens."""
        if not self.head.is_language_model:
            raise BadInput(f"{path}: {HEADS[self.head.kind]} Name a checkpoint that has one.")

    def require_transformers(self, path: object) -> None:
        """Raise BadInput if transformers does not load a whole language model from `path`."""
        self.require_language_model(path)
        if not self.names.read_by_transformers:
            raise BadInput(f"{path}: {self.names.note}")


_WRAPPED = re.compile(
    r"^module\.|(?:^|\.)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
"""What wrappers put into names: DDP and DeepSpeed, torch.compile, FSDP, and checkpointing."""


def refuse_wrapped(names: Iterable[str], where: str) -> None:
    """Raise BadInput if a name has a wrapper's prefix, which is no part of the model."""
    for name in names:
        if wrapper := _WRAPPED.search(name):
            raise BadInput(
                f"{where} has the tensor {name:.200}, saved from within a wrapper (torch.compile, "
                f"DDP or FSDP) that put {wrapper[0].strip('.')!r} into its name. Save the model "
                "inside the wrapper, or rename the tensors."
            )


def recognise_form(shapes: Mapping[str, Shape], *, tied: bool, has_vision: bool) -> Form:
    """Tell the form of a checkpoint from the names that its tensors have in the files.

    The config says whether it ties head and embedding, and whether there is a vision tower.

    Raises:
        BadInput: tensors are named in two ways, or by a wrapper.
    """
    refuse_wrapped(shapes, "the checkpoint")
    schemes = {
        names.stored_name(INPUT_EMBEDDING): names  # of two that call it alike, the later one
        for names in NAMES.values()
        if names not in ((TEXT_ONLY,) if has_vision else (OLD, COSMOS, COSMOS_NEW))
        and names.stored_name(INPUT_EMBEDDING) in shapes
        and (not names.parts or names.stored_name(FIRST_QUERY) in shapes)
    }
    if len(schemes) > 1:
        both = " and ".join(schemes)
        raise BadInput(f"the checkpoint holds both {both}: files of two checkpoints are mixed.")
    return Form(next(iter(schemes.values()), CURRENT), _stored_head(shapes, tied))


def _stored_head(shapes: Mapping[str, Shape], tied: bool) -> HeadForm:
    if (score := shapes.get(SCORE)) is not None:
        return HeadForm(CLASSIFIER, labels=score[0] if score else 0, bias=SCORE_BIAS in shapes)
    if LM_HEAD in shapes:
        return HeadForm(TIED_COPY) if tied else AS_CONFIG
    return AS_CONFIG if tied else HeadForm(HEADLESS)


def rename_entries[Entry](entries: Mapping[str, Entry], names: Names) -> dict[str, Entry]:
    """Return `entries` under the table's names.

    Raises:
        BadInput: two of them come to have one name.
    """
    entries_by_name: dict[str, Entry] = {}
    for name, entry in entries.items():
        current = names.current_name(name)
        if current in entries_by_name:
            raise BadInput(
                f"the checkpoint holds the tensor {current} under two names: files of two "
                "checkpoints are mixed."
            )
        entries_by_name[current] = entry
    return entries_by_name
