"""The search finds a planted fault, and shrinks it to the least that still shows it."""

from __future__ import annotations

import ast
import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, get_args

import pytest

from mcore_qwen3vl.converters.hf import quantized
from mcore_qwen3vl.data.loader_state import redistribute
from mcore_qwen3vl.errors import Unfinished
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.losses.registry import all_losses
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.tiny.tiny_checkpoint import FamilyName
from mcore_qwen3vl.training.checkpoints import data_state
from mcore_qwen3vl.training.forward_step import ForwardStep
from mcore_qwen3vl.training.logs import step_report
from mcore_qwen3vl.training.optimizer import part_grad_norms
from mcore_qwen3vl.training.run import Run
from mcore_qwen3vl.verification.runs import LOGGED
from mcore_qwen3vl.verification.search import (
    axes,
    comparing,
    of_user,
    oracles,
    plain,
    records,
    table,
)
from mcore_qwen3vl.verification.search.axes import draw, layouts
from mcore_qwen3vl.verification.search.case import (
    ADAPTER,
    OTHER,
    Case,
    Flag,
    Stop,
    paste,
    segments,
)
from mcore_qwen3vl.verification.search.data_files import Form, picture
from mcore_qwen3vl.verification.search.flags import drawable
from mcore_qwen3vl.verification.search.running import Bench, Outcome, Ran
from mcore_qwen3vl.verification.search.search import Counterexample, Search, main
from mcore_qwen3vl.verification.search.shrinking import shrink

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


def dense(rng: Random, case: Case) -> Case:
    maker = records.one_image if case.has_vision else records.text_only
    return replace(case, records=records.lines(rng, (maker,), 4, False))


def on_two_ranks(rng: Random, case: Case) -> Case:
    return replace(case, layout=rng.choice(("dp2", "tp2", "tp2+sp")))


