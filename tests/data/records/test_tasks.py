"""Records of every task are read with the right weights and targets, and bad ones are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.data import DataConfig, load_processor
from mcore_qwen3vl.data.inspection import check_data
from mcore_qwen3vl.data.records.hooks import preprocess_record
from mcore_qwen3vl.data.records.media import MediaFolder
from mcore_qwen3vl.data.records.messages import Conversation
from mcore_qwen3vl.data.records.parse import parse_record
from mcore_qwen3vl.data.records.reading import PLAIN, BadSample, Reading
from mcore_qwen3vl.data.records.tasks import (
    is_classification,
    is_labelled,
    parse_classification,
    parse_judgements,
    parse_labelled,
    parse_pair,
    parse_retrieval,
)
from mcore_qwen3vl.labels import Labels
from mcore_qwen3vl.losses.registry import detected_form
from mcore_qwen3vl.unused.fields import Unused

FOLDER = MediaFolder(Path("/data"), {})
WHICH = {"role": "user", "content": "Which?"}
ASKED = {"role": "user", "content": "<image>Which?"}
SAID = {"role": "assistant", "content": "This."}
AGAIN = {"role": "user", "content": "Sure?"}
SINGLE = Labels(("ant", "bee", "cow"), "single_label_classification")
MULTI = Labels(SINGLE.names, "multi_label_classification")
TEXT = {"type": "text", "text": "Which?"}
PARTS = [{"type": "image"}, TEXT]


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def turn(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def texts(parts: list[dict[str, Any]]) -> str:
    return "".join(part.get("text", "[image]") for part in parts)


def classified(
    labels: Labels | None = SINGLE, system: str | None = None, **record: Any
) -> Conversation:
    return parse_classification(record, FOLDER, Reading(system=system), labels)


def labelled(reading: Reading = PLAIN, **record: Any) -> Conversation:
    record = {"images": ["i.png"], "label": False, **record}
    assert is_labelled(record)
    return parse_labelled(record, FOLDER, reading)


def pair_of(**record: Any) -> dict[str, Conversation]:
    return parse_pair({"images": ["i.png"], **record}, FOLDER)


def retrieved(reading: Reading = PLAIN, **record: Any) -> dict[str, Conversation]:
    return parse_retrieval(record, FOLDER, reading)


def judged(reading: Reading = PLAIN, **record: Any) -> dict[str, Conversation]:
    return parse_judgements(record, FOLDER, reading)


@pytest.mark.parametrize("label", [1, "bee", [1], ["bee"], True])
def test_a_label_is_a_number_or_a_name(label: Any) -> None:
    assert classified(messages=[WHICH], label=label).target == (0, 1, 0)


def test_several_labels_may_be_right() -> None:
    assert classified(MULTI, messages=[WHICH], label=["cow", 0]).target == (1, 0, 1)
    assert classified(MULTI, messages=[WHICH], label=[]).target == (0, 0, 0)


def test_the_generation_prompt_follows_messages_without_an_answer() -> None:
    found = classified(messages=[WHICH, SAID], label=0)
    assert (found.prompt, found.format, found.unused) == (False, "classification", ())
    assert classified(messages=[WHICH], label=0).prompt
    found = classified(system="Be brief.", image="i.png", text="Which?", label=0, source="web")
    assert found.prompt
    assert [message["role"] for message in found.messages] == ["system", "user"]
    assert [media.name for media in found.media] == ["i.png"]
    assert found.unused == (Unused("a record", "source"),)


def test_scoring_needs_no_label() -> None:
    assert classified(None, messages=[WHICH]).target is None


def test_only_a_record_without_an_answer_is_a_classifiers_by_its_keys() -> None:
    assert is_classification({"messages": [WHICH], "label": "bee"})
    assert is_classification({"image": "i.png", "label": 2})
    assert not is_classification({"image": "i.png", "text": "A bee.", "label": 2})
    assert not is_classification({"image": "i.png", "conversations": [], "label": 2})
    assert not is_classification({"label": 2})
    assert not is_classification({"messages": [WHICH, SAID], "label": "bee"})
    assert not is_classification({"messages": [WHICH], "label": True})
    assert not is_classification({"messages": [WHICH]})


def test_all_forms_of_a_labelled_record_are_one() -> None:
    forms = [
        labelled(prompt="<image>Which?", completion="This."),
        labelled(prompt=ASKED, completion=SAID),
        labelled(prompt=[ASKED], completion=[SAID]),
        labelled(messages=[ASKED, SAID]),
    ]
    for found in forms:
        assert found == forms[0]
        assert (found.target, found.format) == (0, "labelled")
        assert found.weights == [0, 1]
        assert [media.name for media in found.media] == ["i.png"]
    assert labelled(messages=[ASKED, SAID], label=True).target == 1


def test_only_the_answer_counts_and_the_system_prompt_begins() -> None:
    messages = [ASKED, SAID, AGAIN, SAID]
    found = labelled(Reading(system="Be brief.", train_on="all"), messages=messages)
    assert found.weights == [0, 0, 0, 0, 1]
    assert found.messages[0] == {"role": "system", "content": "Be brief."}


def test_a_label_is_not_trained_on_in_silence_without_kto() -> None:
    with pytest.raises(BadSample, match=r"^label is true or false.*--loss kto"):
        parse_record({"messages": [ASKED, SAID], "images": ["i.png"], "label": True}, FOLDER)
    assert not is_labelled({"messages": [ASKED, SAID], "label": 1})


def test_all_forms_of_a_pair_are_one() -> None:
    shared = [ASKED, SAID, AGAIN]
    forms = [
        pair_of(messages=shared, chosen="Yes.", rejected="No."),
        pair_of(messages=shared, chosen=said("Yes."), rejected=[said("No.")]),
        pair_of(chosen=[*shared, said("Yes.")], rejected=[*shared, said("No.")]),
    ]
    for pair in forms:
        assert pair == forms[0]
        for side in (pair["chosen"], pair["rejected"]):
            assert side.weights == [0, 0, 0, 1]  # the earlier answer is shared, so not trained
            assert [media.name for media in side.media] == ["i.png"]
    assert forms[0]["chosen"].messages[-1]["content"] == "Yes."
    assert forms[0]["rejected"].messages[-1]["content"] == "No."


def test_several_turns_of_their_own_count_unless_their_weight_is_0() -> None:
    end = [said("One.", weight=0), AGAIN, said("Two.")]
    pair = pair_of(messages=[ASKED], chosen=end, rejected="No.")
    assert pair["chosen"].weights == [0, 0, 0, 1]
    assert pair["rejected"].weights == [0, 1]


CALL = {"name": "look", "arguments": {}}
CALLED = [{"role": "tool_call", "content": json.dumps(CALL)}, {"role": "tool", "content": "42"}]
"""ms-swift's form, in which a call is a message of its own."""


