"""Faults to plant, one at a time, and how many cases the search takes to find each.

``python -m tests.verification.search.planted [NAME...] --minutes 5``

Each is silent: a run that has it ends well. Half of them were in this package once; the others were
made up without looking at what the search does. A fault replaces a function in the process from
which ranks are forked. One counts as found if a case is wrong with it and right without.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.console import quiet_libraries
from mcore_qwen3vl.runtime.lifetime import scratch_folder
from mcore_qwen3vl.verification.search.oracles import judge
from mcore_qwen3vl.verification.search.running import Bench
from mcore_qwen3vl.verification.search.search import Search

Plant = Callable[[pytest.MonkeyPatch], None]
FAULTS: dict[str, Plant] = {}


def fault(plant: Plant) -> Plant:
    FAULTS[plant.__name__] = plant
    return plant


def everywhere(patch: pytest.MonkeyPatch, original: Any, other: Any) -> None:
    """Replace a function in all modules of the package that have imported it."""
    found = 0
    for name, module in list(sys.modules.items()):
        if name.startswith("mcore_qwen3vl"):
            for attribute, value in list(vars(module).items()):
                if value is original:
                    patch.setattr(module, attribute, other)
                    found += 1
    assert found, original


def around(patch: pytest.MonkeyPatch, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method by `wrapper`, which takes the original before its arguments."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **named: wrapper(original, *args, **named))


# Once in this package.


@fault
def router_balances_each_rank_by_itself(patch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.moe.router import TopKRouter

    from mcore_qwen3vl.model.decoder.router import BalancedRouter

    patch.setattr(BalancedRouter, "_apply_aux_loss", TopKRouter._apply_aux_loss)


@fault
def norms_under_sp_are_not_reduced(patch: pytest.MonkeyPatch) -> None:
    from mcore_qwen3vl.training import hooks

    everywhere(patch, hooks.reduce_in_pieces, lambda original, model, *args: None)


@fault
def resumed_data_begin_anew(patch: pytest.MonkeyPatch) -> None:
    from mcore_qwen3vl.training.checkpoints import data_state

    patch.setattr(data_state, "load", lambda *args: None)


@fault
def resumed_adam_counts_from_zero(patch: pytest.MonkeyPatch) -> None:
    from mcore_qwen3vl.training import optimizer_state

    def from_zero(original: Any, *args: Any) -> Any:
        return [{**group, "step": 0} if "step" in group else group for group in original(*args)]

    around(patch, optimizer_state, "_own_groups", from_zero)


@fault
def another_number_of_ranks_goes_on_at_the_first_position(patch: pytest.MonkeyPatch) -> None:
    from mcore_qwen3vl.training.checkpoints import data_state

    around(
        patch, data_state, "redistribute",
        lambda original, states, size: [
            {**state, "start": 0, "loader": None} for state in original(states, size)
        ],
    )  # fmt: skip


@fault
def packs_attend_across_samples(patch: pytest.MonkeyPatch) -> None:
    from mcore_qwen3vl import forward

    patch.setattr(forward, "_packed_sequence", lambda batch: None)


@fault
def end_of_turn_is_not_trained(patch: pytest.MonkeyPatch) -> None:
    from mcore_qwen3vl.data.encoding import rendering

    owner = next(
        kind for kind in vars(rendering).values()
        if isinstance(kind, type) and "_turn_bounds" in vars(kind)
    )  # fmt: skip

    def shorter(original: Any, *args: Any) -> tuple[int, int]:
        start, end = original(*args)
        return start, end - len("<|im_end|>")

    around(patch, owner, "_turn_bounds", shorter)


@fault
def weights_of_samples_do_not_count(patch: pytest.MonkeyPatch) -> None:
    from mcore_qwen3vl.losses import tokens

    patch.setitem(tokens.BUILT_IN, "weighted_cross_entropy", tokens.cross_entropy)
    patch.setitem(tokens.BUILT_IN, "scaled_cross_entropy", tokens.cross_entropy)


@fault
def the_last_micro_batch_alone_is_counted(patch: pytest.MonkeyPatch) -> None:
    from mcore_qwen3vl.training.forward_step import ForwardStep

    def forgetting(original: Any, self: ForwardStep, *args: Any) -> Any:
        self._normaliser = None
        return original(self, *args)

    around(patch, ForwardStep, "_reduce", forgetting)


@fault
def positions_of_images_are_those_of_text(patch: pytest.MonkeyPatch) -> None:
    from mcore_qwen3vl.data.encoding import batch

    def flat(original: Any, *args: Any, **named: Any) -> Any:
        positions, delta = original(*args, **named)
        return positions[:1].expand_as(positions).contiguous(), delta

    around(patch, batch, "mrope_position_ids", flat)


@fault
def features_enter_a_layer_late(patch: pytest.MonkeyPatch) -> None:
    from mcore_qwen3vl.model.decoder.layer import DeepStackLayer

    def late(original: Any, self: Any, hidden: Any, context: Any, mask: Any) -> Any:
        rolled = None if context is None else context.roll(1, 0)
        return original(self, hidden, rolled, mask)

    around(patch, DeepStackLayer, "add_features", late)


@fault
def frozen_parts_train(patch: pytest.MonkeyPatch) -> None:
    from mcore_qwen3vl.model.freeze import Freezing

    def thaw(original: Any, self: Any, chunk: Any) -> None:
        original(self, chunk)
        for parameter in chunk.parameters():
            parameter.requires_grad_(True)

    around(patch, Freezing, "apply", thaw)


@fault
def rates_of_parts_are_squared(patch: pytest.MonkeyPatch) -> None:
    from mcore_qwen3vl.training import optimizer

    def squared(original: Any, settings: Any) -> Any:
        training = settings.training
        twice = replace(
            training,
            vision_lr_mult=training.vision_lr_mult**2,
            aligner_lr_mult=training.aligner_lr_mult**2,
        )
        return original(replace(settings, training=twice))

    around(patch, optimizer, "learning_rate_overrides", squared)


def _forget_squares(state: Any) -> None:
    """Set Adam's second moments to 0, wherever they are in a state."""
    for key, value in state.items() if isinstance(state, dict) else enumerate(state):
        if key == "exp_avg_sq":
            tensors = value if isinstance(value, list) else [value]
            for tensor in tensors:
                tensor.zero_()
        elif isinstance(value, dict | list):
            _forget_squares(value)