def test_a_planted_fault_is_found_and_shrunk(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    normalise = ForwardStep.normalise

    def off_by_a_rank(self: ForwardStep, model: list[Any]) -> None:
        """Divide the gradients once more than a single rank does."""
        from megatron.core import parallel_state

        normalise(self, model)
        if parallel_state.get_data_parallel_world_size() > 1:
            for chunk in model:
                chunk.scale_gradients(0.5)

    monkeypatch.setattr(ForwardStep, "normalise", off_by_a_rank)
    search = Search(bench, 0, (dense, on_two_ranks, axes.end), (oracles.single_rank,))
    search.run(time.monotonic() + 240, most=8, stop_at_first=True)
    (found,) = search.findings
    assert found.verdict.oracle == "single_rank"
    assert "grad norm" in found.verdict.text
    assert found.case.layout == "dp2"
    assert (len(found.case.records), found.case.steps, found.case.flags) == (1, 1, ())
    assert not found.case.validates
    assert "--processes 2" in paste(found.case)


@pytest.mark.slow
def test_without_a_fault_nothing_is_found(bench: Bench) -> None:
    search = Search(bench, 0, (axes.model, dense, on_two_ranks, axes.stop, axes.end))
    search.run(time.monotonic() + 400, most=6)
    assert [finding.report() for finding in search.findings] == []
    # A resume with another value of some flag may be refused.
    assert search.counts["ran"] + search.counts["refused"] == 6
    assert search.counts["ran"] >= 4


def test_a_draw_depends_on_its_seed_alone_and_each_axis_varies() -> None:
    drawn = [draw(Random(f"5:{number}")) for number in range(60)]
    assert drawn == [draw(Random(f"5:{number}")) for number in range(60)]
    for side in (
        "model",
        "records",
        "flags",
        "layout",
        "batch",
        "steps",
        "stop",
        "validates",
        "form",
        "start",
    ):
        assert len({getattr(case, side) for case in drawn}) > 1, side
    for case in drawn:
        assert case.layout in layouts(case.model)
        assert Case.of_json(case.to_json()) == case


REMEDIES = (
    ("--lora-alpha is set: add --lora-rank 16 or drop it.", "--lora-rank", "16"),
    ("--min-lr 1 is above --lr. Give --min-lr 0.5.", "--min-lr", "0.5"),
    ("Megatron says no. Add --sequence-parallel.", "--sequence-parallel", None),
)


@pytest.mark.parametrize(("refusal", "name", "value"), REMEDIES)
def test_a_remedy_is_read_from_a_refusal(refusal: str, name: str, value: str | None) -> None:
    (other,) = oracles.remedied(Case(flags=(("--min-lr", "1"),)), refusal)
    assert other.has(name)
    assert value is None or other.value(name) == value


def test_other_remedies_change_the_batch_leave_a_flag_out_or_are_for_the_user() -> None:
    case = Case(batch=3, flags=(("--spec", "te"),))
    (batch,) = oracles.remedied(case, "3 is not a multiple of 2. Give --global-batch-size 4.")
    assert batch.batch == 4
    (without,) = oracles.remedied(case, "--spec te needs CUDA: leave it out.")
    assert without.flags == ()
    assert not list(oracles.remedied(case, "There is nothing to begin from: give --load DIR."))


def test_the_plain_schedule_rises_and_falls() -> None:
    recipe = plain.Recipe(lr=1.0, style="linear", warmup=2, steps=6, min_lr=0.2)
    assert [recipe.rate(done) for done in range(8)] == pytest.approx(
        [0, 0.5, 1, 0.8, 0.6, 0.4, 0.2, 0.2]
    )


def test_a_small_copy_keeps_heads_experts_and_processor(moe: Path, tmp_path: Path) -> None:
    copy = of_user.write_small_copy(moe, tmp_path / "small", layers=6)
    mine, theirs = (json.loads((one / "config.json").read_text()) for one in (copy, moe))
    for name in ("num_attention_heads", "num_experts", "vocab_size", "eos_token_id"):
        assert mine["text_config"][name] == theirs["text_config"][name], name
    assert mine["text_config"]["num_hidden_layers"] == 6
    assert (copy / "tokenizer.json").read_bytes() == (moe / "tokenizer.json").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("form", get_args(Form))
def test_training_names_records_as_a_case_does_in_each_form(form: Form, bench: Bench) -> None:
    makers = (records.one_image, records.tools, records.weights)
    lines = records.lines(Random(form), makers, 5, False)
    flags = (("--seq-length", "512"),)
    case = Case(records=lines, flags=flags, form=form, batch=5, steps=2)
    outcome, verdict = oracles.judge(case, bench)
    assert verdict is None, verdict
    assert outcome.finished, outcome.refusal
    came = {name for step in (1, 2) for name in outcome.names(step)}
    in_epochs = form not in ("tars", "weighted mixture")
    assert came == set(case.names) if in_epochs else came <= set(case.names)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(start="megatron"),
        Case(start="transformers"),
        Case(("--family", "qwen3.5", "--moe"), start="megatron-bridge"),
        Case(("--moe",), start="ms-swift"),
        Case(start="hybrid"),
        Case(flags=(("--lora-init", ADAPTER),)),
        Case(steps=4, stop=Stop("disk full", 1)),
        Case(validates=True),
        Case(flags=(("--eval-interval", "1"),), validates=True),
        Case(validates=True, behind="score", layout="tp2+sp"),
        Case(validates=True, behind="generate", layout="pp2"),
        Case(flags=(("--lora-init", ADAPTER),), validates=True, behind="score"),
        Case(("--family", "qwen3.5", "--text-only"), validates=True, behind="generate"),
        Case(flags=(("--image-max-tokens", "3"),), validates=True),
    ],
    ids=[
        "converted",
        "saved by transformers",
        "keys of Megatron-Bridge",
        "keys of ms-swift",
        "keys of a HybridModel",
        "adapter",
        "disk full",
        "export",
        "validations",
        "score",
        "generate",
        "adapter behind",
        "text alone",
        "few tokens of an image",
    ],
)
def test_other_beginnings_and_ends_of_a_run_are_judged(case: Case, bench: Bench) -> None:
    makers: tuple[records.Maker, ...] = (records.one_image, records.text_only)
    makers = makers if case.has_vision else records.without_media(makers)
    lines = records.lines(Random(3), makers, 5, False)
    outcome, verdict = oracles.judge(replace(case, records=lines), bench)
    assert verdict is None, verdict
    assert outcome.ran[-1].exit_code == 0
    assert len(outcome.log) == case.steps
    expected = {"tokens", "plain_loop"} | {
        name for name, applies in {
            "converted_start": case.start != "published",
            "export": case.validates,
            "unvalidated": case.has("--eval-interval"),
            "scores": case.behind == "score",
            "answers": case.behind == "generate",
            "merge": case.validates and case.trains_adapter,
            "single_rank": case.layout != "single",
            "never_stopped": case.stop is not None,
        }.items() if applies
    }  # fmt: skip
    assert expected <= set(outcome.judged_by)