@pytest.mark.parametrize("before", [[], [said("I look.")], [{**CALLED[0]}]])
def test_turns_of_their_own_count_behind_calls_which_are_one_turn_with_what_precedes(
    before: list[Any],
) -> None:
    """As they do where the calls are a key of that turn."""
    shared = [WHICH, *before, *CALLED]
    answers = {
        "chosen": [said("This."), AGAIN, said("Yes.")],
        "rejected": [said("That."), AGAIN, said("No.")],
    }
    pair = parse_pair({"messages": shared, **answers}, FOLDER)
    for side, answer in answers.items():
        assert [m["content"] for m in pair[side].messages[-3:]] == [m["content"] for m in answer]
        assert pair[side].weights == [0, 0, 0, 1, 0, 1]
        labelled = {"prompt": shared, "completion": answer, "label": True}
        assert parse_labelled(labelled, FOLDER).weights == [0, 0, 0, 1, 0, 1]


def test_a_call_that_goes_on_with_a_shared_turn_makes_it_their_own() -> None:
    sides = [
        [{"role": "tool_call", "content": json.dumps({**CALL, "name": name})}] for name in "ab"
    ]
    pair = parse_pair(
        {"messages": [WHICH, said("I look.")], "chosen": sides[0], "rejected": sides[1]}, FOLDER
    )
    assert pair["chosen"].weights == [0, 1]


