"""Estimate of the GPU memory that a layout needs: a formula for choosing one, not a measurement.

``rehearse --estimate`` prints it, and ``rehearse --fit`` leaves out what it finds too large.

Weights, gradients and optimizer states are exact. Activations follow Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198), adapted to
grouped queries, gated MLPs, experts and an attention kernel that stores no scores.
Allocator fragmentation, NCCL buffers and the CUDA context are not included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.mapping import parameters
from mcore_qwen3vl.converters.mapping.parameters import Group
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.decoder.delta_rule import CHUNK
from mcore_qwen3vl.model.log_probs import CHUNK_BYTES
from mcore_qwen3vl.training.arguments.settings import Settings
from mcore_qwen3vl.training.parameter_counts import TrainedCounts, rank_parameters
from mcore_qwen3vl.training.pipeline_order import order_of_work
from mcore_qwen3vl.training.second_model import architecture_of, layout_for

Recompute = Literal["none", "cheap", "full"] | int
"""What the backward pass recomputes; see :func:`estimate_stages`."""


WEIGHT = 2  # bytes: bf16
GRADIENT = 4  # fp32 accumulation
OPTIMIZER = 12  # fp32 main weight and Adam's two moments
ACTIVATION = 2  # bf16
LOGIT = 2  # bf16; its gradient takes its place
GB = 1e9


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    weights: float
    gradients: float
    optimizer: float
    activations: float  # kept from the forward pass to the backward pass
    temporary: float  # of the loss, or of a layer's backward pass, which takes more

    @property
    def total(self) -> float:
        """Sum of all parts, in bytes."""
        return sum(vars(self).values())

    def __str__(self) -> str:
        listing = ", ".join(f"{name} {size / GB:.1f}" for name, size in vars(self).items())
        return f"{self.total / GB:.1f} GB a GPU ({listing})"


@dataclass(frozen=True)
class CheckpointSize:
    """Bytes that a run of all ranks writes for a checkpoint, and reads at a start.

    Attributes:
        saved: weights and the optimizer's state, each once. Of a LoRA run, those of the adapter.
        loaded: what every rank holds of them. Ranks with the same weights read them each for
            itself, and a LoRA run also reads the model (``--load-hf``).
    """

    saved: float
    loaded: float


def checkpoint_size(
    a: Architecture,
    layout: Layout,
    stages: Sequence[Memory],
    trained: TrainedCounts | None = None,
    *,
    mtp: bool = False,
) -> CheckpointSize:
    """Return the size of a run's checkpoints.

    Args:
        stages: the memory of a rank of each pipeline stage, see :func:`estimate_stages`.
        trained: None if everything trains.
    """
    count = sum((parameters.count(a, mtp=mtp) if trained is None else trained).values())
    ranks = layout.world_size // layout.pp
    return CheckpointSize(
        saved=(WEIGHT + OPTIMIZER) * count,
        loaded=sum(ranks * (stage.weights + stage.optimizer) for stage in stages),
    )


def estimate_stages(
    a: Architecture,
    layout: Layout,
    tokens: int,
    recompute: Recompute = "cheap",
    trained: TrainedCounts | None = None,
    *,
    visual_share: float = 0.5,
    mtp: bool = False,
) -> list[Memory]:
    """Estimate the memory of the fullest rank of each pipeline stage, in order.

    The optimizer is the distributed one, and weights are bf16. A LoRA run keeps the activations
    too: the factors need the same inputs as the weights.

    Args:
        tokens: in a micro-batch.
        recompute: ``none``: nothing is recomputed, as with --keep-activations; ``cheap``: the
            outputs of norms, SwiGLU and rotary embedding are recomputed; ``full``: every decoder
            layer and vision block keeps its input only; a number: every vision block does so, and
            so do that many decoder layers of each virtual stage (``--recompute-method block``),
            while the other layers keep everything, as with ``none``.
        trained: None if everything trains.
        visual_share: share of the tokens that are image or video features.
        mtp: whether the MTP layer trains.
    """
    counts = parameters.count(a, mtp=mtp)
    if mtp and a.num_experts:  # EP divides the MTP layer's experts too
        experts_of_layer = parameters.count_by_kind(a)["experts"] // sum(a.moe_layers)
        counts = counts - Counter({Group("MTP", None, True): experts_of_layer})
        counts[Group("experts", None, True)] += experts_of_layer
    frozen, factors = (Counter[Group](), counts) if trained is None else (counts, trained)
    vision = any(group.kind == "vision" for group in factors)
    # The distributed optimizer divides states over the ranks that hold the same weights.
    shared_copies = layout.dp * layout.cp
    expert_copies = layout.tp * layout.cp * layout.dp / (layout.ep * layout.etp)
    rank_tokens = tokens / layout.cp
    visual = rank_tokens * visual_share if vision else 0.0
    chunk = min(LOGIT * rank_tokens * a.vocab_size / layout.tp, CHUNK_BYTES)
    stages = []
    for stage in range(layout.pp):
        frozen_counts = rank_parameters(a, layout, stage, frozen)
        shared, experts = rank_parameters(a, layout, stage, factors)
        logits = chunk
        if mtp and not (a.tie_word_embeddings and layout.pp == 1):
            # Each use of the head hands autograd a gradient as large as the weight. The first waits
            # while the second is computed, and their sum is a third. A rehearsal shows none of them
            # where the weight is that of the stage's embedding.
            head = WEIGHT * a.vocab_size * a.hidden_size / layout.tp
            logits = max(logits + head, 3 * head)
        kept, backward = _activations(a, layout, rank_tokens, visual, recompute, stage, mtp)
        memory = Memory(
            weights=WEIGHT * (sum(frozen_counts) + shared + experts),
            gradients=GRADIENT * (shared + experts),
            optimizer=OPTIMIZER * (shared / shared_copies + experts / expert_copies),
            activations=kept,
            temporary=max(backward, logits if stage == layout.pp - 1 else 0.0),
        )
        stages.append(memory)
    return stages


def stages_of_settings(
    settings: Settings, a: Architecture, layout: Layout, trained: TrainedCounts | None
) -> list[Memory]:
    """Return :func:`estimate_stages` for a run's settings, which need not be validated.

    The weights include a second model's, whose activations do not stay in memory.
    """
    data, compute = settings.data, settings.compute
    tokens = data.seq_length * data.micro_batch_size
    recompute: Recompute = "none" if settings.training.keep_activations else "cheap"
    if compute.recompute_granularity == "full":
        layers = compute.recompute_num_layers if compute.recompute_method == "block" else None
        recompute = "full" if layers is None else layers
    mtp = bool(settings.loop.mtp_num_layers)
    stages = estimate_stages(a, layout, tokens, recompute, trained, mtp=mtp)
    second = architecture_of(settings, a)
    if second is None:
        return stages
    layout = layout_for(layout, a, second)
    frozen = (WEIGHT * sum(rank_parameters(second, layout, stage)) for stage in range(layout.pp))
    return [
        replace(stage, weights=stage.weights + more)
        for stage, more in zip(stages, frozen, strict=True)
    ]


def _activations(
    a: Architecture,
    layout: Layout,
    tokens: float,
    visual: float,
    recompute: Recompute,
    stage: int,
    mtp: bool,
) -> tuple[float, float]:
    """Return the bytes kept by a rank, and the bytes added by the backward pass of a layer.

    Decoder layers in flight and the vision tower keep something. A CP rank has `tokens` of a
    micro-batch; `visual` of them are features of a tower that trains.
    """
    virtual_stages = layout.virtual_stages(a.num_hidden_layers)[stage :: layout.pp]
    cheap = recompute == "cheap"
    each = [
        [_layer_activations(a, layout, tokens, n, cheap) for n in layers]
        for layers in virtual_stages
    ]
    # Number of layers of each virtual stage that are recomputed as a whole.
    recomputed_layers = recompute if isinstance(recompute, int) else a.num_hidden_layers
    recomputed_layers = 0 if recompute in ("none", "cheap") else recomputed_layers
    inputs = ACTIVATION * a.hidden_size * tokens / (layout.tp if layout.sp else 1)
    kept = [
        inputs * len(chunk[:recomputed_layers]) + sum(chunk[recomputed_layers:]) for chunk in each
    ]
    # While the backward pass of a recomputed layer runs, it has all of its activations.
    recomputed = max((size for chunk in each for size in chunk[:recomputed_layers]), default=0.0)
    gradients = max(
        _layer_gradients(a, layout, tokens, n, cheap) for layers in virtual_stages for n in layers
    )
    if stage == 0:
        kept[0] += _vision_activations(a, layout, visual, recompute)
    if mtp:
        last = layout.pp * layout.vpp - 1
        for chunk in range(len(kept)):
            place = chunk * layout.pp + stage
            if place > 0 or place == last:  # the next tokens' embeddings travel to the last
                kept[chunk] += inputs
    if mtp and stage == layout.pp - 1:
        inside = _mtp_activations(a, layout, tokens, cheap)
        kept[-1] += 2 * inputs  # what the layer gets beside the embeddings, and what the head gets
        if recomputed_layers:
            recomputed = max(recomputed, inside)
        else:
            kept[-1] += inside
    return most_in_flight(layout, stage, kept), recomputed + gradients


def most_in_flight(layout: Layout, stage: int, kept: Sequence[float]) -> float:
    """Return the most bytes that a pipeline rank keeps at once under (interleaved) 1F1B.

    Each of its virtual stages has `kept` so many for one micro-batch.
    """
    most = now = 0.0
    # More micro-batches than twice the number of ranks do not raise the maximum.
    for work in order_of_work(stage, layout.pp, layout.vpp, 2 * layout.pp, layout.pp):
        now += kept[work.chunk] if work.forward else -kept[work.chunk]
        most = max(most, now)
    return most


def _layer_activations(
    a: Architecture, layout: Layout, tokens: float, layer: int, cheap: bool
) -> float:
    """Return the bytes that one decoder layer keeps for the backward pass."""
    h, local = a.hidden_size, tokens / (layout.tp if layout.sp else 1)
    # Inputs of both norms.
    values = 2 * h * local
    if a.delta_net_layers[layer]:
        values += _delta_net_values(a, cheap) * tokens / layout.tp
    else:
        values += _attention_values(a, cheap) * tokens / layout.tp
    inner = 2  # gate and up
    # Recomputed if cheap: inputs of the two blocks, and the product.
    if not cheap:
        values += 2 * h * local
        inner += 1
    if not a.moe_layers[layer]:
        return ACTIVATION * (values + inner * a.intermediate_size * tokens / layout.tp)
    # Each row keeps its input, gate, up and their product, which has the router's weights already.
    rows = _expert_rows(a, layout, tokens)
    values += rows * (h + 3 * a.moe_intermediate_size / layout.etp)
    # A shared expert: its product is kept, and so is the output that its gate multiplies.
    shared = a.shared_expert_intermediate_size
    values += (3 * shared * tokens / layout.tp + h * local) if shared else 0
    return ACTIVATION * values


def _layer_gradients(
    a: Architecture, layout: Layout, tokens: float, layer: int, cheap: bool
) -> float:
    """Return the bytes that the backward pass of a decoder layer's MLP or experts allocates.

    These are the gradients of gate, up and their product, and the product, if it is recomputed. The
    residual stream has a gradient too, which is added to the norm's, and the norm is recomputed.
    """
    stream = 3 * a.hidden_size * tokens / (layout.tp if layout.sp else 1)
    if not a.moe_layers[layer]:
        inner = 4 if cheap else 3
        return ACTIVATION * (stream + inner * a.intermediate_size * tokens / layout.tp)
    # The gradients of what each row brings and takes, beside those inside an expert.
    row = 2 * a.hidden_size + 3 * a.moe_intermediate_size / layout.etp
    return ACTIVATION * (stream + _expert_rows(a, layout, tokens) * row)


def _expert_rows(a: Architecture, layout: Layout, tokens: float) -> float:
    """Return how many rows the experts of a rank receive on average."""
    return a.num_experts_per_tok * tokens / layout.tp * layout.etp


def _mtp_activations(a: Architecture, layout: Layout, tokens: float, cheap: bool) -> float:
    """Return the bytes that MTP keeps between its inputs and the head.

    The layer has attention. Before it, hidden states and embeddings side by side are the input of a
    linear layer. SP gathers them for that, in a buffer twice as large as other layers need, and its
    output is kept whole. A norm follows.
    """
    layer = _layer_activations(a, layout, tokens, a.delta_net_layers.index(False), cheap)
    local = tokens / (layout.tp if layout.sp else 1)
    around = (2 + 1) * local
    if layout.sp:
        around += (tokens - local) + tokens
    return layer + ACTIVATION * a.hidden_size * around


def _attention_values(a: Architecture, cheap: bool) -> float:
    """Return what attention keeps of a token: the projection, a copy of the gate, and its output.

    If cheap outputs are kept, these are q and k, normed and rotated, v, and the gated output.
    """
    query, key = a.num_attention_heads * a.head_dim, a.num_key_value_heads * a.head_dim
    gate = query if a.attn_output_gate else 0
    values = 2 * query + 2 * key + 2 * gate
    return values if cheap else values + query + 2 * key + gate


def _delta_net_values(a: Architecture, cheap: bool) -> float:
    """Return what a gated delta net keeps of a token, in units of ACTIVATION bytes.

    Query, key and value before and after the convolution; of the rule its output, each head's row
    of the system of a chunk, its beta and, in float32, three steps of its decay and the scales of
    two norms; and of the gated norm the gate and, if that is not recomputed, the product.
    """
    net = a.delta_net
    assert net is not None
    qkv, heads = 2 * net.key_dim + net.value_dim, net.num_value_heads
    rule = net.value_dim + (CHUNK + 1 + 2 * 3) * heads
    norms = 2 * 2 * net.num_key_heads
    gated = (1 if cheap else 2) * net.value_dim
    return 2 * qkv + rule + norms + gated


def _vision_activations(
    a: Architecture, layout: Layout, visual: float, recompute: Recompute
) -> float:
    """Return the vision tower's bytes; the ranks of a TP x CP group divide the patches."""
    v = a.vision
    patches = visual * v.spatial_merge_size**2 / layout.tp
    if recompute not in ("none", "cheap"):
        return ACTIVATION * patches * v.depth * v.hidden_size
    # Inputs of both norms, q and k rotated, v, the attention's output, and the activation
    # function's input. The outputs of the norms and of the activation function are recomputed.
    per_patch = v.depth * ((2 + 3 + 1) * v.hidden_size + v.intermediate_size)
    return ACTIVATION * patches * per_patch