@pytest.mark.slow
@pytest.mark.parametrize("maker", [*records.CONVERSATIONS, *records.DOCUMENTS])
@pytest.mark.parametrize("family", get_args(FamilyName))
def test_the_plain_loop_knows_every_kind_of_record(
    maker: records.Maker, family: str, bench: Bench
) -> None:
    case = Case(
        ("--family", family), records.lines(Random(1), (maker,), 4, False),
        (("--seq-length", "512"),), validates=True, behind="score",
    )  # fmt: skip
    outcome, verdict = oracles.judge(case, bench)
    assert verdict is None, verdict
    assert {"tokens", "plain_loop", "export", "scores"} <= set(outcome.judged_by)


OF_THEIR_OWN = (
    (("--loss", "kto"), ("--reference", "model"), ("--micro-batch-size", "2")),
    (("--loss", "distill"), ("--teacher", OTHER)),
    (("--task", "reranker"), ("--answers", "a", "b"), ("--seq-length", "1024")),
)


@pytest.mark.slow
@pytest.mark.parametrize("flags", OF_THEIR_OWN, ids=["kto", "distill", "reranker"])
def test_the_plain_loop_knows_losses_that_need_more(flags: tuple[Flag, ...], bench: Bench) -> None:
    (kind,) = (one for one in all_losses() if flags[0][1] in one.names)
    made = records.lines(Random(1), records.makers_of(kind, flags[0][1]), 6, False)
    outcome, verdict = oracles.judge(Case((), made, flags, batch=4), bench)
    assert verdict is None, verdict
    assert "plain_loop" in outcome.judged_by


