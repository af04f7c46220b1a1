"""The axes of the search: each is a function that draws one side of a case at random.

An axis takes the case as far as it has been drawn. It reads its choices from this package's own
tables, so that a new loss, flag or family of models is drawn without being named here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from itertools import product
from random import Random
from typing import Any, get_args

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.losses.loss import Loss
from mcore_qwen3vl.losses.registry import all_losses
from mcore_qwen3vl.tiny.tiny_checkpoint import (
    FAMILIES_WITHOUT_TOWER,
    FamilyName,
    tiny_config,
)
from mcore_qwen3vl.verification.search import records
from mcore_qwen3vl.verification.search.case import (
    ADAPTER,
    OTHER,
    Behind,
    Case,
    Flag,
    How,
    Start,
    Stop,
    path_of,
)
from mcore_qwen3vl.verification.search.data_files import Form
from mcore_qwen3vl.verification.search.flags import drawable

Axis = Callable[[Random, Case], Case]

MOST_RANKS = 4


def model(rng: Random, case: Case) -> Case:
    """A tiny model of any family, with or without a tower."""
    family = rng.choice(get_args(FamilyName))
    words: tuple[str, ...] = () if family == get_args(FamilyName)[0] else ("--family", family)
    words += ("--moe",) * (rng.random() < 0.4)
    words += ("--tie",) * (rng.random() < 0.2)
    if family in FAMILIES_WITHOUT_TOWER:
        words += ("--text-only",) * (rng.random() < 0.3)
    return replace(case, model=words)


def loss(rng: Random, case: Case) -> Case:
    """A loss of the registry, and records for it; half of the cases train on answers' tokens."""
    kinds = [(loss, name) for loss in all_losses() for name in loss.names]
    default = next(one for one in kinds if one[1] == "cross_entropy")
    weighted = [one for one in kinds if one[0] is default[0] and one is not default]
    kind, name = rng.choice(rng.choice(([default], [default], weighted, kinds, kinds, kinds)))
    flags = case.flags if name == default[1] else (*case.flags, *flags_of(kind, name))
    makers, bad = records.makers_of(kind, name), False
    if kind is default[0]:
        bad = rng.random() < 0.15
        flags += (("--max-bad-fraction", "1"),) * bad
    if not case.has_vision:
        makers = records.without_media(makers)
    lines = records.lines(rng, makers, rng.choice((3, 4, 5, 7, 8)), bad)
    return replace(case, flags=flags, records=lines)


def flags_of(kind: type[Loss], name: str) -> tuple[Flag, ...]:
    """Return the flags that ask for a loss of the registry, with the flags it needs."""
    needed: dict[str, tuple[Flag, ...]] = {
        "distill": (("--teacher", OTHER),),
        "dpo": (("--reference", "model"),),
        # The records of a micro-batch exchange their answers.
        "kto": (("--reference", "model"), ("--micro-batch-size", "2")),
        # These are one token each in the vocabulary of tiny models.
        "reranker": (("--answers", "a", "b"),),
        "classify": (("--num-labels", "3"),),
    }
    return ((kind.flag, name), *needed.get(name, ()))


def files(rng: Random, case: Case) -> Case:
    """What the data are and where the weights come from; mostly a JSONL file, and a model."""
    form = rng.choice(get_args(Form)) if rng.random() < 0.3 else case.form
    if len(case.records) < 2 and form.endswith("mixture"):
        form = case.form
    starts = [one for one in get_args(Start) if one != "hybrid" or "--family" not in case.model]
    start = rng.choice(starts) if rng.random() < 0.25 else case.start
    return replace(case, form=form, start=start)


def batches(rng: Random, case: Case) -> Case:
    """Rows, packs, micro-batches and workers."""
    flags: list[Flag] = []
    if rng.random() < 0.35:
        flags += [("--packing",)]
        flags += [("--no-balance",)] * (rng.random() < 0.3)
    else:
        flags += [("--micro-batch-size", rng.choice("123"))] * (rng.random() < 0.4)
        flags += [("--pad-to-longest",)] * (rng.random() < 0.4)
    flags += [("--no-shuffle",)] * (rng.random() < 0.2)
    flags += [("--num-workers", rng.choice("12"))] * (rng.random() < 0.15)
    flags += [("--seq-length", rng.choice(("64", "128", "512")))] * (rng.random() < 0.3)
    return replace(case, flags=(*case.flags, *flags))


def length(rng: Random, case: Case) -> Case:
    """The steps of the run, or its epochs, and its global batch."""
    micro = int(case.value("--micro-batch-size"))
    batch = micro * rng.choice((2, 2, 4))
    if rng.random() < 0.2 and case.form != "tars":
        return replace(case, batch=batch, flags=(*case.flags, ("--num-epochs", rng.choice("12"))))
    return replace(case, batch=batch, steps=rng.choice((1, 2, 2, 3, 4)))


def trained(rng: Random, case: Case) -> Case:
    """What trains: all, a part, or an adapter."""
    choices: list[tuple[Flag, ...]] = [
        *[()] * 5, (("--lora-rank", "2"),), (("--lora-rank", "4"), ("--lora-alpha", "8")),
        (("--lora-init", ADAPTER),),
    ]  # fmt: skip
    if case.has_vision:
        choices += [(("--freeze", "vision"),), (("--trainable", "aligner"),)]
        choices += [(("--vision-lr-mult", "0.1"),), (("--aligner-lr-mult", "5"),)] * 2
    flags = rng.choice(choices)
    return replace(case, flags=(*case.flags, *flags))


