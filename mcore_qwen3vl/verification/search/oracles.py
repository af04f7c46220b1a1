"""The oracles of the search: each says what is wrong with a case; :data:`ORACLES`.

An oracle takes a case, its outcome, and the bench, with which it may run other cases. It returns
what is wrong in words, an empty text if nothing is, or None if it does not know the case. It shares
no code with what it judges. Where two runs differ by design, an entry of :data:`BY_DESIGN` says so,
and the oracle knows it. The entry names the page of the documentation that tells users.
"""

from __future__ import annotations

import math
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.verification.runs import LOGGED
from mcore_qwen3vl.verification.search import plain
from mcore_qwen3vl.verification.search.case import Case
from mcore_qwen3vl.verification.search.comparing import (
    AGAIN,
    NEAR_EQUAL_EXPERTS,
    TOKEN_LOSSES,
    ByDesign,
    agree,
    compare,
    compare_nudged,
    compute_plainly,
    cuts_records,
    differences,
    end_of,
    image_budget,
    is_half,
    last_line,
    least_of,
    limits_again,
    limits_of,
)
from mcore_qwen3vl.verification.search.exports import (
    MTP_IS_COPIED,
    answers,
    converted_end,
    export,
    merge,
    scores,
)
from mcore_qwen3vl.verification.search.flags import computes_the_same
from mcore_qwen3vl.verification.search.running import Bench, CommandFailed, Outcome

Oracle = Callable[[Case, Outcome, Bench], str | None]


PACKS_OF_RANKS = ByDesign(
    "a buffer of packs is one for each data-parallel rank, so their number decides the packs",
    ("data.md", "samples per rank"),
)
PARTS_OF_TARS = ByDesign(
    "each data worker reads its own part of the tars, and its buffer holds samples of two epochs",
    ("data.md", "Each data worker has its own part of the shards"),
)
PARTS_OF_WORKERS = ByDesign(
    "with --no-balance, and packed pairs or tasks, each data worker packs its own part of the data",
    ("data.md", "each data worker packs its own part of each"),
)
ROUTER_LOSSES = ByDesign(
    "a router's balancing loss and its capacity are those of a micro-batch",
    ("training.md", "the tokens of a micro-batch"),
)
GLOBAL_ROUTER_LOSS = ByDesign(
    "global_aux_loss balances the micro-batches of the step so far, whose number DP decides",
    ("training.md", "with one micro-batch per rank, the global batch"),
)
TOWER_WITHOUT_IMAGES = ByDesign(
    "the tower is stepped by its moments and decay in a step without an image; plain.train does so",
    ("training.md", "In a step without an image"),
)
PACKS_WAIT = ByDesign(
    "packs that wait to be read may have no room",
    ("resume.md", "A layout that pads each sample to a larger multiple (2 x CP) is refused too"),
)
STREAMS_OF_WORKERS = ByDesign(
    "cannot be divided over",
    ("resume.md", "the same total for tars and with `--no-balance`; refused otherwise"),
)
WORKERS_OF_RANKS = ByDesign(
    "To go on with",
    ("resume.md", "the same total for tars and with `--no-balance`; refused otherwise"),
)
NOT_SAVED = ByDesign(
    "was saved without",
    ("resume.md", "A checkpoint that was saved with `--no-save-optim` goes on in this way alone"),
)
NEW_OPTIMIZER_STATE = ByDesign(
    "a run that does not load the optimizer's state goes on with moments of zero",
    ("resume.md", "`--no-load-optim` goes on at the same step of the data and of the schedule"),
)
FULL_DISK_ENDS_PYTHON = ByDesign(
    "Python's collector of garbage may crash once a disk is full",
    ("versions.md", "that can end a rank with SIGSEGV while megatron-core reports that the disk"),
)
REFUSED_RESUMES = (PACKS_WAIT, STREAMS_OF_WORKERS, WORKERS_OF_RANKS, NOT_SAVED)
"""Their texts are words of a refusal to go on."""
BY_DESIGN = (
    *REFUSED_RESUMES, MTP_IS_COPIED, NEAR_EQUAL_EXPERTS, FULL_DISK_ENDS_PYTHON, NEW_OPTIMIZER_STATE,
    PACKS_OF_RANKS, PARTS_OF_TARS, PARTS_OF_WORKERS, ROUTER_LOSSES, GLOBAL_ROUTER_LOSS,
    TOWER_WITHOUT_IMAGES,
)  # fmt: skip