BALANCED = (("--moe-aux-loss-coeff", "0.6"), ("--moe-z-loss-coeff", "0.05"))
SAMPLES = ("--moe-router-load-balancing-type", "seq_aux_loss")
OF_ROUTERS = {
    "micro-batches": ("single", (*BALANCED, ("--micro-batch-size", "2"))),
    "samples": ("ep2xdp2", (*BALANCED, SAMPLES, ("--micro-batch-size", "2"))),
    "packs": ("tp2+sp", (*BALANCED, ("--packing",))),
}


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "flags"), OF_ROUTERS.values(), ids=OF_ROUTERS)
@pytest.mark.parametrize("family", ["qwen3-vl", "qwen3.5"])
def test_the_plain_loop_knows_what_routers_balance(
    layout: str,
    flags: tuple[Flag, ...],
    family: str,
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    makers = (records.one_image, records.several_turns, records.weights)
    lines = records.lines(Random(5), makers, 8, False)
    case = Case(("--family", family, "--moe"), lines, flags, layout, batch=4)
    outcome, verdict = oracles.judge(case, bench, (oracles.plain_loop,))
    assert (verdict, outcome.judged_by) == (None, ["plain_loop"])
    monkeypatch.setattr(oracles, "_balancing", lambda *_: 0.3)
    _, verdict = oracles.judge(case, bench, (oracles.plain_loop,))
    assert verdict is not None
    assert "grad norm" in verdict.text


@pytest.mark.slow
def test_a_run_that_is_refused_at_its_resume_alone_is_wrong(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_the_first(states: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
        return [redistribute(states, size)[0]] * size

    monkeypatch.setattr(data_state, "redistribute", of_the_first)
    lines = records.lines(Random(3), (records.text_only,), 5, False)
    case = Case((), lines, steps=3, stop=Stop("saved", 1, "dp2"))
    _, verdict = oracles.judge(case, bench)
    assert verdict is not None
    assert (verdict.oracle, "this is rank 1 of 2" in verdict.text) == ("resumes", True)


def test_a_run_that_is_refused_before_its_disk_is_full_does_not_go_on(bench: Bench) -> None:
    lines = records.lines(Random(3), (records.text_only,), 2, False)
    flags = (("--exit-on-missing-checkpoint",),)
    outcome = bench.run(Case((), lines, flags, steps=3, stop=Stop("disk full", 1)))
    assert len(outcome.ran) == 1
    assert outcome.refusal.startswith("--exit-on-missing-checkpoint")


@pytest.mark.slow
def test_a_run_that_goes_on_with_other_flags_is_compared_with_a_single_rank(bench: Bench) -> None:
    lines = records.lines(Random(3), (records.text_only,), 4, False)
    stop = Stop("killed", 1, flags=(("--clip-grad", "0.01"),))
    outcome, verdict = oracles.judge(Case((), lines, layout="tp2", steps=3, stop=stop), bench)
    assert verdict is None, verdict
    assert outcome.finished, outcome.refusal
    assert "single_rank" in outcome.judged_by
    assert not {"plain_loop", "never_stopped"} & {*outcome.judged_by}


def test_records_without_media_are_of_each_kind_that_can_be() -> None:
    made = records.without_media((*records.CONVERSATIONS, *records.PAIRS, records.retrieval))
    lines = [line for seed in range(40) for line in records.lines(Random(seed), made, 6, False)]
    assert not [line for line in lines if ".png" in line]
    keys = {key for line in lines for key in json.loads(line)}
    assert {"messages", "tools", "weight", "chosen", "prompt", "query"} <= keys


@pytest.mark.slow
def test_a_users_language_model_alone_is_searched_with_texts(tmp_path: Path) -> None:
    alone = write_tiny_checkpoint(tmp_path / "alone", family="qwen3.5", text_only=True)
    report = of_user.search_model(alone, Layout.parse("dp2"), minutes=5, cases=3)
    assert report.ok, [finding.flaw for finding in report.failures]
    assert "tokens 3, " in report.environment["judged by"]


@pytest.mark.slow
def test_a_users_layout_flags_and_records_are_in_every_run(
    dense: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Case] = []
    drawn = of_user.Search.case

    def noted(self: Search, number: int) -> Case:
        seen.append(drawn(self, number))
        return seen[-1]

    monkeypatch.setattr(of_user.Search, "case", noted)
    report = of_user.search_model(
        dense, Layout.parse("dp2"), data=data, flags=["--packing"], minutes=5, cases=2
    )
    assert report.ok, [finding.flaw for finding in report.failures]
    assert {(case.layout, case.flags) for case in seen} == {("dp2", (("--packing",),))}
    assert {line for case in seen for line in case.records} <= set(data.read_text().splitlines())


def test_shrinking_keeps_what_fails_and_drops_the_rest() -> None:
    lines = tuple(json.dumps({"text": f"page {number}"}) for number in range(6))
    stop = Stop("killed", 2, "pp2", (("--lr", "1"),))
    case = Case(
        ("--moe",), lines, (("--packing",), ("--seed", "3")), "tp2xep2+sp", 4, 4, stop, True
    )

    def fails(one: Case) -> bool:
        return one.has("--seed") and "tp2" in one.layout and lines[4] in one.records

    smallest = shrink(case, fails, 10.0)
    assert smallest == Case((), (lines[4],), (("--seed", "3"),), "tp2", 1, 1)


def test_a_case_pastes_its_pictures_and_both_commands() -> None:
    line = json.dumps({"caption": "it", "image": "24x16-7.png"})
    case = Case(records=(line,), steps=3, stop=Stop("saved", 1, "dp2"))
    text = paste(case)
    assert text.count("mcore-qwen3vl train --processes") == 2
    assert "base64 -d > 24x16-7.png" in text
    assert line in text
    assert [segment.layout.dp for segment in segments(case)] == [1, 2]
    assert picture("24x16-7.png") != picture("24x16-8.png")


def test_a_finding_covers_cases_with_more_but_not_with_less() -> None:
    crash = oracles.Verdict("crashed", "command 1 ended in a traceback: ValueError: 17")
    finding = Counterexample(0, crash, Case(flags=(("--packing",),)))
    more = Case(("--moe",), flags=(("--packing",), ("--seed", "1")), layout="dp2")
    assert finding.covers(more, replace(crash, text=crash.text.replace("17", "23")))
    assert not finding.covers(Case(), crash)
    assert not finding.covers(more, oracles.Verdict("crashed", "ended in a traceback: OSError"))


def test_the_plain_loop_shares_no_code_with_us() -> None:
    tree = ast.parse(Path(plain.__file__).read_text("utf-8"))
    names = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    assert not [name for name in names if name.startswith(("mcore_qwen3vl", "megatron"))]


@pytest.mark.parametrize("difference", oracles.BY_DESIGN, ids=lambda one: one.page[1])
def test_differences_by_design_are_documented(difference: oracles.ByDesign) -> None:
    page, words = difference.page
    text = " ".join((DOCS / page).read_text("utf-8").split())
    assert words in text


@pytest.mark.parametrize(
    ("model", "loss", "finding"),
    [(("--moe",), 6.2387, ""), (("--moe",), 6.2385, "step 1"), ((), 6.2387, "step 1")],
    ids=["an expert that is nearly as good", "neither expert's", "without experts"],
)
def test_a_run_that_took_an_expert_of_nearly_the_same_score_agrees(
    model: tuple[str, ...], loss: float, finding: str, tmp_path: Path
) -> None:
    """With other experts, which a nudged learning rate takes, the loss is 6.2387, else 6.2382."""

    class NudgedBench:
        def run(self, case: Case) -> Outcome:
            other = 0 < float(case.value("--lr")) < 1e-3
            return outcome_of(6.2387 if other else 6.2382)

    def outcome_of(lm_loss: float) -> Outcome:
        log: dict[str, Any] = {"iteration": 1, "lm loss": lm_loss, "learning rate": 1e-3}
        return Outcome([Ran(0, log=[log])], tmp_path, tmp_path, tmp_path)

    bench: Any = NudgedBench()
    text = comparing.compare(outcome_of(loss), Case(model=model), bench, LOGGED, "one rank")
    assert text.startswith(finding)
    assert bool(text) == bool(finding)


@pytest.mark.parametrize(
    ("name", "agrees"), [("rewards margin", True), ("dpo loss", True), ("lm loss", False)]
)
def test_a_small_reward_is_compared_by_the_size_of_the_log_probabilities(
    name: str, agrees: bool, tmp_path: Path
) -> None:
    """A margin, and a loss of pairs, may be 0.03 apart in bf16 where it is 0.02; others may not."""

    def outcome_of(value: float) -> Outcome:
        log: dict[str, Any] = {"iteration": 1, "dpo loss": 0.7}
        validation = {"iteration": 1, f"validation {name}": value}
        ran = Ran(0, log=[log], validations=[validation])
        return Outcome([ran], tmp_path, tmp_path, tmp_path)

    text = comparing.differences(
        outcome_of(0.02), outcome_of(0.05), comparing.HALF_OF_SUMS, "one rank"
    )
    assert (text == "") == agrees, text


def test_a_model_in_fp8_is_compared_with_its_values(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = records.lines(Random(1), (records.one_image,), 4, False)
    case = Case(records=lines, start="fp8", layout="tp2")
    outcome, verdict = oracles.judge(case, bench, (oracles.crashed, oracles.plain_loop))
    assert (verdict, outcome.judged_by) == (None, ["crashed", "plain_loop"])
    dequantize = quantized.dequantize

    def slightly_larger(*arguments: Any) -> Any:
        return dequantize(*arguments) * 1.01

    monkeypatch.setattr(quantized, "dequantize", slightly_larger)
    _, verdict = oracles.judge(replace(case, layout="single"), bench, (oracles.plain_loop,))
    assert verdict is not None
    assert verdict.text.startswith("step 1: lm loss")


def test_a_validation_that_changes_the_training_is_found(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = Run._evaluate

    def leave_the_weights_larger(self: Run, original: Any, *args: Any, **kwargs: Any) -> Any:
        results = evaluate(self, original, *args, **kwargs)
        (model,) = args[2]
        for weight in model.parameters():
            weight.data.mul_(1.01)
        return results

    monkeypatch.setattr(Run, "_evaluate", leave_the_weights_larger)
    lines = records.lines(Random(1), (records.text_only,), 4, False)
    case = Case(records=lines, flags=(("--eval-interval", "1"),), validates=True)
    _, verdict = oracles.judge(case, bench, (oracles.unvalidated,))
    assert verdict is not None
    assert verdict.text.startswith("step 2: ")


def test_a_norm_of_a_part_that_is_not_of_the_gradient_is_found(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_a_scaled_loss(model: list[Any]) -> dict[str, Any]:
        return {part: 2 * norm for part, norm in part_grad_norms(model).items()}

    case = Case(records=records.lines(Random(1), (records.text_only,), 4, False))
    assert oracles.part_norms(case, bench.run(case), bench) == ""
    bench.clear()
    monkeypatch.setattr(step_report, "part_grad_norms", of_a_scaled_loss)
    _, verdict = oracles.judge(case, bench, (oracles.part_norms,))
    assert verdict is not None
    assert verdict.text.startswith("step 1: the gradient has the norm")


def test_a_process_that_breaks_does_not_end_a_search_as_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(file: Path, bench: Bench, until: float, worker: int, workers: int) -> int:
        if worker == 1:
            raise ValueError("broken")
        return 0

    monkeypatch.setattr("mcore_qwen3vl.verification.search.search.write_table", broken)
    with pytest.raises(Unfinished):
        main(["--table", str(tmp_path / "flags.md"), "--workers", "2"])


def test_a_table_of_flags_says_what_made_it_and_goes_on_behind_its_last_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "flags.md"
    words = ["--table", str(file), "--workers", "1", "--minutes", "0"]
    assert main(words) == Unfinished.exit_code
    assert re.search(r"^\| command \| `make search .*flags\.md'` \|$", file.read_text(), re.M)
    count = len(drawable())
    assert f"{count} flags remain" in capsys.readouterr().out
    with file.open("a") as stream:
        stream.writelines(f"| `{flag.name}` | | | | | |\n" for flag in drawable()[3:])
    assert main(words) == Unfinished.exit_code
    assert "3 flags remain" in capsys.readouterr().out


def test_a_message_in_the_table_has_no_folder_of_its_run() -> None:
    said = "/tmp/search-x/1/runs/000245/train.jsonl does not | exist."
    assert table._short(said) == "train.jsonl does not / exist."
