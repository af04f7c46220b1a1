"""What a loss is to the rest of the package: a subclass of :class:`Loss`.

The command line reads the subclasses before torch and megatron are imported, so a loss's file
names those lazily (``mcore_qwen3vl.lazy``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.record_form import RecordForm
from mcore_qwen3vl.data.sidecar import Sidecar
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.flags import flag_of
from mcore_qwen3vl.labels import Labels
from mcore_qwen3vl.lazy import Lazy
from mcore_qwen3vl.settings.lora import LoraSettings
from mcore_qwen3vl.settings.run import RunSettings

if TYPE_CHECKING:
    from mcore_qwen3vl import forward
    from mcore_qwen3vl.forward import RunBatch
    from mcore_qwen3vl.losses.reduction import Objective
else:
    forward = Lazy("mcore_qwen3vl.forward")


class FrozenModel(NamedTuple):
    """The flag that names a second, frozen model, and its checkpoint of either kind."""

    flag: str
    path: str


@dataclass(frozen=True)
class Loss:
    """A loss, or a family of losses that share their settings, with what a command line says.

    A subclass is a frozen dataclass. Each of its fields but `name` is a flag, whose docstring is
    the flag's help (``mcore_qwen3vl.flags``); it is None where the command line says nothing.

    Attributes:
        name: the one of `names` that the run minimises.
        flag: the flag whose values the names are, ``--loss`` or ``--task``.
        names: the values of that flag.
        group: the title of the flags in ``--help``.
        help: what `flag`'s help says about the names.
        unit: what the loss is a mean over, in the plural.
        groups: whether a record may give several sequences, which stay in one micro-batch.
        exchanges: whether the records of a micro-batch exchange answers, on which its loss depends.
        takes_mtp: whether multi-token prediction can be trained beside it.
        lm_head: whether the model has the head ``lm_head``.
        trains_score: whether it has the head ``score`` in its place.
        records: how it reads records; None: it predicts tokens of conversations and documents.
        made_up_records: options of :func:`.write_half_images`, for the data of a rehearsal.
        logged: the names in the log of what is minimised, one of which a run has.
    """

    name: str = ""

    flag: ClassVar[str] = "--loss"
    names: ClassVar[tuple[str, ...]] = ()
    group: ClassVar[str] = ""
    help: ClassVar[str] = ""
    unit: ClassVar[str] = "tokens"
    groups: ClassVar[bool] = False
    exchanges: ClassVar[bool] = False
    takes_mtp: ClassVar[bool] = False
    lm_head: ClassVar[bool] = True
    trains_score: ClassVar[bool] = False
    records: ClassVar[RecordForm | None] = None
    made_up_records: ClassVar[Mapping[str, bool]] = MappingProxyType({})
    logged: ClassVar[tuple[str, ...]] = ()

    @property
    def chosen_by(self) -> str:
        """The flag and its value, such as ``--loss kto``."""
        return f"{self.flag} {self.name}"

    @property
    def scored_by(self) -> str | None:
        """What chose it, if it trains the head ``score``; otherwise None."""
        return self.chosen_by if self.trains_score else None

    @classmethod
    def owners(cls) -> Mapping[str, Collection[str]]:
        """Return the names that each flag is for, where it is not for all of them."""
        return {}

    def check_alone(self, run: RunSettings) -> None:
        """Raise BadInput for flags that contradict the choice of this loss.

        It is called first; then the flags of other losses are refused.
        """

    def complete(self, run: RunSettings, lora: LoraSettings, architecture: Architecture) -> Self:
        """Return this loss with the defaults that depend on the other settings.

        It raises BadInput if the flags do not fit one another or the others.
        """
        return self

    def labels(self, run: RunSettings, lora: LoraSettings) -> Labels | None:
        """Return the labels of the model's head; none: it has no head; None: it has lm_head."""
        return None

    def checkpoints(self) -> dict[str, str | None]:
        """Return the checkpoints that flags of the loss name, by the flags."""
        return {}

    def frozen_model(self, run: RunSettings, lora: LoraSettings) -> FrozenModel | None:
        """Return the frozen model that runs beside the trained one, if there is one."""
        return None

    def sidecar(self, run: RunSettings, lora: LoraSettings) -> Sidecar | None:
        """Return the kind of file that is read beside each data set; None: none."""
        return None

    def reads(self, run: RunSettings, lora: LoraSettings) -> dict[str, Any]:
        """Return the fields of the data config that the loss decides, but for its sidecar."""
        return {"records": self.records}

    def summary(self, run: RunSettings, lora: LoraSettings) -> list[tuple[str, str]]:
        """Return the rows about the loss in the summary at the start of a run."""
        return [("loss", self.name)]

    def objective(self, run: RunSettings, lora: LoraSettings) -> Objective:
        """Return what makes the loss of a micro-batch from what :meth:`compute` returned."""
        raise NotImplementedError

    def compute(self, run: RunSettings) -> RunBatch:
        """Return what runs a micro-batch through a pipeline chunk; by default cross entropies."""
        return forward.forward

    def schedule(
        self, run: RunSettings, lora: LoraSettings, frozen: Any
    ) -> Callable[..., Any] | None:
        """Return ``(schedule, **arguments)``, which runs Megatron's after passes of its own.

        Args:
            frozen: makes of the model a context that gives the frozen one; None: there is none.

        Returns:
            None if Megatron's schedule is run as it is.
        """
        return None


def refuse_without(owner: str, flags: Mapping[str, Any]) -> None:
    """Raise BadInput if one of `flags` is set, which have a meaning only with the flag `owner`."""
    if wrong := [flag_of(name) for name, value in flags.items() if value is not None]:
        raise BadInput(f"{', '.join(wrong)} is set without {owner}: add it, or drop the flag.")


def refuse_router_losses(run: RunSettings, owner: str, unit: str) -> None:
    """Raise BadInput if a router's loss is added to that of flag `owner`, a mean over `unit`."""
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
        value = getattr(run.compute, name)
        values = value if isinstance(value, tuple) else (value or 0.0,)  # one for each kind of loss
        if any(values):
            flag = " ".join([flag_of(name), *(f"{value:g}" for value in values)])
            raise BadInput(
                f"{flag} with {owner}: Megatron adds the router's losses up over tokens, and this "
                f"loss is a mean over {unit}, so they would weigh hundreds of times too much. Set "
                "it to 0."
            )


def refuse_noise(run: RunSettings, owner: str, why: str) -> None:
    """Raise BadInput if two passes differ in training, with which the loss of `owner` is wrong."""
    names = ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps")
    for name in names:
        if rate := getattr(run.compute, name):
            raise BadInput(f"{flag_of(name)} {rate:g} with {owner}: {why} Leave it out.")


def without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `values` that flags give; the loss has its own defaults for the others."""
    return {name: value for name, value in values.items() if value is not None}


def require(name: str, value: float, holds: bool, what: str) -> None:
    """Raise BadInput, which says what the value must be, unless it `holds`."""
    if not holds:
        raise BadInput(f"{name} is {value:g}: it must be {what}.")