_RANDOM = ("--hidden-dropout", "--attention-dropout", "--lora-dropout", "--moe-input-jitter-eps")
"""Flags under which each layout draws random numbers of its own."""


_PYTHON_ENDS_BY_SEGFAULT = sys.version_info < (3, 12, 7)
_NOT_A_NUMBER = "the loss is NaN or infinite"


def crashed(case: Case, outcome: Outcome, bench: Bench) -> str | None:
    """No traceback, no hang, no process or file that is left; exit codes as documented."""
    for number, ran in enumerate(outcome.ran, 1):
        if ran.crash and ran.filled and _PYTHON_ENDS_BY_SEGFAULT and "SIGSEGV" in ran.crash:
            continue  # FULL_DISK_ENDS_PYTHON
        if ran.crash and float(case.value("--adam-eps", "1")) == 0 and _NOT_A_NUMBER in ran.crash:
            return ""  # weights without a gradient, such as rows of unused tokens, become 0 / 0
        if case.has("--distributed-timeout-seconds-after-init") and "Timed out" in ran.crash:
            continue  # a second may be too short
        if ran.crash:
            return f"command {number} ended in a traceback: {last_line(ran.crash)}"
        if "Traceback (most recent call last)" in ran.printed:
            return f"command {number} printed a traceback: {last_line(ran.printed)}"
        if ran.left:
            return f"command {number} left {', '.join(ran.left)}"
        how = case.stop.how if case.stop and number == 1 else None
        if how == "disk full":
            continue  # how it ends is the last step's matter: it may have saved before
        expected = {0, 128 + signal.SIGTERM} if how == "SIGTERM" else {0}
        if not ran.refusal and how != "killed" and ran.exit_code not in expected:
            return f"command {number} ended with exit code {ran.exit_code}"
    return ""


def each_record_once(case: Case, outcome: Outcome, bench: Bench) -> str | None:
    """No record comes again before all others have come, also across a stop."""
    if not outcome.finished or case.has("--iterations-to-skip"):
        return None
    usable = {name for name, record in case.by_name.items() if "bad" not in record}
    sizes = _sequences(case)
    came: Counter[str] = Counter()
    epochs = int(case.value("--num-epochs", "0"))
    for step in sorted(outcome.samples):
        came += outcome.names(step)
        if unknown := came.keys() - usable:
            return f"step {step} trained on {', '.join(sorted(unknown))}, which cannot be used"
        if epochs or case.has("--packing") or case.form == "tars":
            continue
        left = usable - _too_long_for_a_row(outcome, usable)
        for some in _drawn_together(case, left):
            counts = [came[name] / sizes[name] for name in some]
            if counts and max(counts) - min(counts) > 1:
                return f"after step {step} the records came so often: {dict(sorted(came.items()))}"
    if epochs:
        left = usable - _too_long_for_a_row(outcome, usable)
        if wrong := {name: came[name] for name in left if came[name] != epochs * sizes[name]}:
            return f"in {epochs} epochs, records came so often: {dict(sorted(wrong.items()))}"
    return ""


def _drawn_together(case: Case, names: set[str]) -> Iterator[list[str]]:
    """Yield the records that have one order: all, or those of each part of a weighted mixture."""
    if case.form != "weighted mixture":
        yield list(names)
        return
    for part in (0, 1):
        yield [name for name in names if name.startswith(f"train-{part}.")]


def _sequences(case: Case) -> dict[str, int]:
    """Return how many sequences each record gives."""
    task, found = case.value("--task"), {}
    for name, record in case.by_name.items():
        count = 2 if "chosen" in record else 1
        if "query" in record:
            count = 1 + len(record.get("negatives", ())) + (task == "embedding")
        found[name] = count
    return found


def _too_long_for_a_row(outcome: Outcome, usable: set[str]) -> set[str]:
    """Return the records that never came, if the run says that some are too long for a row."""
    if not any(entry.get("over-long samples") for entry in outcome.log.values()):
        return set()
    return usable - {sample.name for some in outcome.samples.values() for sample in some}


