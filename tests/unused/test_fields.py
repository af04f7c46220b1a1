"""Fields that nothing uses are named once, with their values."""

from __future__ import annotations

from mcore_qwen3vl.unused.fields import Fields, Unused, as_json, sentences

FIELDS = Fields(
    "generation_config.json",
    used=("temperature",),
    inert=("transformers_version",),
    without_effect={"num_beams": (1,), "use_cache": (True,)},
    reasons={"num_beams": "there is no beam search"},
)


def test_only_fields_without_an_owner_are_named():
    given = {"temperature": 0.3, "transformers_version": "5", "num_beams": 1, "new": 0, "off": None}
    assert FIELDS.unused(given) == [Unused("generation_config.json", "new")]


def test_a_field_is_named_by_its_value():
    assert [one.name for one in FIELDS.unused({"num_beams": 4})] == ["num_beams"]
    # True is not 1, and 1 is not True.
    assert [one.name for one in FIELDS.unused({"num_beams": True})] == ["num_beams"]
    assert [one.name for one in FIELDS.unused({"use_cache": 1})] == ["use_cache"]


def test_each_place_has_one_line():
    unused = [
        *FIELDS.unused({"num_beams": 4, "new": 1}),
        Unused("a message", "train"),
        Unused("a message", "train"),
    ]
    assert sentences(unused) == [
        "not used of generation_config.json: num_beams (there is no beam search), new",
        "not used of a message: train",
    ]
    assert as_json(unused)[0] == {
        "where": "generation_config.json",
        "name": "num_beams",
        "why": "there is no beam search",
    }