@fault
def experts_go_on_without_moments_under_another_ep(patch: pytest.MonkeyPatch) -> None:
    from mcore_qwen3vl.training import optimizer_state

    def forgetful(original: Any, state: dict[Any, Any], parts: int) -> dict[Any, Any]:
        regrouped: dict[Any, Any] = original(state, parts)
        if regrouped is not state:
            _forget_squares(regrouped)
        return regrouped

    around(patch, optimizer_state, "regroup", forgetful)


@fault
def exports_lack_the_last_digits(patch: pytest.MonkeyPatch) -> None:
    from mcore_qwen3vl.converters.export import Gatherer

    def rounded(original: Any, *args: Any, **named: Any) -> Any:
        tensors = original(*args, **named)
        return {name: value.bfloat16().to(value.dtype) for name, value in tensors.items()}

    around(patch, Gatherer, "gather", rounded)


@fault
def frames_come_back_in_another_order(patch: pytest.MonkeyPatch) -> None:
    from mcore_qwen3vl.model import vision

    def reversed_order(original: Any, *args: Any) -> Any:
        share = original(*args)
        return replace(share, order=share.order.flip(0)) if args[2] > 1 else share

    around(patch, vision, "share_frames", reversed_order)


@fault
def dpo_scales_twice(patch: pytest.MonkeyPatch) -> None:
    from mcore_qwen3vl.losses import preference

    around(
        patch, preference, "pair_losses",
        lambda original, a, b, c, one: original(a, b, c, replace(one, beta=2 * one.beta)),
    )  # fmt: skip


@fault
def the_warm_up_is_a_step_short(patch: pytest.MonkeyPatch) -> None:
    from mcore_qwen3vl.training import optimizer

    def ahead(original: Any, scheduler: Any) -> None:
        original(scheduler)
        rate_of = scheduler.get_lr

        def later(group: dict[str, Any]) -> float:
            scheduler.num_steps += 1
            rate: float = rate_of(group)
            scheduler.num_steps -= 1
            return rate

        scheduler.get_lr = later
        scheduler.step(0)

    around(patch, optimizer, "scale_warmup_start", ahead)


@fault
def a_run_leaves_a_file(patch: pytest.MonkeyPatch) -> None:
    from mcore_qwen3vl.training.run import Run

    def leaving(original: Any, self: Any) -> int:
        code: int = original(self)
        Path(tempfile.mkdtemp(), "left").touch()
        return code

    around(patch, Run, "train", leaving)


@fault
def bad_records_are_replaced_by_others(patch: pytest.MonkeyPatch) -> None:
    from mcore_qwen3vl.data.order import Order

    around(
        patch, Order, "__getitem__",
        lambda original, self, place: original(self, max(place - 1, 0) if place == 2 else place),
    )  # fmt: skip


# Made up for the search.


@fault
def gradients_are_divided_by_dp_again(patch: pytest.MonkeyPatch) -> None:
    from mcore_qwen3vl.training.forward_step import ForwardStep

    def again(original: Any, self: Any, model: list[Any]) -> None:
        from megatron.core import parallel_state

        original(self, model)
        for chunk in model:
            chunk.scale_gradients(1 / parallel_state.get_data_parallel_world_size())

    around(patch, ForwardStep, "normalise", again)