def test_a_system_text_of_a_record_moves_no_weight() -> None:
    whole = {
        "chosen": [WHICH, SAID, AGAIN, said("Yes.")],
        "rejected": [WHICH, SAID, user("Really?"), said("No.")],
    }
    pair = parse_pair({**whole, "system": "Be brief."}, FOLDER)
    assert pair["chosen"].weights == pair["rejected"].weights == [0, 0, 0, 0, 1]
    record = {"system": "Be brief.", "messages": [ASKED, SAID], "images": ["a.png"], "label": True}
    assert parse_labelled(record, FOLDER).weights == [0, 0, 1]


def test_a_classifiers_image_beside_messages_is_used_or_refused() -> None:
    found = parse_classification(
        {"messages": [ASKED], "image": "a.png", "label": 1}, FOLDER, PLAIN, SINGLE
    )
    assert len(found.media) == 1
    with pytest.raises(BadSample, match="1 images are given, but only 0"):
        parse_classification(
            {"messages": [WHICH], "image": "a.png", "label": 1}, FOLDER, PLAIN, SINGLE
        )
    found = parse_classification(
        {"messages": [WHICH], "text": "More.", "label": 1}, FOLDER, PLAIN, SINGLE
    )
    assert [one.name for one in found.unused] == ["text"]


def test_the_margin_is_on_the_chosen_side_and_zero_without_one() -> None:
    given: dict[str, Any] = {"messages": [ASKED], "chosen": "a", "rejected": "b"}
    pairs = pair_of(**given, margin=1.5), pair_of(**given)
    assert [pair["chosen"].target for pair in pairs] == [1.5, 0.0]
    assert pairs[0]["chosen"].unused == ()


def test_what_a_data_set_says_of_its_pairs() -> None:
    """A data set's hook makes the record, and its system prompt begins both sides."""
    record = {"asked": "Which?", "good": "This.", "bad": "That."}
    reading = Reading(preprocess=f"{__name__}:as_pair", system="Be brief.")
    pair = parse_pair(preprocess_record(record, reading), FOLDER, reading)
    for side, text in ((pair["chosen"], "This."), (pair["rejected"], "That.")):
        assert [m["role"] for m in side.messages] == ["system", "user", "assistant"]
        assert side.messages[0]["content"] == "Be brief."
        assert str(side.messages[2]["content"]).find(text) >= 0
        assert side.weights == [0.0, 0.0, 1.0]


def as_pair(record: dict[str, str]) -> dict[str, Any]:
    turns = [{"role": "user", "content": record["asked"]}]
    return {"messages": turns, "chosen": record["good"], "rejected": record["bad"]}


@pytest.mark.parametrize("messages", [[AGAIN], [AGAIN, SAID]])
def test_a_pair_is_refused_as_a_single_conversation(messages: list[dict[str, str]]) -> None:
    with pytest.raises(BadSample, match="--loss dpo, simpo or orpo trains on these"):
        parse_record({"messages": messages, "chosen": "a", "rejected": "b"}, FOLDER)


@pytest.mark.parametrize(
    "record",
    [
        {"query": "<image>Which?", "images": ["i.png"]},
        {"query": {"text": "Which?", "image": "i.png"}},
        {"query": user([{"type": "image", "image": "i.png"}, TEXT])},
        {"messages": [user("<image>Which?")], "images": ["i.png"]},
    ],
)
def test_all_forms_of_a_text_are_one(record: dict[str, Any]) -> None:
    (query,) = retrieved(**record).values()
    assert query.messages == [user(PARTS)]
    assert [media.content for media in query.media] == [Path("/data/i.png")]
    assert query.prompt