def frozen(case: Case, outcome: Outcome, bench: Bench) -> str | None:
    """A part that does not train has no gradient, and its exported tensors are the model's."""
    parts = set(plain.PARTS) - set(_trained_parts(case))
    if not outcome.finished or not parts or case.trains_adapter:
        return None
    for step, entry in sorted(outcome.log.items()):
        for part in sorted(parts):
            if norm := entry.get(f"grad norm {part}"):
                return f"step {step}: {part} is frozen, and its gradient has the norm {norm}"
    exported = sorted((outcome.folder / "hf").glob("iter_*"))
    if not exported or case.has("--task") or is_half(case):
        return None
    # What a run copies of a model in FP8 is bfloat16, so only what was loaded has these values.
    copied = "mtp." if case.start == "fp8" else None
    (moved,) = run_layout(
        plain.moved_parts, 1, outcome.model, exported[-1], copied, timeout=bench.timeout
    )
    if wrong := parts & set(moved):
        return f"{', '.join(sorted(wrong))} is frozen, and its exported tensors are others"
    return ""


def _trained_parts(case: Case) -> tuple[str, ...]:
    """Return the parts that train, of a run without an adapter."""
    if case.has("--trainable"):
        return (case.value("--trainable"),)
    still = {part for name, *parts in case.flags if name == "--freeze" for part in parts}
    return tuple(part for part in plain.PARTS if part not in still)


def part_norms(case: Case, outcome: Outcome, bench: Bench) -> str | None:
    """The norms of the parts' gradients make the norm of the whole gradient."""
    # Megatron computes no norm where it clips none.
    if not outcome.log or float(case.value("--clip-grad", "1")) == 0:
        return None
    for step, entry in sorted(outcome.log.items()):
        whole = entry["grad norm"]
        parts = math.hypot(*(entry[f"grad norm {part}"] for part in plain.PARTS))
        # fp16 skips a step whose gradient is infinite.
        if whole is not None and not agree(whole, parts, LOGGED["grad norm"]):
            return f"step {step}: the gradient has the norm {whole}, and its parts make {parts}"
    return ""


def never_stopped(case: Case, outcome: Outcome, bench: Bench) -> str | None:
    """A stopped and resumed run is the unstopped run."""
    stop = case.stop
    if stop is None or not outcome.finished or _is_random(case, stop.layout):
        return None
    if stop.flags or _goes_on_otherwise(case):
        return None
    reference = replace(case, stop=None)
    whole = bench.run(reference)
    if not whole.finished:
        return f"only without a stop it ends so: {end_of(whole)}"
    same = stop.layout in (None, case.layout)
    if not same and _order_differs(case, case.layout, stop.layout or ""):
        return None
    limits = limits_again(case) if same else limits_of(case)
    return compare(outcome, reference, bench, limits, "the run without a stop")


def resumes(case: Case, outcome: Outcome, bench: Bench) -> str | None:
    """A run goes on under each layout under which it could have begun."""
    stop, refusal = case.stop, outcome.refusal
    if stop is None or stop.flags or len(outcome.ran) < 2 or not outcome.ran[-1].refusal:
        return None
    if any(difference.text in refusal for difference in REFUSED_RESUMES):
        return None
    begun = bench.run(replace(case, stop=None, layout=stop.layout or case.layout))
    return f"it does not go on: {refusal}" if begun.finished else ""


def single_rank(case: Case, outcome: Outcome, bench: Bench) -> str | None:
    """All layouts compute the same."""
    if Layout.parse(case.layout).world_size == 1 or not outcome.finished:
        return None
    if _is_random(case, "single") or _order_differs(case, case.layout, "single"):
        return None
    if _router_differs(case):
        return None
    stop = case.stop if _goes_on_otherwise(case) else None
    if stop is not None:
        stop = replace(stop, how="saved", layout=None)
    reference = replace(case, layout="single", stop=stop)
    alone = bench.run(reference)
    if not alone.finished:
        return None if alone.refusal else f"only on one rank it ends so: {end_of(alone)}"
    if case.stop and case.stop.layout and _order_differs(case, case.layout, case.stop.layout):
        return None
    return compare(outcome, reference, bench, limits_of(case), "one rank")


def _order_differs(case: Case, one: str, other: str) -> bool:
    """Return whether two layouts draw other samples in a step, or pack others, by design."""
    a, b = Layout.parse(one), Layout.parse(other)
    if case.form == "tars" and a.dp != b.dp:
        return True
    if not case.has("--packing"):  # rows are padded to a multiple, but hold the same samples
        return False
    return a.dp != b.dp or a.cp != b.cp


def _goes_on_otherwise(case: Case) -> bool:
    """Return whether a stop changes what is computed after it, by design.

    It does so if the run goes on with other flags, or without its optimizer's state.
    """
    if case.stop is None:
        return False
    changes = any(not computes_the_same(name) for name, *_ in case.stop.flags)
    return changes or case.has("--no-load-optim")


def _router_differs(case: Case) -> bool:
    return case.is_moe and case.value("--moe-router-load-balancing-type") == "global_aux_loss"