@fault
def labels_are_a_token_off(patch: pytest.MonkeyPatch) -> None:
    from mcore_qwen3vl.data.encoding.batch import Batcher

    def off(original: Any, *args: Any) -> Any:
        batch = original(*args)
        return replace(batch, labels=batch.labels.where(batch.labels < 0, batch.input_ids))

    around(patch, Batcher, "_assemble", off)


@fault
def ranks_of_cp_hold_each_others_tokens(patch: pytest.MonkeyPatch) -> None:
    from mcore_qwen3vl.model import inputs

    around(
        patch, inputs, "_cp_mask",
        lambda original, length, size, rank, ends: original(length, size, size - 1 - rank, ends),
    )  # fmt: skip


@fault
def a_rank_reads_the_records_of_the_first(patch: pytest.MonkeyPatch) -> None:
    from mcore_qwen3vl.data.order import Blocks

    def of_the_first(original: Any, self: Any, key: Any) -> Any:
        size = self.worker_config.world_size
        return original(self, (key[0] // size * size,))

    around(patch, Blocks, "restore_sample", of_the_first)


@fault
def an_epoch_is_drawn_with_replacement(patch: pytest.MonkeyPatch) -> None:
    from mcore_qwen3vl.data.order import Order

    def drawn(original: Any, self: Any, part: int, epoch: int) -> Any:
        order = original(self, part, epoch)
        return order[self._random_state(part, epoch, 1).randint(0, len(order), len(order))]

    around(patch, Order, "_draw_permutation", drawn)


@fault
def pixels_are_a_shade_darker(patch: pytest.MonkeyPatch) -> None:
    from mcore_qwen3vl.model.inputs import PixelScale

    around(patch, PixelScale, "apply", lambda original, *args: original(*args) - 0.01)


@fault
def pictures_of_a_micro_batch_are_swapped(patch: pytest.MonkeyPatch) -> None:
    from mcore_qwen3vl.data.encoding import batch

    around(
        patch, batch, "_join_patches", lambda original, some: original([*reversed(some)])
    )  # fmt: skip


def _with_groups(patch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], None]) -> None:
    """Change each group of the optimizer, when it is made."""
    from mcore_qwen3vl.training import optimizer_state

    def changed(original: Any, made: Any) -> None:
        original(made)
        for part in optimizer_state.chained_optimizers(made):
            for group in part.optimizer.param_groups:
                change(group)

    around(patch, optimizer_state, "start_momentum", changed)


@fault
def betas_are_swapped(patch: pytest.MonkeyPatch) -> None:
    _with_groups(patch, lambda group: group.update(betas=group["betas"][::-1]))


@fault
def vectors_decay(patch: pytest.MonkeyPatch) -> None:
    _with_groups(patch, lambda group: group.update(wd_mult=1.0))


@fault
def nothing_is_clipped(patch: pytest.MonkeyPatch) -> None:
    from mcore_qwen3vl.training import optimizer_state

    def unclipped(original: Any, made: Any) -> None:
        original(made)
        for part in optimizer_state.chained_optimizers(made):
            part.config.clip_grad = 0.0

    around(patch, optimizer_state, "start_momentum", unclipped)


@fault
def validation_leaves_a_record_out(patch: pytest.MonkeyPatch) -> None:
    from mcore_qwen3vl.training import data_provider

    class Fewer(data_provider.CrudeSamples):
        def __len__(self) -> int:
            return max(super().__len__() - 2, 1)

    patch.setattr(data_provider, "CrudeSamples", Fewer)


def hunt(bench: Bench, plant: Plant, seconds: float, seed: int) -> tuple[int, str]:
    """Return how many cases it took to find a fault, 0 if it was not, and the oracle's words."""
    begun, number = time.monotonic(), 0
    while time.monotonic() - begun < seconds:
        case = Search(bench, seed).case(number)
        number += 1
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            _, verdict = judge(case, bench)
        bench.clear()
        if verdict is not None:
            _, without = judge(case, bench)
            bench.clear()
            if without is None:
                return number, f"{verdict.oracle}: {verdict.text[:100]}"
    return 0, f"not found in {number} cases"


def main(argv: Sequence[str] | None = None) -> None:
    """Plant each fault in turn, and print a table."""
    program = "python -m tests.verification.search.planted"
    parser = argparse.ArgumentParser(description=__doc__, prog=program)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--minutes", type=float, default=5.0, help="for each fault")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    quiet_libraries()
    multiprocessing.set_start_method("fork")
    found = 0
    with scratch_folder("mcore-qwen3vl-planted-") as folder:
        bench = Bench(folder)
        names = given.names or list(FAULTS)
        print("| fault | cases | seconds | found by |\n|---|---:|---:|---|", flush=True)
        for name in names:
            begun = time.monotonic()
            cases, words = hunt(bench, FAULTS[name], 60 * given.minutes, given.seed)
            found += cases > 0
            seconds = time.monotonic() - begun
            print(f"| {name} | {cases or '-'} | {seconds:.0f} | {words} |", flush=True)
        print(f"\n{found} of {len(names)} found")


if __name__ == "__main__":
    main()