def test_every_document_takes_its_own_media() -> None:
    found = retrieved(
        messages=[user("Which?")],
        positive_messages=[[user("<image>This.")]],
        positive_images=[["p.png"]],
        negative_messages=[[user("That.")], [user("<image>It.")]],
        negative_images=[[], ["n.png"]],
        label=1,
    )
    assert list(found) == ["query", "positive", "negative 0", "negative 1"]
    media = {name: [one.content for one in text.media] for name, text in found.items()}
    assert media["positive"] == [Path("/data/p.png")]
    assert (media["negative 0"], media["negative 1"]) == ([], [Path("/data/n.png")])
    assert (found["query"].target, found["query"].unused) == (1.0, ())


def test_a_list_of_texts_is_one_of_documents() -> None:
    found = retrieved(query="Which?", positive=["a"], negative=["b", "c"])
    said = {name: text.messages[0]["content"] for name, text in found.items()}
    assert said == {"query": "Which?", "positive": "a", "negative 0": "b", "negative 1": "c"}


def test_a_data_sets_system_prompt_is_the_instruction_of_a_text() -> None:
    own = [{"role": "system", "content": "Own."}, user("It.")]
    found = retrieved(Reading(system="Find it."), query="Which?", positive=own)
    assert found["query"].messages[0] == {"role": "system", "content": "Find it."}
    assert found["positive"].messages[0]["content"] == "Own."


def test_other_training_names_the_flag() -> None:
    record = {
        "messages": [user("Which?"), {"role": "assistant", "content": "It."}],
        "positive": "a",
    }
    with pytest.raises(BadSample, match="--task embedding and --task reranker train on"):
        parse_record(record, FOLDER)