def recipe(rng: Random, case: Case) -> Case:
    """Values of the optimizer and of the schedule, each in a third of the cases."""
    choices: tuple[tuple[Flag, ...], ...] = (
        (("--lr-decay-style", rng.choice(("linear", "cosine"))),),
        (("--weight-decay", rng.choice(("0", "10"))),),
        (("--adam-beta1", "0.7"), ("--adam-beta2", "0.9")),
        (("--clip-grad", rng.choice(("0", "0.1"))),),
        (("--lr-warmup-iters", "1"),) * (case.steps > 2 and not case.has("--num-epochs")),
        (("--seed", "7"),),
        (("--bf16",),),
    )
    some = [flag for flags in choices if rng.random() < 0.2 for flag in flags]
    some += [("--use-distributed-optimizer",)] * (rng.random() < 0.5)
    if case.is_moe and rng.random() < 0.5:  # without it, the plain loop knows the run
        some.append(("--moe-aux-loss-coeff", "0"))
    return replace(case, flags=(*case.flags, *some))


def further_flags(rng: Random, case: Case) -> Case:
    """Up to two of all flags that reach a run, with values at and beyond their borders."""
    named = {name for name, *_ in case.flags}
    free = [flag for flag in drawable() if flag.name not in named]
    some = rng.sample(free, rng.choice((0, 0, 0, 1, 1, 2)))
    return replace(case, flags=(*case.flags, *(flag.draw(rng) for flag in some)))


def layout(rng: Random, case: Case) -> Case:
    """A layout of up to four ranks that the model fits, with a batch divisible by its ranks."""
    if rng.random() < 0.25:
        return case
    two = [one for one in layouts(case.model) if Layout.parse(one).world_size == 2]
    drawn = rng.choice(two if rng.random() < 0.7 else layouts(case.model))
    rows = int(case.value("--micro-batch-size")) * Layout.parse(drawn).dp
    return replace(case, layout=drawn, batch=-(-case.batch // rows) * rows)


def stop(rng: Random, case: Case) -> Case:
    """An early end, after which the run goes on, in every second case under another layout."""
    if case.has("--num-epochs") or rng.random() < 0.45:
        return case
    case = replace(case, steps=max(case.steps, 3))
    how = rng.choice(("saved", *get_args(How)))
    other: str | None = None
    changed: tuple[Flag, ...] = ()
    if rng.random() < 0.5:
        other = _other_layout(rng, case)
    if rng.random() < 0.25:
        changed = (rng.choice(drawable()).draw(rng),)
    return replace(case, stop=Stop(how, rng.randint(1, case.steps - 2), other, changed))


def _other_layout(rng: Random, case: Case) -> str:
    """Draw in which size a layout differs, and then a layout."""
    rows = case.batch // int(case.value("--micro-batch-size"))
    fitting = [one for one in layouts(case.model) if rows % Layout.parse(one).dp == 0]
    mine = Layout.parse(case.layout)
    by_size = {
        size: some
        for size in ("tp", "pp", "vpp", "ep", "etp", "cp", "dp", "sp")
        if (some := [n for n in fitting if getattr(Layout.parse(n), size) != getattr(mine, size)])
    }
    sizes = list(by_size) + ["ep"] * 3 * ("ep" in by_size)  # experts alone have groups of their own
    return rng.choice(by_size[rng.choice(sizes)] if by_size else fitting)


def end(rng: Random, case: Case) -> Case:
    """Validations, an export at the end, and a command that reads it."""
    if rng.random() < 0.7:
        return case
    often = (("--eval-interval", "1"),) * (not case.has("--eval-interval") and rng.random() < 0.4)
    behind = rng.choice((None, *get_args(Behind)))
    return replace(case, flags=(*case.flags, *often), validates=True, behind=behind)


def on_gpus(rng: Random, case: Case) -> Case:
    """The case on GPUs, with Transformer Engine in every second one if it is installed."""
    installed = find_spec("transformer_engine") is not None
    if installed and not case.has("--spec") and rng.random() < 0.5:
        case = replace(case, flags=(*case.flags, ("--spec", "te")))
    return replace(case, device="cuda")


AXES: tuple[Axis, ...] = (
    model, loss, files, batches, length, trained, recipe, further_flags, layout, stop, end,
)  # fmt: skip
"""In the order in which they are drawn."""


def draw(rng: Random, axes: tuple[Axis, ...] = AXES) -> Case:
    """Draw a case."""
    case = Case()
    for axis in axes:
        case = axis(rng, case)
    return case


@cache
def layouts(model: tuple[str, ...]) -> tuple[str, ...]:
    """Return all layouts of up to four ranks that a model fits: a tiny model, or one at a path."""
    if path := path_of(model):
        return tuple(str(one) for one in _fitting(Architecture.from_hf(path)))
    family: Any = model[model.index("--family") + 1] if "--family" in model else "qwen3-vl"
    config = tiny_config(family=family, moe="--moe" in model, text_only="--text-only" in model)
    architecture = Architecture.from_hf(config)
    return tuple(str(one) for one in _fitting(architecture))


def _fitting(architecture: Architecture) -> Iterator[Layout]:
    two = (1, 2)
    for tp, pp, vpp, cp, dp, ep, etp, sp in product(two, two, two, two, two, two, two, (0, 1)):
        if not architecture.is_moe and (ep > 1 or etp > 1):
            continue
        one = Layout(tp=tp, pp=pp, vpp=vpp, cp=cp, dp=dp, ep=ep, etp=etp, sp=bool(sp))
        if one.world_size > MOST_RANKS:
            continue
        try:
            one.validate(architecture)
        except BadInput:
            continue
        yield one
