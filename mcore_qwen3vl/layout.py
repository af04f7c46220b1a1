"""A layout: one choice of all parallel sizes, checked against a model before anything starts."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from typing import Any, Self

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.errors import BadInput


@dataclass(frozen=True)
class Layout:
    """All parallel sizes, named as Megatron names them.

    A layout is written as ``tp2xpp2+sp``; sizes of one are left out, and one rank alone is
    ``single``. A part with a ``|``, as in ``pp2+E|ttt|t|L``, is the pipeline's split, which also
    sets VPP.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1
    dp: int = 1
    sp: bool = False
    first: int | None = None  # decoder layers on the first pipeline stage, if not an equal share
    last: int | None = None  # decoder layers on the last pipeline stage, if not an equal share
    split: str | None = None  # what each virtual stage holds, in the form that `read_split` reads

    def __post_init__(self) -> None:
        if self.split is not None:
            stages = len(read_split(self.split))
            # The class is frozen, so the field cannot simply be assigned to.
            object.__setattr__(self, "vpp", max(stages // max(self.pp, 1), 1))

    @property
    def world_size(self) -> int:
        """The number of ranks; EP and ETP regroup the TP x CP x DP ranks and add none."""
        return self.tp * self.pp * self.cp * self.dp

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a layout as :meth:`__str__` writes it, with its parts in any order.

        Raises:
            BadInput: a part is not a known name with a number.
        """
        sizes: dict[str, Any] = {}
        names = [f.name for f in fields(cls) if f.name not in ("sp", "split")]
        for part in re.split(r"[x+,\s]+", text.strip()):
            if "|" in part:
                sizes["split"] = part
                continue
            part = part.lower()
            match = re.fullmatch(f"({'|'.join(names)})=?([1-9][0-9]*)", part)
            if part == "sp":
                sizes["sp"] = True
            elif match:
                sizes[match[1]] = int(match[2])
            elif part != "single":
                raise BadInput(
                    f"Layout {text!r} is not understood at {part!r}: write sizes as in "
                    f"tp2xpp2+sp, with any of {', '.join(names)} followed by a number, and sp."
                )
        return cls(**sizes)

    @classmethod
    def from_flags(cls, flags: Any, world_size: int, *, moe: bool) -> Self:
        """Read Megatron's flags, without checking that the sizes fit one another.

        They have the attributes of Megatron's parser, whether validated or not; VERL's engine
        config has the same. DP follows from the number of ranks. With `moe`, ETP is TP unless a
        flag sets it.
        """
        tp, pp = flags.tensor_model_parallel_size, flags.pipeline_model_parallel_size
        cp = flags.context_parallel_size
        chunks = getattr(flags, "num_virtual_stages_per_pipeline_rank", None)
        return cls(
            tp=tp,
            pp=pp,
            # Megatron's validation derives the first, from whichever flag sets the chunks.
            vpp=getattr(flags, "virtual_pipeline_model_parallel_size", None) or chunks or 1,
            ep=flags.expert_model_parallel_size,
            etp=flags.expert_tensor_parallel_size or (tp if moe else 1),
            cp=cp,
            dp=max(world_size // max(tp * pp * cp, 1), 1),
            sp=flags.sequence_parallel and tp > 1,  # Megatron turns it off without TP
            first=getattr(flags, "decoder_first_pipeline_num_layers", None),
            last=getattr(flags, "decoder_last_pipeline_num_layers", None),
            split=getattr(flags, "pipeline_model_parallel_layout", None),
        )

    def flags(self, *, moe: bool) -> list[str]:
        """Return Megatron's flags for this layout, which :meth:`from_flags` reads."""
        sizes = {
            "tensor-model-parallel-size": self.tp,
            "pipeline-model-parallel-size": self.pp,
            "context-parallel-size": self.cp,
            "expert-model-parallel-size": self.ep,
            "num-virtual-stages-per-pipeline-rank": 1 if self.split else self.vpp,
        }
        values: dict[str, Any] = {name: size for name, size in sizes.items() if size > 1}
        values["decoder-first-pipeline-num-layers"] = self.first
        values["decoder-last-pipeline-num-layers"] = self.last
        values["pipeline-model-parallel-layout"] = self.split
        values["expert-tensor-parallel-size"] = self.etp if moe else None
        words = [w for name, value in values.items() if value for w in (f"--{name}", str(value))]
        return [*words, "--sequence-parallel"] if self.sp else words

    def __str__(self) -> str:
        names = ("tp", "pp", "vpp", "ep", "etp", "cp", "dp")
        sizes = [f"{n}{getattr(self, n)}" for n in names if getattr(self, n) > 1]
        extras = ["sp"] if self.sp else []
        extras += [f"{n}{getattr(self, n)}" for n in ("first", "last") if getattr(self, n)]
        extras += [self.split] if self.split else []
        return "+".join(["x".join(sizes) or "single", *extras])

    def config_overrides(self) -> dict[str, Any]:
        """Return the ``TransformerConfig`` fields that this layout sets."""
        return {
            "tensor_model_parallel_size": self.tp,
            "sequence_parallel": self.sp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vpp if self.vpp > 1 else None,
            "num_layers_in_first_pipeline_stage": self.first,
            "num_layers_in_last_pipeline_stage": self.last,
            "pipeline_model_parallel_layout": self.split,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp,
            "context_parallel_size": self.cp,
        }

    def virtual_stages(self, num_layers: int) -> list[range]:
        """Return the decoder layers of each virtual stage, in the order of the model.

        Stage `i` is on pipeline rank ``i % pp``.
        """
        if self.split is not None:
            counts = read_split(self.split)
        else:
            uneven = ((0, self.first), (self.pp - 1, self.last))
            fixed = {stage: count for stage, count in uneven if count is not None}
            equal = (num_layers - sum(fixed.values())) // max(self.pp - len(fixed), 1)
            counts = [fixed.get(stage, equal) // self.vpp for stage in range(self.pp)] * self.vpp
        ends = list(accumulate(counts))
        return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]

    def layers_per_stage(self, num_layers: int) -> list[int]:
        """Return how many decoder layers each pipeline rank has in all its virtual stages."""
        stages = self.virtual_stages(num_layers)
        return [sum(map(len, stages[rank :: self.pp])) for rank in range(self.pp)]

    def validate(self, architecture: Architecture, *, training: bool = True) -> None:
        """Raise unless the model can be divided by this layout.

        Raises:
            BadInput: the layout does not fit the model, or `training` forbids it; the message names
                both numbers and what to change.
        """
        for name, size in asdict(self).items():
            # SP is a bool, which is an int too, and False is allowed.
            if isinstance(size, int) and size is not False and size < 1:
                raise BadInput(f"{name.upper()} is {size}; parallel sizes start at 1.")
        self._check_tensor_parallel(architecture)
        self._check_pipeline(architecture)
        self._check_experts(architecture, training)

    def _check_tensor_parallel(self, a: Architecture) -> None:
        if self.sp and self.tp == 1:
            raise BadInput("SP divides sequences over the TP ranks and TP is 1: drop SP.")
        divisible = {
            "attention heads": a.num_attention_heads,
            "hidden size": a.hidden_size,
            "vocabulary size": a.vocab_size,
        }
        if not all(a.moe_layers):
            divisible["intermediate size"] = a.intermediate_size
        if a.shared_expert_intermediate_size:
            divisible["shared expert's intermediate size"] = a.shared_expert_intermediate_size
        for what, size in divisible.items():
            _check_divides(size, what, self.tp, "TP")
        if a.delta_net is not None:
            # Under CP too, each rank computes some heads.
            heads = {"key": a.delta_net.num_key_heads, "value": a.delta_net.num_value_heads}
            for what, size in heads.items():
                _check_divides(size, f"{what} heads of delta nets", self.tp * self.cp, "TP x CP")
        kv = a.num_key_value_heads
        if kv % self.tp != 0 and self.tp % kv != 0:
            raise BadInput(
                f"TP {self.tp} and {kv} key/value heads do not divide each other: use a TP that "
                f"divides {kv}."
            )

    def _check_pipeline(self, a: Architecture) -> None:
        if self.vpp > 1 and self.pp == 1:
            raise BadInput(
                f"VPP {self.vpp} interleaves chunks over pipeline stages and PP is 1: raise PP or "
                "drop VPP."
            )
        if self.split is not None:
            self._check_split(self.split, a)
            return
        layers, stages = a.num_hidden_layers, self.pp
        for name, count in (("first", self.first), ("last", self.last)):
            if count is None:
                continue
            if self.pp == 1:
                raise BadInput(f"{name}{count} sets a pipeline stage's layers and PP is 1.")
            _check_divides(count, f"layers on the {name} stage", self.vpp, "VPP")
            layers, stages = layers - count, stages - 1
        if layers < stages or (stages == 0 and layers != 0):
            raise BadInput(
                f"{self}: {a.num_hidden_layers} decoder layers leave {layers} for {stages} more "
                "pipeline stages: change first, last or PP."
            )
        if stages:
            _check_divides(layers, "decoder layers", stages * self.vpp, "PP x VPP")

    def _check_split(self, split: str, a: Architecture) -> None:
        stages = read_split(split)
        layers = sum(stages)
        if self.first is not None or self.last is not None:
            raise BadInput(
                f"The pipeline split {split!r} says how many layers each stage has: drop the "
                "counts of the first and the last stage."
            )
        if len(stages) % self.pp:
            raise BadInput(
                f"The pipeline split {split!r} has {len(stages)} stages, which PP {self.pp} does "
                "not divide: change one of them."
            )
        if layers != a.num_hidden_layers:
            raise BadInput(
                f"The pipeline split {split!r} has {layers} decoder layers and the model "
                f"{a.num_hidden_layers}: change its number of t."
            )

    def _check_experts(self, a: Architecture, training: bool) -> None:
        if not a.is_moe:
            for name, size in (("EP", self.ep), ("ETP", self.etp)):
                if size > 1:
                    raise BadInput(f"{name} is {size}, but this model is dense: drop {name}.")
            return
        if training and self.tp > 1 and not self.sp:
            raise BadInput(
                f"Megatron-Core trains MoE models under TP {self.tp} with sequence parallelism "
                "only: add SP (--sp; in training --sequence-parallel)."
            )
        _check_divides(a.num_experts, "experts", self.ep, "EP")
        _check_divides(a.moe_intermediate_size, "MoE intermediate size", self.etp, "ETP")
        ranks = self.tp * self.cp * self.dp
        if ranks % (self.ep * self.etp) != 0:
            raise BadInput(
                f"EP {self.ep} x ETP {self.etp} = {self.ep * self.etp} does not divide the "
                f"TP {self.tp} x CP {self.cp} x DP {self.dp} = {ranks} ranks of a pipeline stage: "
                "raise DP, or lower EP or ETP."
            )


def _check_divides(size: int, what: str, parts: int, name: str) -> None:
    if size % parts != 0:
        candidates = [n for n in range(1, parts) if size % n == 0]
        raise BadInput(
            f"{size} {what} cannot be divided over {name} {parts}: use {name} {candidates[-1]}"
            f"{' or another divisor of ' + str(size) if size > 1 else ''}."
        )


_GROUP = re.compile(r"\(([^()]+)\)\*([0-9]+)")
_REPEATED = re.compile(r"([^()*])\*([0-9]+)")


def read_split(text: str) -> list[int]:
    """Return each virtual stage's number of layers in a ``--pipeline-model-parallel-layout``.

    ``E|ttt|(tt|)*4L`` has seven stages: the embedding (and with it the vision tower) alone, three
    decoder layers, four stages of two, and the head alone. mcore's own reader
    (``PipelineParallelLayerLayout``) needs all of megatron, which must not be imported before the
    CPU backend is installed; a test checks that the two agree.

    Raises:
        BadInput: `text` has another form, or does not have one embedding at its beginning and one
            head at its end.
    """
    spelled_out = text.replace(",", "")
    for pattern in (_GROUP, _REPEATED):
        spelled_out = pattern.sub(lambda match: match[1] * int(match[2]), spelled_out)
    if wrong := re.search(r"[^EtL|]", spelled_out):
        raise BadInput(
            f"The pipeline split {text!r} is not understood at {wrong[0]!r}: write E (embedding "
            "and vision tower), t (a decoder layer), L (head) and | between stages. t*3 and "
            "(tt|)*2 repeat."
        )
    order = spelled_out.replace("|", "")
    if not re.fullmatch("Et*L", order):
        raise BadInput(
            f"The pipeline split {text!r} must have one E, which comes first, and one L, which "
            "comes last."
        )
    return [part.count("t") for part in spelled_out.split("|")]