def test_a_check_counts_all_texts_of_a_record(dense: Path, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    records = [{"query": "One?", "positive": "It is.", "negatives": ["No."]}, {"positive": [1]}]
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    report = check_data(
        file, load_processor(dense), DataConfig(256, packing=True, records=detected_form())
    )
    assert report.formats == {"retrieval": 1}
    assert len(report.bad) == 1
    assert report.trained_tokens == [0]
    alone = check_data(
        file,
        load_processor(dense),
        DataConfig(report.tokens[0] - 1, packing=True, records=detected_form()),
    )
    assert "all 3" in alone.overlong[0].reason


@pytest.mark.parametrize(
    "record",
    [
        {
            "query": "<image>Which?",
            "images": ["q.png"],
            "positive": {"image": "p.png", "text": "A"},
        },
        {
            "messages": turn("user", "<image>Which?"),
            "images": ["q.png"],
            "positive_messages": [turn("assistant", "<image>A")],
            "positive_images": [["p.png"]],
        },
    ],
)
def test_a_document_is_judged_after_its_query(record: dict[str, Any]) -> None:
    found = judged(**record, negatives=["B"])
    assert list(found) == ["positive", "negative 0"]
    system, user = found["positive"].messages
    assert system["content"].endswith('the answer can only be "yes" or "no".')
    assert texts(user["content"]) == (
        "<Instruct>: Given a search query, retrieve relevant candidates that answer the query."
        "<Query>:[image]Which?\n<Document>:[image]A"
    )
    media = [one.content for one in found["positive"].media]
    assert media == [Path("/data/q.png"), Path("/data/p.png")]
    assert texts(found["negative 0"].messages[1]["content"]).endswith("\n<Document>:B")
    assert all(one.prompt for one in found.values())


def test_the_instruction_is_the_querys_system_message() -> None:
    record = {"query": "Which?", "positive": "A"}
    (found,) = judged(Reading(system="Find it."), **record).values()
    assert texts(found.messages[1]["content"]).startswith("<Instruct>: Find it.<Query>:Which?")


REFUSED: dict[Callable[..., Any], list[tuple[dict[str, Any], str]]] = {
    classified: [
        ({"messages": [WHICH]}, "it has 0 labels, and --task classify trains on one"),
        ({"messages": [WHICH], "label": [0, 1]}, "it has 2 labels.*--problem-type multi_label"),
        ({"messages": [WHICH], "label": 3}, r"label is \[3\]; the 3 labels are ant, bee, cow"),
        ({"messages": [WHICH], "label": "dog"}, "the 3 labels are ant, bee, cow"),
        ({"messages": [WHICH], "label": 0.5}, "label is 0.5; a number from 0 or a name"),
        ({"messages": [WHICH], "label": -1}, "label is -1; a number from 0 or a name"),
        ({"label": 0}, "none of text, image and video"),
    ],
    labelled: [
        (
            {"messages": [ASKED, SAID], "prompt": "Which?"},
            "both messages and prompt are given; keep one",
        ),
        (
            {"prompt": "<image>a", "completion": "b", "messages": [ASKED, SAID]},
            "both messages and prompt are given; keep one",
        ),
        ({"prompt": "<image>Which?"}, "needs prompt and completion, or messages"),
        ({"messages": [SAID]}, "needs prompt and completion, or messages"),
        ({"messages": [SAID, ASKED]}, "completion.* no assistant turn"),
        ({"prompt": 3, "completion": "This."}, "prompt must be text, a message or"),
        ({"prompt": "Which?", "completion": "<image>"}, "the answer has an image"),
        ({"messages": [ASKED, SAID], "weight": 2}, "a labelled record has no weight"),
    ],
    pair_of: [
        ({"chosen": [ASKED, SAID]}, "rejected is missing"),
        ({"messages": [ASKED], "chosen": "a", "rejected": "a"}, "are the same"),
        ({"chosen": "a", "rejected": "b"}, "chosen is one answer, with neither messages nor a"),
        ({"messages": [ASKED], "chosen": 3, "rejected": "b"}, "chosen must be text, a message"),
        ({"messages": [ASKED], "chosen": "a", "rejected": ""}, "rejected: message 2, .* is empty"),
        ({"messages": [ASKED], "chosen": "a", "rejected": "b", "weight": 2}, "has no weight"),
        (
            {"messages": [ASKED], "chosen": said("a", weight=0.5), "rejected": "b"},
            "chosen: .* weight is 0 or 1",
        ),
        (
            {"messages": [ASKED, SAID], "chosen": [AGAIN], "rejected": [AGAIN, said("b")]},
            "chosen has no assistant turn of its own",
        ),
        (
            {"messages": [AGAIN], "chosen": "a", "rejected": "b"},
            "chosen: 1 images are given",
        ),
        ({"messages": [ASKED], "chosen": "a", "rejected": "b", "margin": "2"}, "margin is '2'"),
    ],
    retrieved: [
        ({"label": 1}, "has query, or messages, and positive"),
        ({"query": 3}, "query: it must be a text"),
        ({"query": " "}, "query is empty"),
        ({"positive": ["a", "b"]}, "positive holds 2 documents; one"),
        ({"query": {"audio": "a.wav"}}, "none of text, image and video"),
        ({"query": "<image>Which?"}, "query: message 1: there are more image placeholders"),
        ({"positive": "a", "positive_messages": []}, "both positive and positive_messages"),
        ({"negatives": "a"}, "negatives is str; a list of documents"),
        ({"positive_messages": [["a"], ["b"]]}, "holds 2 documents; one"),
        ({"negatives": ["a", "b"], "negative_images": [["i.png"]]}, "one list for each of 2"),
    ],
    judged: [
        ({"positive": "A"}, "it has no query"),
        ({"query": "Which?"}, "it has no document"),
        ({"query": [*turn("user", "a"), *turn("user", "b")], "positive": "A"}, "2 messages"),
        (
            {"query": "a", "positive": [*turn("system", "Own."), *turn("user", "b")]},
            "positive has a system message",
        ),
    ],
}


@pytest.mark.parametrize(
    ("parse", "record", "message"),
    [(parse, *row) for parse, rows in REFUSED.items() for row in rows],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_a_bad_record_is_named(
    parse: Callable[..., Any], record: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadSample, match=message):
        parse(**record)