def _is_random(case: Case, other: str | None) -> bool:
    """Return whether a flag draws random numbers, and the case has another layout than `other`."""
    drawn = any(float(case.value(flag, "0")) > 0 for flag in _RANDOM)
    return drawn and other is not None and other != case.layout


# The plain loop.

_LOGGED = {
    "dpo": "dpo loss", "simpo": "simpo loss", "orpo": "orpo loss", "kto": "kto loss",
    "distill": "distill loss", "embedding": "contrastive loss", "reranker": "reranker loss",
}  # fmt: skip
_BETAS = {"dpo": (0.1, 0.0), "simpo": (2.0, 1.0), "orpo": (0.1, 0.0), "kto": (0.1, 0.0)}
"""The documented defaults of beta and gamma."""
_BALANCED = ("aux_loss", "seq_aux_loss", "none")
_KNOWN = {
    "--lr", "--adam-beta1", "--adam-beta2", "--adam-eps", "--weight-decay", "--clip-grad",
    "--loss", "--task", "--packing", "--no-balance", "--no-shuffle", "--seed", "--micro-batch-size",
    "--pad-to-longest", "--num-workers", "--seq-length", "--num-epochs", "--freeze", "--trainable",
    "--max-bad-fraction", "--moe-aux-loss-coeff", "--fp32", "--use-distributed-optimizer",
    "--packing-buffer", "--vision-lr-mult", "--aligner-lr-mult", "--lr-decay-style", "--min-lr",
    "--lr-warmup-iters", "--log-interval", "--reference", "--beta", "--simpo-gamma", "--lora-init",
    "--teacher", "--desirable-weight", "--undesirable-weight", "--answers", "--moe-z-loss-coeff",
    "--moe-router-load-balancing-type", "--image-min-pixels", "--image-max-pixels",
    "--image-max-tokens", "--eval-interval", "--spec",
}  # fmt: skip
"""Flags that the plain loop knows, or flags about the order of samples alone."""


def plain_loop(case: Case, outcome: Outcome, bench: Bench) -> str | None:
    """A loop of transformers and AdamW over the same records gives the same loss and norm."""
    if not outcome.finished or not outcome.log or _goes_on_otherwise(case):
        return None
    if (recipe := _recipe(case, outcome, bench)) is None:
        return None
    named, sizes = case.by_name, _sequences(case)
    steps: list[list[plain.Drawn]] = []
    for step in sorted(outcome.log):
        steps.append([])
        sequences = iter(outcome.samples.get(step, ()))
        for sample in sequences:
            steps[-1].append(plain.Drawn(named[sample.name], sample.micro_batch))
            for _ in range(sizes[sample.name] - 1):
                next(sequences)  # the others of a record have its name, too
    if not all(steps):
        return None  # a step without a record that can be used

    def compare_at(factor: float, limits: Mapping[str, float]) -> str | None:
        nudged = replace(recipe, lr=recipe.lr * factor)
        theirs = compute_plainly(bench, plain.train, outcome.model, steps, outcome.media, nudged)
        return None if theirs is None else _unlike_plain(outcome, theirs, recipe.loss, limits)

    return compare_nudged(case, limits_of(case), compare_at)


def _unlike_plain(
    outcome: Outcome, theirs: list[dict[str, float]], loss_of: str, limits: Mapping[str, float]
) -> str:
    """Return where a run's log differs from that of the plain loop; nothing if they agree."""
    for step, other in zip(sorted(outcome.log), theirs, strict=True):
        mine = outcome.log[step]
        loss = _LOGGED.get(loss_of, "lm loss")
        for key, name, kind in (
            ("loss", loss, "loss"), ("grad norm", "grad norm", "grad norm"),
            ("learning rate", "learning rate", "rate"),
        ):  # fmt: skip
            if not agree(mine[name], other[key], limits[kind], least_of(name)):
                return f"step {step}: {name} is {mine[name]}, and {other[key]} in the plain loop"
    return ""


def _answers(case: Case) -> tuple[str, str]:
    given = (flag for flag in case.flags if flag[0] == "--answers")
    _, yes, no = next(given, ("--answers", "yes", "no"))
    return yes, no


