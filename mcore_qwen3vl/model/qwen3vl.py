"""Qwen3-VL as a Megatron-Core model: embed, fuse, decode, head.

Every rank receives the full micro-batch and takes its own part of it.

Fusion of visual features
-------------------------

The host knows the destination of each feature row before the forward pass. So fusing is an index
copy (and DeepStack, in :mod:`mcore_qwen3vl.model.decoder.layer`, an index add) with a fixed number
of rows: no mask, no host sync.

The gradient that reaches the features on a rank is that of the rows which the rank holds. Ranks
that hold different rows (CP, SP) have different parts of it, to be summed; ranks that hold the same
rows (TP without SP) have equal copies. :mod:`mcore_qwen3vl.model.vision` relies on exactly this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.labels import NO_LABELS, Labels
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.memory_labels import label_module, memory_label
from mcore_qwen3vl.model.decoder.attention import InterleavedMRoPE, PackedSequence, rotary_factor
from mcore_qwen3vl.model.decoder.layer import (
    block_spec,
    mtp_spec,
    pack_features,
    unpack_features,
)
from mcore_qwen3vl.model.head import Head, ScoreHead
from mcore_qwen3vl.model.inputs import (
    VisualInputs,
    check_shapes,
    local_positions,
    require_right_padding,
    to_device,
)
from mcore_qwen3vl.model.log_probs import token_log_probs
from mcore_qwen3vl.model.lora_modules import AdapterModule
from mcore_qwen3vl.model.patches import patch_libraries
from mcore_qwen3vl.model.schedule_plan import SchedulePlan
from mcore_qwen3vl.model.transformer_config import Spec, layers_of_chunk, transformer_config
from mcore_qwen3vl.model.vision import VisionTower

label_module(__file__, "model, other")

Embed = Callable[[], tuple[Tensor | None, Tensor | None]]
"""Computes a chunk's inputs: hidden states (s_local, B, H), or None after the first stage; and the
carried rows or None. The carried rows travel beside the hidden states to the layers and stages that
need them. They are the DeepStack features (k, n, H) of this chunk and later ones. A model with MTP
has no DeepStack: its carried rows are the embeddings of the next tokens, fused with images'
features, (1, s_local * B, H)."""


class Qwen3VLModel(GPTModel):
    """Qwen3-VL for training and evaluation under any parallel layout.

    A :class:`GPTModel` with the vision tower as its child ``visual`` (on the stage that embeds).
    Build it with :meth:`from_hf_config`. Source: HF ``Qwen3VL[Moe]ForConditionalGeneration``.

    Args:
        config: from :func:`mcore_qwen3vl.model.transformer_config.transformer_config`.
        spec: layer spec, ``torch`` or ``te`` (Transformer Engine).
        vocab_size: rows of the embedding, padding included; default: the architecture's.
        pre_process: whether this chunk embeds tokens and encodes images.
        post_process: whether this chunk ends in the head.
        pg_collection: process groups; default: those of Megatron's parallel state.
        recompute_vision: keep only the inputs of the tower's blocks, and recompute the blocks in
            the backward pass; None: only under full recompute of the decoder.
        keep_activations: keep the outputs of the decoder's norms, SwiGLU and rotary embedding for
            the backward pass, instead of recomputing them there.
        head_chunk: number of tokens from whose logits losses are computed at a time; None: as many
            as fit a fixed size; 0: Megatron's own cross entropy, from all logits at once.
        kwargs: passed to :class:`GPTModel`.
    """

    head_labels: Labels | None = None
    """What the output layer gives. None: logits; empty: there is no output layer."""
    fill_received: Callable[[Tensor, tuple[int, int, int]], None] | None = None
    """Called with the tensor from the previous pipeline stage, before it is read, and the shape
    that a stage sends. If its neighbours do not run, a rank gives the tensor that shape."""

    def __init__(
        self,
        config: TransformerConfig,
        architecture: Architecture,
        *,
        spec: Spec = "torch",
        vocab_size: int | None = None,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        recompute_vision: bool | None = None,
        keep_activations: bool = False,
        head_chunk: int | None = None,
        **kwargs: Any,
    ) -> None:
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        deepstack_layers = len(architecture.vision.deepstack_visual_indexes)
        patch_libraries(config, spec)
        # Megatron's model would embed the next tokens in a copy of the embedding on the last stage,
        # and hold all logits at once.
        of_mtp = copy(config)
        has_mtp, config.mtp_num_layers = bool(config.mtp_num_layers), None
        super().__init__(
            config,
            block_spec(
                config,
                spec,
                deepstack_layers=deepstack_layers,
                rotary_factor=rotary_factor(architecture),
                keep_activations=keep_activations,
                vp_stage=vp_stage,
                pp_rank=groups.pp.rank(),
            ),
            vocab_size=vocab_size or architecture.vocab_size,
            max_sequence_length=architecture.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=architecture.tie_word_embeddings,
            position_embedding_type="mrope",
            pg_collection=groups,
            vp_stage=vp_stage,
            **kwargs,
        )
        self.architecture, self.spec, self.has_mtp = architecture, spec, has_mtp
        if has_mtp and post_process:
            if of_mtp.recompute_granularity == "full":  # Megatron takes no more layers than one
                of_mtp.recompute_method, of_mtp.recompute_num_layers = "uniform", 1
            layer = mtp_spec(
                config,
                spec,
                rotary_factor=rotary_factor(architecture),
                keep_activations=keep_activations,
            )
            self.mtp = MultiTokenPredictionBlock(of_mtp, layer, vp_stage, groups)
            router = getattr(self.mtp.layers[0].mtp_model_layer.mlp, "router", None)
            if router is not None:  # Megatron's log of the routers' losses has decoder layers only
                router.is_mtp_layer, router.layer_number = False, None
        self.adapter: AdapterModule | None = None
        self.rotary_pos_emb = InterleavedMRoPE(architecture)
        # An empty range has a place too: a chunk without layers lies between its neighbours.
        layers = layers_of_chunk(config, vp_stage, groups.pp.rank())
        # The carried rows are those of the DeepStack layers from this chunk on, and after it; with
        # MTP they are one set, the next tokens' embeddings.
        self._carried_in = int(has_mtp) or max(deepstack_layers - layers.start, 0)
        after = int(has_mtp) or max(deepstack_layers - layers.stop, 0)
        self._carried_out = 0 if post_process else after
        if self._carried_out and not config.variable_seq_lengths:
            raise BadInput(
                f"The pipeline split leaves {self._carried_out} of {deepstack_layers} DeepStack "
                "layers to later stages: set variable_seq_lengths, so that their features can "
                "travel there."
            )
        if recompute_vision is None:
            recompute_vision = config.recompute_granularity == "full"
        if pre_process and architecture.has_vision:
            self.visual = VisionTower(
                architecture,
                config,
                group=groups.tp_cp,
                fused_rotary=spec == "te",
                recompute=recompute_vision,
            )
        # Only Megatron's own output layer can defer its weight gradient.
        self.losses_in_chunks = head_chunk != 0 and not config.defer_embedding_wgrad_compute
        if post_process:
            Head.adopt(self.output_layer, vocab_size=architecture.vocab_size, chunk=head_chunk)
        is_meta = any(parameter.is_meta for parameter in self.parameters())
        if not config.use_cpu_initialization and not is_meta:
            # Megatron creates norms and routers on the host, and its training loop moves them.
            self.to(torch.cuda.current_device())

    @classmethod
    def from_hf_config(
        cls, architecture: Architecture | str | Path, *, spec: Spec = "torch", **options: Any
    ) -> Qwen3VLModel:
        """Build one pipeline chunk from an HF config alone, with random weights.

        The config may be given as its directory or file. Options are arguments of the class, and
        ``TransformerConfig`` fields, such as those of ``Layout.config_overrides()``.

        Raises:
            BadInput: the config is of no known model, the overrides contradict the spec, or the
                spec is ``te`` and Transformer Engine is not installed.
        """
        if not isinstance(architecture, Architecture):
            architecture = Architecture.from_hf(architecture)
        names = TransformerConfig.__dataclass_fields__.keys() & options.keys()
        overrides = {name: options.pop(name) for name in names}
        config = transformer_config(architecture, spec=spec, **overrides)
        return cls(config, architecture, spec=spec, **options)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        padding_mask: Tensor | None = None,
        labels: Tensor | None = None,
        visual: VisualInputs | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Compute logits, or each token's loss, for this CP rank's part of the full sequences.

        Every rank of a TP x CP group and every pipeline stage receives the same arguments; stages
        after the first read only ``visual.token_index`` of `visual`.

        Args:
            input_ids: (B, S) integers; (1, S) when packed.
            position_ids: (3, B, S) integers: time, height and width.
            attention_mask: (B, S), nonzero for tokens and zero for padding, as in HF. Padding is
                neither attended to nor counted in the router's losses. None: no padding that
                attention must know of. Under the ``te`` spec padding must be on the right. With
                an `inference_context` it covers all tokens so far: (B, cached + S).
            padding_mask: (B, S) bool, True for padding. Use it in place of `attention_mask` if
                padding only follows a sample's tokens: causal attention then needs no mask, and is
                far faster and takes less memory without one. The router's losses do not count
                padding.
            labels: (B, S) target of each position, already shifted by one.
            visual: images and videos of the micro-batch; None: text only.
            packed_seq_params: THD packing with the full sequence's cu_seqlens, tail padding
                included; best on the host (on the device they cost a host sync).
            kwargs: passed to :meth:`GPTModel.forward` (``loss_mask``, ``runtime_gather_output``…).

        Returns:
            Before the last pipeline stage: hidden states (s_local, B, H), followed on the first
            axis by the carried rows if later stages need them. On the last stage: logits
            (B, s, V / tp) or, with `labels`, float32 losses (B, s), where s = S / cp and the
            positions are those of :meth:`local_tokens`. A model with MTP has (2, B, s)
            losses: of the next token, and of the one after it, which at the end of a row or a
            packed sample means nothing.

        Raises:
            BadInput: CP or SP does not divide a length, shapes do not agree, logits are gathered
                for Megatron's cross entropy, or the ``te`` spec receives padding on the left (if
                the mask is on a GPU, a device-side assertion instead).
        """
        embed, destination, arguments = self._prepare_forward(
            input_ids,
            position_ids,
            attention_mask,
            padding_mask=padding_mask,
            labels=labels,
            visual=visual,
            packed_seq_params=packed_seq_params,
            **kwargs,
        )
        hidden, carried = embed()
        output = super().forward(
            **arguments,
            decoder_input=hidden,
            extra_block_kwargs={"context": carried, "context_mask": destination},
        )
        return self.append_carried(output, carried)

    def build_schedule_plan(self, *args: Any, **kwargs: Any) -> SchedulePlan:
        """Return the steps of :meth:`forward`, with its arguments, for Megatron's combined 1F1B.

        Nothing is computed yet. Source: :meth:`GPTModel.build_schedule_plan`.
        """
        embed, destination, arguments = self._prepare_forward(*args, **kwargs)
        return SchedulePlan(self, embed, destination, **arguments)

    def append_carried(self, output: Tensor, carried: Tensor | None) -> Tensor:
        """Append what later stages need of this chunk's carried rows (k, n, H) to its output.

        The output is hidden states (s_local, B, H), or what the head gives.
        """
        if self._carried_out and carried is not None:
            return pack_features(output, carried[-self._carried_out :])
        return output

    def _prepare_forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        padding_mask: Tensor | None = None,
        labels: Tensor | None = None,
        visual: VisualInputs | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> tuple[Embed, Tensor, dict[str, Any]]:
        """Check the arguments of :meth:`forward`, and take this rank's part of them.

        Returns:
            What computes the chunk's inputs; :attr:`FusionPlan.destination`; and the other
            arguments of :meth:`GPTModel.forward`.
        """
        device = input_ids.device
        packed = packed_seq_params and PackedSequence.from_params(packed_seq_params, device)
        check_shapes(input_ids, position_ids, packed=packed is not None)
        batch, seq_len = input_ids.shape
        divided = self.config.sequence_parallel
        local = self.local_tokens(seq_len, packed, sequence_parallel=divided)  # rows after SP
        positions: Tensor | None = None
        if self.pg_collection.cp.size() > 1:
            positions = to_device(self.local_tokens(seq_len, packed), device)

        def take_cp_part(full: Tensor, dim: int) -> Tensor:
            """Return this CP rank's part of a tensor that holds the full sequence on `dim`."""
            return full if positions is None else full.index_select(dim, positions)

        index = visual.token_index if visual else None
        plan = plan_fusion(index, local, seq_len=seq_len, batch_size=batch, device=device)
        token_ids = take_cp_part(input_ids, 1)
        padding = padding_mask if attention_mask is None else attention_mask == 0  # (B, cached + S)
        if labels is not None and self.losses_in_chunks:
            kwargs.setdefault("output_processor", _cross_entropies)
        elif labels is not None and self.post_process:
            self._refuse_gathered_logits(kwargs.get("runtime_gather_output"))
        attended = None
        if attention_mask is not None and packed is None:
            if self.spec == "torch" or kwargs.get("inference_context") is not None:
                attended = attention_mask != 0
            else:
                require_right_padding(attention_mask == 0)
        following = None
        if self.pre_process and self.has_mtp:
            # A feature of the next token stands one place earlier, and the first of a row last.
            ahead = None if index is None else index - index % seq_len + (index - 1) % seq_len
            later = plan_fusion(ahead, local, seq_len=seq_len, batch_size=batch, device=device)
            following = take_cp_part(input_ids.roll(-1, 1), 1), later
        embed: Embed = partial(self._embed, token_ids, visual, plan, following)
        if not self.pre_process:  # the hidden states are in the decoder already
            embed = lambda: (None, self._receive(len(local), batch, plan))  # noqa: E731
        targets = labels
        if labels is not None and self.has_mtp:
            targets = torch.stack([labels, labels.roll(-1, 1)])
        arguments = {
            "input_ids": token_ids,
            "position_ids": take_cp_part(position_ids, 2),
            "attention_mask": attended,
            "labels": None if targets is None else take_cp_part(targets, -1),
            "packed_seq_params": packed,
            "padding_mask": self._router_padding(padding, seq_len, local),
            **kwargs,
        }
        return embed, plan.destination, arguments

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load as torch does, but let an adapted model's checkpoint hold only what trains."""
        if self.adapter is None:
            return super().load_state_dict(state_dict, strict, assign)
        result = super().load_state_dict(state_dict, strict=False, assign=assign)
        trained = {name for name, p in self.named_parameters() if p.requires_grad}
        missing = sorted(trained.intersection(result.missing_keys))
        if strict and (missing or result.unexpected_keys):
            raise RuntimeError(f"missing {missing}, unexpected {result.unexpected_keys}")
        return result

    def local_tokens(
        self,
        seq_len: int,
        packed_seq_params: PackedSeqParams | None = None,
        *,
        sequence_parallel: bool = False,
    ) -> Tensor:
        """Return the positions of this rank's logits, losses and labels: (S / cp,) int64, host.

        With `sequence_parallel`, return those of its hidden states under SP: (S / cp / tp,). Use it
        to take this rank's part of a loss mask: ``loss_mask[:, model.local_tokens(S)]``.
        """
        host = torch.device("cpu")
        packed = packed_seq_params and PackedSequence.from_params(packed_seq_params, host)
        cp, tp = self.pg_collection.cp, self.pg_collection.tp
        return local_positions(
            seq_len,
            cp_size=cp.size(),
            cp_rank=cp.rank(),
            tp_size=tp.size(),
            tp_rank=tp.rank(),
            sequence_parallel=sequence_parallel,
            cu_seqlens=None if packed is None else torch.tensor(packed.bounds),
        )

    def _embed(
        self,
        token_ids: Tensor,
        visual: VisualInputs | None,
        plan: FusionPlan,
        following: tuple[Tensor, FusionPlan] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute what :data:`Embed` says, with all K DeepStack layers.

        `following` has the next tokens' ids and where images' features go among them, if the model
        has MTP. The last next token of a row or a packed sample is another sample's first; no
        trained loss sees it.
        """
        embeddings = self.embedding(token_ids, None)
        carried = None if following is None else self.embedding(following[0], None)
        # Without an image, a tower would run only for its gradients.
        if not self.architecture.has_vision or (visual is None and not torch.is_grad_enabled()):
            hidden = embeddings
            if carried is None:
                carried = embeddings.new_empty(self._carried_in, 0, embeddings.shape[-1])
            else:
                carried = carried.flatten(0, 1)[None]
        else:
            features, deepstack = self.visual(visual)
            if following is not None and carried is not None:
                carried = fuse(carried, features, following[1]).flatten(0, 1)[None]
            elif deepstack:
                carried = torch.stack([plan.select(layer) for layer in deepstack])
            hidden = fuse(embeddings, features, plan)
        if torch.is_grad_enabled() and not hidden.requires_grad:
            # A recomputed region gets no gradients at all if none of its inputs requires one.
            hidden.requires_grad_()
        return hidden, carried

    def _postprocess(
        self,
        hidden_states: Tensor,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: Tensor | None,
        rotary_pos_emb: Tensor,
        **kwargs: Any,
    ) -> Tensor:
        """Do what GPTModel does after the decoder, and compute MTP where it trains.

        Its loss is one more result, and no part of a gradient that Megatron would add on the side.
        """
        named = {"input_ids": input_ids, "position_ids": position_ids}
        post = partial(super()._postprocess, rotary_pos_emb=rotary_pos_emb, **named, **kwargs)
        if labels is None or not (self.has_mtp and self.post_process):
            return post(hidden_states, labels=labels)
        names = ("attention_mask", "padding_mask", "packed_seq_params")
        further, *_ = self.mtp.layers[0](
            input_ids=None,
            position_ids=None,
            hidden_states=hidden_states,
            rotary_pos_emb=rotary_pos_emb,
            embedding=kwargs["extra_block_kwargs"]["context"].view_as(hidden_states),
            **{name: kwargs[name] for name in names},
        )
        return torch.stack([post(hidden_states, labels=labels[0]), post(further, labels=labels[1])])

    def _refuse_gathered_logits(self, gather: bool | None) -> None:
        """Megatron's cross entropy would add its sums up over TP regardless."""
        gathers = self.output_layer.gather_output if gather is None else gather
        if gathers and self.pg_collection.tp.size() > 1:
            raise BadInput(
                "Losses need each TP rank's own logits, but this model gathers them: leave "
                "runtime_gather_output and parallel_output=False out where there are labels."
            )

    def _receive(self, seq_len: int, batch: int, plan: FusionPlan) -> Tensor | None:
        """Split the carried rows (k, n, H) off the tensor that the previous stage sent."""
        received = self.decoder.input_tensor
        # The next tokens' embeddings have a row for each token, and DeepStack's features have one
        # for each image token.
        count = seq_len * batch if self.has_mtp else len(plan.destination)
        if self.fill_received is not None and received is not None:
            packed = -(-self._carried_in * count // batch)  # as by `pack_features`
            self.fill_received(received, (seq_len + packed, batch, self.config.hidden_size))
        if not self._carried_in:
            return None
        hidden, carried = unpack_features(received, seq_len, self._carried_in, count)
        self.decoder.set_input_tensor(hidden)
        return carried

    def _router_padding(self, padding: Tensor | None, seq_len: int, local: Tensor) -> Tensor | None:
        """Return (B, s_local) bool, True for padding, which only MoE layers read."""
        if padding is None or self.config.num_moe_experts is None:
            return None
        return padding[:, -seq_len:].index_select(1, to_device(local, padding.device))


def _cross_entropies(
    *,
    hidden_states: Tensor,
    output_layer: Head,
    output_weight: Tensor | None,
    labels: Tensor,
    **_: Any,
) -> Tensor:
    """Return cross entropies (B, s), float32; ``GPTModel`` would compute them from all logits."""
    reduce = partial(token_log_probs, targets=labels)
    log_probs, _entropies = output_layer(hidden_states, output_weight, reduce=reduce)
    return -log_probs


@dataclass(frozen=True)
class FusionPlan:
    """The n features whose placeholders this rank holds, and their places."""

    rows: Tensor  # (n,) int64: rows of the (N, H) features
    destination: Tensor  # (n,) int64: rows of the (s_local * B, H) hidden states

    @memory_label("embedding")
    def select(self, features: Tensor) -> Tensor:
        """Select the feature rows that this rank consumes: (N, H) -> (n, H)."""
        return features.index_select(0, self.rows)


def plan_fusion(
    token_index: Tensor | None,
    local_positions: Tensor,
    *,
    seq_len: int,
    batch_size: int,
    device: torch.device | str = "cpu",
) -> FusionPlan:
    """Find, on the host, the placeholders among the positions that this rank holds.

    Args:
        token_index: (N,) int64 on the CPU, ``VisualInputs.token_index``; None for text only.
        local_positions: (s_local,) int64 on the CPU, global positions in local order.
        seq_len: S of the full sequence.
    """
    if token_index is None:
        token_index = torch.empty(0, dtype=torch.int64)
    local_of = torch.full((seq_len,), -1)  # global position -> local position
    local_of[local_positions] = torch.arange(len(local_positions))
    batch, local = token_index // seq_len, local_of[token_index % seq_len]  # (N,)
    rows = torch.nonzero(local >= 0).squeeze(1)
    destination = local[rows] * batch_size + batch[rows]
    return FusionPlan(to_device(rows, device), to_device(destination, device))


@memory_label("embedding")
def fuse(embeddings: Tensor, features: Tensor, plan: FusionPlan) -> Tensor:
    """Replace the placeholders' embeddings by the visual features.

    Args:
        embeddings: (s_local, B, H) text embeddings on this rank.
        features: (N, H) features of the whole micro-batch; N may be 0.

    Returns:
        (s_local, B, H). The features stay in the graph even when no row is local, so that the
        vision tower's backward, and the collectives in it, run on every rank.
    """
    flat = embeddings.reshape(-1, embeddings.shape[-1])  # (s_local * B, H)
    local = plan.select(features).to(flat.dtype)
    return flat.index_copy(0, plan.destination, local).view_as(embeddings)


class TaskModel(Qwen3VLModel):
    """A model with a :class:`ScoreHead`, or one that ends in the final norm if it has no labels.

    Call it with an ``output_processor``. :meth:`with_labels` makes the class for some labels.
    Source: HF ``GenericForSequenceClassification``; without labels ``Qwen3VL[Moe]Model``, whose
    ``last_hidden_state`` the processor receives. The embedding is tied to no head, so that the last
    pipeline stage needs no copy of it.
    """

    head_labels = NO_LABELS
    seed = 1
    output_layer: Any

    def __init__(
        self, config: TransformerConfig, architecture: Architecture, **kwargs: Any
    ) -> None:
        super().__init__(config, replace(architecture, tie_word_embeddings=False), **kwargs)
        self.architecture = architecture
        if self.post_process:
            self.output_layer = self.build_head(self.output_layer.weight)

    def build_head(self, like: Tensor) -> nn.Module:
        """Return the head, whose weight has the dtype and device of `like`."""
        labels = len(self.head_labels)
        return ScoreHead(self.config, labels, self.seed, like=like) if labels else nn.Identity()

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state as Megatron's modules do; ``GPTModel`` would look for logits in it."""
        return MegatronModule.sharded_state_dict(self, *args, **kwargs)

    @classmethod
    def with_labels(cls, labels: Labels, seed: int = 1) -> type[Self]:
        """Return the class of models with `labels`, whose new heads have the seed `seed`."""
        return type(cls.__name__, (cls,), {"head_labels": labels, "seed": seed})


def build_chunks(
    architecture: Architecture,
    layout: Layout,
    *,
    spec: Spec = "torch",
    kind: type[Qwen3VLModel] = Qwen3VLModel,
    **overrides: Any,
) -> list[Qwen3VLModel]:
    """Build the pipeline chunks of this rank, of the class `kind`, with random weights.

    The process groups exist, and are those of `layout`. The other arguments are those of
    :meth:`Qwen3VLModel.from_hf_config`, and override the layout's.
    """
    return [
        kind.from_hf_config(
            architecture,
            spec=spec,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            vp_stage=stage,
            **{**layout.config_overrides(), **overrides},
        )
        for stage in (range(layout.vpp) if layout.vpp > 1 else [None])
    ]
