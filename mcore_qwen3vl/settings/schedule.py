"""The settings of the learning rate's and the weight decay's schedule, all of them Megatron's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.flags import Flag

ITERS, SAMPLES = "iters", "samples"
"""What lengths count, as flags such as ``--lr-decay-iters`` and ``--lr-decay-samples`` end."""
_WSD = "WSD"


class _Lengths(NamedTuple):
    """The lengths of the schedule that flags give in one unit."""

    lr_decay: int | None
    lr_warmup: int | None
    lr_wsd_decay: int | None


_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def growing_batches(schedule: str) -> list[tuple[int, int]]:
    """Read ``--step-batch-size-schedule``: from which token on a step takes how many samples.

    It is Megatron's format, ``0:768 250B:1536``. A row counts for ``--seq-length`` tokens, whatever
    it holds.

    Raises:
        BadInput: it has another format.
    """
    pairs = []
    for entry in schedule.replace(",", " ").split():
        start, _, batch = entry.partition(":")
        factor = _SUFFIXES.get(start[-1:].upper(), 1)
        try:
            pairs.append((int(float(start if factor == 1 else start[:-1]) * factor), int(batch)))
        except (ValueError, OverflowError):
            raise BadInput(
                f"--step-batch-size-schedule: {entry!r} is no TOKENS:SAMPLES, such as 250M:64."
            ) from None
    return pairs


def samples_of_growing_batches(schedule: str, samples: int, seq_length: int) -> int:
    """Return how many samples a run of `samples` takes: its last step may go beyond them.

    Source: Megatron's ``update_train_iters``, which counts steps until the samples are reached.
    """
    batches = growing_batches(schedule)
    starts = [start // seq_length for start, _ in batches]
    taken = 0
    for (_, batch), end in zip(batches, [*starts[1:], samples], strict=True):
        taken += -(-max(min(end, samples) - taken, 0) // batch) * batch
    return taken


@dataclass(frozen=True)
class ScheduleSettings:
    """Megatron's flags about the schedule, whose constraints it asserts when training begins."""

    lr: float = 1e-5
    min_lr: float = 0.0
    lr_decay_style: str = "linear"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_warmup_init: float = 0.0
    lr_warmup_fraction: float | None = None
    lr_warmup_iters: int | None = None
    lr_warmup_samples: int | None = None
    lr_wsd_decay_iters: int | None = None
    lr_wsd_decay_samples: int | None = None
    weight_decay_incr_style: str = "constant"
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    override_opt_param_scheduler: Annotated[
        bool, Flag(aliases=("--override-opt_param-scheduler",))
    ] = False
    use_checkpoint_opt_param_scheduler: Annotated[
        bool, Flag(aliases=("--use-checkpoint-opt_param-scheduler",))
    ] = False

    @property
    def has_warmup(self) -> bool:
        """Whether the learning rate rises first."""
        return bool(self.lr_warmup_fraction or self.lr_warmup_iters or self.lr_warmup_samples)

    @property
    def is_wsd(self) -> bool:
        """Whether the learning rate stays, and falls at the end."""
        return self.lr_decay_style == _WSD

    def check(self, unit: str) -> None:
        """Refuse, with BadInput, values that no schedule can have; `unit`: of the run's length."""
        if not 0 <= self.min_lr <= self.lr:
            raise BadInput(
                f"--min-lr {self.min_lr:g} with --lr {self.lr:g}: the learning rate falls to "
                "--min-lr, so it is at least 0 and at most --lr."
            )
        if not 0 <= self.lr_warmup_init <= self.lr:
            raise BadInput(
                f"--lr-warmup-init {self.lr_warmup_init:g} with --lr {self.lr:g}: the learning "
                "rate rises from there to --lr, so it is at least 0 and at most --lr."
            )
        if self.lr_warmup_fraction is not None and not 0 <= self.lr_warmup_fraction < 1:
            raise BadInput(
                f"--lr-warmup-fraction {self.lr_warmup_fraction:g}: it is a part of the schedule, "
                "at least 0 and below 1. A number of steps is --lr-warmup-iters."
            )
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            raise BadInput(
                "--override-opt-param-scheduler takes the schedule of the command line, and "
                "--use-checkpoint-opt-param-scheduler that of the checkpoint: leave one out."
            )
        self._check_weight_decay()
        other = SAMPLES if unit == ITERS else ITERS
        pairs = zip(self._lengths(unit), self._lengths(other), strict=True)
        for name, (value, in_other) in zip(_Lengths._fields, pairs, strict=True):
            if in_other and not value:
                raise BadInput(
                    f"{_flag(name, other)} {in_other}: the length of this run is a number of "
                    f"{'steps' if unit == ITERS else 'samples'}, so give {_flag(name, unit)} N."
                )
            least = int(name == "lr_decay")  # a schedule without a step is none to Megatron
            if value is not None and value < least:
                raise BadInput(f"{_flag(name, unit)} is {value}; it is at least {least}.")

    def _lengths(self, unit: str) -> _Lengths:
        """Return the lengths that flags give in this unit."""
        if unit == ITERS:
            return _Lengths(self.lr_decay_iters, self.lr_warmup_iters, self.lr_wsd_decay_iters)
        return _Lengths(self.lr_decay_samples, self.lr_warmup_samples, self.lr_wsd_decay_samples)

    def _check_weight_decay(self) -> None:
        start, end = self.start_weight_decay, self.end_weight_decay
        if self.weight_decay_incr_style == "constant":
            if start != end:  # Megatron's validation sets both to --weight-decay
                raise BadInput(
                    "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style "
                    "linear or cosine; a constant one is --weight-decay X."
                )
        elif start is None or end is None or not 0 <= start <= end:
            raise BadInput(
                f"--weight-decay-incr-style {self.weight_decay_incr_style} needs "
                "--start-weight-decay X and --end-weight-decay Y, with 0 <= X <= Y."
            )

    def check_length(self, length: int, unit: str) -> None:
        """Refuse, with BadInput, a warm-up or a decay that a run of this length has no room for."""
        lengths = self._lengths(unit)
        decay = lengths.lr_decay or length
        steps = "steps" if unit == ITERS else "samples"
        where = f"a run of {length} {steps}"
        if decay != length:
            where = f"{_flag('lr_decay', unit)} {decay}"
        warmup = lengths.lr_warmup or 0
        if warmup >= decay:
            raise BadInput(
                f"{_flag('lr_warmup', unit)} {warmup} with {where}: the learning rate has to reach "
                f"--lr before that. Give at most {decay - 1}, or --lr-warmup-fraction 0.1."
            )
        if not self.is_wsd:
            return
        room = decay - (warmup or int((self.lr_warmup_fraction or 0) * decay))
        falling = lengths.lr_wsd_decay
        if falling is None or falling > room:
            given = "" if falling is None else f", and not {falling}"
            raise BadInput(
                f"--lr-decay-style WSD with {where} needs the {steps} at its end in which the "
                f"learning rate falls: give {_flag('lr_wsd_decay', unit)} N, at most {room}{given}."
            )


def _flag(name: str, unit: str) -> str:
    return f"--{name.replace('_', '-')}-{unit}"