def _recipe(case: Case, outcome: Outcome, bench: Bench) -> plain.Recipe | None:
    """Return what the plain loop would do; None if it does not know a flag."""
    for name, *_ in case.flags:
        if name not in _KNOWN and not computes_the_same(name):
            return None
    loss = case.value("--task") or case.value("--loss", "cross_entropy")
    style = case.value("--lr-decay-style")
    if loss == "kto" and case.has("--packing"):
        return None  # the records of a pack exchange their answers, and packs are not noted
    if loss not in (*TOKEN_LOSSES, *_LOGGED) or cuts_records(case):
        return None
    if style not in ("constant", "linear", "cosine"):
        return None
    if case.is_moe and case.value("--moe-router-load-balancing-type", "aux_loss") not in _BALANCED:
        return None
    of_tokens = loss in (*TOKEN_LOSSES, "distill")
    balancing = _balancing(case, outcome.model, of_tokens)
    z_loss = float(case.value("--moe-z-loss-coeff", "0"))
    if case.is_moe and (balancing or z_loss) and not of_tokens:
        return None
    if case.has("--num-epochs") and style != "constant":
        return None  # the schedule's length is not in the case
    value = case.value
    beta, gamma = _BETAS.get(loss, (0.0, 0.0))
    return plain.Recipe(
        loss=loss,
        lr=float(value("--lr")),
        betas=(float(value("--adam-beta1", "0.9")), float(value("--adam-beta2", "0.999"))),
        eps=float(value("--adam-eps", "1e-8")),
        weight_decay=float(value("--weight-decay", "0.01")),
        clip=float(value("--clip-grad", "1.0")),
        style=style,
        warmup=int(value("--lr-warmup-iters", "0")),
        steps=case.steps,
        min_lr=float(value("--min-lr", "0")),
        trained=_trained_parts(case),
        multiples={part: float(value(f"--{part}-lr-mult", "1")) for part in plain.PARTS[:2]},
        beta=float(value("--beta", str(beta))),
        gamma=float(value("--simpo-gamma", str(gamma))),
        exchanging=int(value("--micro-batch-size")),
        longest=int(value("--seq-length")),
        wanted=float(value("--desirable-weight", "1")),
        unwanted=float(value("--undesirable-weight", "1")),
        answers=_answers(case),
        balancing=balancing,
        z_loss=z_loss,
        balances_samples=value("--moe-router-load-balancing-type") == "seq_aux_loss",
        budget=image_budget(case),
        teacher=bench.other_model(case) if loss == "distill" else None,
        adapter=outcome.folder / "adapter" if case.has("--lora-init") else None,
    )


def _balancing(case: Case, model: Path, of_tokens: bool) -> float:
    """Return the coefficient of the routers' balancing loss.

    Without the flag, only token losses take that of the model's config.
    """
    if not case.is_moe or case.value("--moe-router-load-balancing-type") == "none":
        return 0.0
    if case.has("--moe-aux-loss-coeff"):
        return float(case.value("--moe-aux-loss-coeff"))
    return plain.router_coefficient(model) if of_tokens else 0.0


def tokens(case: Case, outcome: Outcome, bench: Bench) -> str | None:
    """The tokens and the trained ones are those of the processor's chat template."""
    if case.has("--task") or cuts_records(case) or not outcome.samples:
        return None
    if case.value("--loss", "cross_entropy") not in TOKEN_LOSSES:
        return None
    named = case.by_name
    if any(name.startswith("--video-") for name, *_ in case.flags):
        return None
    processor = _processor(outcome.model, image_budget(case))
    weighs = case.value("--loss", "cross_entropy") != "cross_entropy"
    for sample in {s.name: s for some in outcome.samples.values() for s in some}.values():
        record = named[sample.name]
        try:
            expected = plain.encode(processor, record, outcome.media)
        except plain.NotPlain:
            continue
        ids = tuple(expected.inputs["input_ids"][0].tolist())
        if sample.tokens != ids:
            return f"{sample.name} has the tokens {sample.tokens}, and {ids} by the template"
        # The first token of a sequence has no loss, whatever its weight.
        mine = [weight if weighs else float(weight > 0) for weight in sample.weights[1:]]
        theirs = expected.weights.tolist()[1:]
        theirs = [weight if weighs else float(weight > 0) for weight in theirs]
        if mine != theirs:
            return f"{sample.name} has the weights {mine}, and {theirs} by the template"
    return ""


@cache
def _processor(folder: Path, budget: plain.ImageBudget) -> Any:
    return plain.load_processor(folder, budget)


def converted_start(case: Case, outcome: Outcome, bench: Bench) -> str | None:
    """A run from a converted model is the run from the model."""
    if case.start in ("published", "fp8") or not outcome.finished:
        return None
    other = bench.run(replace(case, start="published"))
    if not other.finished:
        return f"only from the Hugging Face model it ends so: {end_of(other)}"
    name = "the run from the Hugging Face model"
    return differences(outcome, other, limits_again(case), name)


def unvalidated(case: Case, outcome: Outcome, bench: Bench) -> str | None:
    """Validations change nothing in the training between them."""
    if not case.has("--eval-interval") or not case.validates or not outcome.finished:
        return None
    other = bench.run(replace(case.without("--eval-interval"), validates=False, behind=None))
    if not other.finished:
        return f"only without validations it ends so: {end_of(other)}"
    return differences(outcome, other, limits_again(case), "the run without validations")


def unused(case: Case, outcome: Outcome, bench: Bench) -> str | None:
    """What a run says that it does not use changes nothing in it."""
    if not outcome.finished or case.stop:
        return None
    said = re.findall(r"^not used of the command line: (--[\w-]+)", outcome.ran[0].printed, re.M)
    names = [name for name in dict.fromkeys(said) if case.has(name)]
    for name in names:
        without = bench.run(case.without(name))
        if without.finished and (text := differences(outcome, without, AGAIN, f"no {name}")):
            return f"{name} is said to be not used, and {text}"
    return "" if names else None


_REMEDY = re.compile(
    r"\b(?:[Gg]ive|[Aa]dd|[Uu]se|[Pp]ass|[Ss]et) (--[\w-]+)(?: ([^\s,;:()]*[^\s,;:().]))?"
)
_LEAVE_OUT = re.compile(r"(--[\w-]+)(?: [^\s,;:()]+)?:? (?:.*: )?leave (?:it|them) out")


def remedy(case: Case, outcome: Outcome, bench: Bench) -> str | None:
    """What a refusal tells to give or to leave out, given or left out, ends that refusal."""
    if not outcome.refusal or case.stop:
        return None
    others = list(remedied(case, outcome.refusal))
    for other in others:
        again = bench.run(other)
        if _without_numbers(again.refusal) == _without_numbers(outcome.refusal):
            return f"its remedy does not help: {outcome.refusal}"
    return "" if others else None


def remedied(case: Case, refusal: str) -> Iterator[Case]:
    """Yield the case with each remedy that a refusal names by a flag."""
    for name, value in _REMEDY.findall(refusal):
        words = (name, value) if value and re.fullmatch(r"[a-z0-9.+-]+", value) else (name,)
        if value.isupper() or value.startswith("--"):
            continue  # a value that only the user knows
        if name in ("--global-batch-size", "--train-iters"):
            if not value.isdigit():
                continue
            count = int(value)
            yield (
                replace(case, batch=count)
                if name == "--global-batch-size"
                else replace(case, steps=count)
            )
            continue
        yield replace(case, flags=(*case.without(name).flags, words))
    for name in _LEAVE_OUT.findall(refusal):
        if case.has(name):
            yield case.without(name)


def _without_numbers(text: str) -> str:
    return re.sub(r"[0-9][0-9.e+-]*", "#", text)


ORACLES: tuple[Oracle, ...] = (
    crashed, each_record_once, frozen, part_norms, never_stopped, converted_start, single_rank,
    tokens, plain_loop, unvalidated, export, converted_end, scores, answers, merge, unused, resumes,
    remedy,
)  # fmt: skip
"""Those that need no other run come first."""


@dataclass(frozen=True)
class Verdict:
    """What an oracle found wrong."""

    oracle: str
    text: str

    @property
    def kind(self) -> str:
        """What stays the same in a smaller case: the oracle, and the error of a traceback."""
        if self.oracle != crashed.__name__:
            return self.oracle
        return re.sub(r"[0-9][0-9.e+-]*|/[\w./-]+", "#", self.text)


def judge(
    case: Case, bench: Bench, oracles: tuple[Oracle, ...] = ORACLES
) -> tuple[Outcome, Verdict | None]:
    """Run a case, and return the first oracle's verdict that finds it wrong.

    The outcome names the oracles that know the case.
    """
    outcome = bench.run(case)
    outcome.judged_by = []
    for oracle in oracles:
        try:
            text = oracle(case, outcome, bench)
        except CommandFailed as error:
            text = " ".join(str(error).split())[:300]
        except Exception as error:
            text = f"it cannot be judged: {type(error).__name__}: {last_line(str(error))}"
        if text is not None:
            outcome.judged_by.append(oracle.__name__)
        if text:
            return outcome, Verdict(oracle.__name__, text)
    return outcome, None
