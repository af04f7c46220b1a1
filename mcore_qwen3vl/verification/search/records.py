"""Records of every kind that a loss trains on, at random: a kind is a function in a table.

:data:`CONVERSATIONS` and the tables below it are what :func:`makers_of` draws from. An unusable
record has the key ``bad``. Training names this key as not used, so that oracles know the record.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from mcore_qwen3vl.losses.loss import Loss

Record = dict[str, Any]
Maker = Callable[[Random], Record]

_WORDS = [
    "red",
    "green",
    "blue",
    "cat",
    "dog",
    "seven",
    "12",
    "1000",
    "owl",
    "tree",
    "übung",
    "日本",
    "x=1;",
]


def _text(rng: Random, most: int = 9) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(rng.randint(1, most)))


def _image(rng: Random) -> str:
    return f"{rng.choice((16, 24, 40, 64))}x{rng.choice((16, 32, 48))}-{rng.randrange(10_000)}.png"


def _turn(role: str, content: Any, **more: Any) -> Record:
    return {"role": role, "content": content, **more}


def text_only(rng: Random) -> Record:
    return {"messages": [_turn("user", _text(rng)), _turn("assistant", _text(rng))]}


def with_system(rng: Random) -> Record:
    return {"messages": [_turn("system", _text(rng)), *text_only(rng)["messages"]]}


def several_turns(rng: Random) -> Record:
    turns = [turn for _ in range(rng.randint(2, 3)) for turn in text_only(rng)["messages"]]
    return {"messages": turns}


def one_image(rng: Random) -> Record:
    asked = _turn("user", f"<image>{_text(rng)}")
    return {"messages": [asked, _turn("assistant", _text(rng))], "images": [_image(rng)]}


def parts(rng: Random) -> Record:
    """An image and a text as parts of a message, in either order."""
    two = [{"type": "image", "image": _image(rng)}, {"type": "text", "text": _text(rng)}]
    rng.shuffle(two)
    return {"messages": [_turn("user", two), _turn("assistant", _text(rng))]}


def several_images(rng: Random) -> Record:
    first = f"<image>{_text(rng)}<image>"
    turns = [_turn("user", first), _turn("assistant", _text(rng))]
    turns += [_turn("user", f"{_text(rng)}<image>"), _turn("assistant", _text(rng))]
    return {"messages": turns, "images": [_image(rng) for _ in range(3)]}


def video(rng: Random) -> Record:
    """A video as a list of frames, which all have one size."""
    size = rng.choice(("32x32", "48x32"))
    frames = [f"{size}-{rng.randrange(10_000)}.png" for _ in range(rng.choice((2, 4, 6)))]
    asked = _turn("user", f"<video>{_text(rng)}")
    return {
        "messages": [asked, _turn("assistant", _text(rng))],
        "videos": [{"frames": frames, "fps": rng.choice((1, 2, 4))}],
    }


def weights(rng: Random) -> Record:
    record = several_turns(rng)
    for turn in record["messages"][1::2]:
        turn["weight"] = rng.choice((0, 0.25, 1, 1.5))
    record["messages"][-1]["weight"] = rng.choice((0.25, 1.5))
    return {**record, "weight": rng.choice((0.5, 2))}


def llava(rng: Random) -> Record:
    asked = {"from": "human", "value": f"<image>\n{_text(rng)}"}
    return {"image": _image(rng), "conversations": [asked, {"from": "gpt", "value": _text(rng)}]}


def caption(rng: Random) -> Record:
    return {"caption": _text(rng), "image": _image(rng)}


def page(rng: Random) -> Record:
    return {"text": _text(rng, 30)}


def interleaved(rng: Random) -> Record:
    texts = [_text(rng), None, _text(rng), None]
    return {"texts": texts, "images": [None, _image(rng), None, _image(rng)]}


def boxes(rng: Random) -> Record:
    box = sorted(rng.randrange(0, 8) / 8 for _ in range(2)) * 2
    answer = '{"bbox_2d": <bbox>, "label": "<ref-object>"}'
    return {
        "messages": [_turn("user", "<image>Find <ref-object>."), _turn("assistant", answer)],
        "images": [_image(rng)],
        "objects": {"ref": ["it", "it"], "bbox": [box], "bbox_type": "norm1"},
    }


_TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("weather", "price")
]


def tools(rng: Random) -> Record:
    """A question, a call with or without text beside it, its result, and an answer."""
    function = {"name": rng.choice(("weather", "price")), "arguments": {"of": _text(rng, 2)}}
    call = {"type": "function", "function": function}
    asked, answered = text_only(rng)["messages"]
    called = _turn("assistant", rng.choice(("", _text(rng))), tool_calls=[call])
    turns = [asked, called, _turn("tool", _text(rng)), answered]
    return {"messages": turns, "tools": _TOOLS[: rng.randint(1, 2)]}


def reasoning(rng: Random) -> Record:
    asked, answered = text_only(rng)["messages"]
    thought = f"<think>\n{_text(rng)}\n</think>\n\n{answered['content']}"
    return {"messages": [asked, _turn("assistant", thought)]}


def long_text(rng: Random) -> Record:
    """An answer that is longer than the shortest rows."""
    return {"messages": [_turn("user", _text(rng)), _turn("assistant", _text(rng, 9) * 4)]}


def without_answer(rng: Random) -> Record:
    return {"messages": [_turn("user", _text(rng))], "bad": True}


def without_image(rng: Random) -> Record:
    return {**one_image(rng), "images": ["missing.png"], "bad": True}


def empty(rng: Random) -> Record:
    return {"messages": [], "bad": True}


CONVERSATIONS: tuple[Maker, ...] = (
    text_only, with_system, several_turns, one_image, parts, several_images, video, weights, llava,
    boxes, long_text, tools, reasoning,
)  # fmt: skip
DOCUMENTS: tuple[Maker, ...] = (caption, page, interleaved)
BAD: tuple[Maker, ...] = (without_answer, without_image, empty)


def pair(rng: Random) -> Record:
    asked = rng.choice((text_only, one_image, with_system))(rng)
    asked["messages"].pop()
    return {**asked, "chosen": _text(rng), "rejected": f"no, {_text(rng)}"}


def pair_with_prompt(rng: Random) -> Record:
    return {"prompt": _text(rng), "chosen": _text(rng), "rejected": f"no, {_text(rng)}"}


def labelled(rng: Random) -> Record:
    return {**rng.choice((text_only, one_image))(rng), "label": rng.random() < 0.5}


def retrieval(rng: Random) -> Record:
    query: Any = _text(rng)
    if rng.random() < 0.3:
        query = {"text": query, "image": _image(rng)}
    negatives = [_text(rng) for _ in range(rng.randint(0, 2))]
    positive: Any = {"image": _image(rng)} if rng.random() < 0.6 else _text(rng)
    return {"query": query, "positive": positive, "negatives": negatives}


def with_label(rng: Random) -> Record:
    record = rng.choice((text_only, one_image))(rng)
    record["messages"].pop()
    return {**record, "label": rng.randrange(3)}


PAIRS: tuple[Maker, ...] = (pair, pair_with_prompt)

_BY_NAME: Mapping[str, tuple[Maker, ...]] = {
    "embedding": (retrieval,),
    "reranker": (retrieval,),
    "classify": (with_label,),
    "reward": PAIRS,
}
"""The makers of losses whose class says nothing about their records."""


def makers_of(loss: type[Loss], name: str) -> tuple[Maker, ...]:
    """Return what makes records for a loss of the registry."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    if loss.made_up_records.get("pairs"):
        return PAIRS
    if loss.made_up_records.get("labelled"):
        return (labelled,)
    if name != "cross_entropy":  # what tells its losses apart are weights
        return (weights, one_image, page)
    return (*CONVERSATIONS, *DOCUMENTS)


def without_media(makers: tuple[Maker, ...]) -> tuple[Maker, ...]:
    """Return what makes those records of each kind that have no media."""

    def textual(maker: Maker) -> Maker:
        def make(rng: Random) -> Record:
            while _has_media(record := maker(rng)):
                pass
            return record

        return make

    some = range(20)  # a kind with media in all of so many has them always
    kinds = (one for one in makers if not all(_has_media(one(Random(seed))) for seed in some))
    return tuple(map(textual, kinds))


def _has_media(record: Record) -> bool:
    return ".png" in json.dumps(record)


def lines(rng: Random, makers: tuple[Maker, ...], count: int, bad: bool) -> tuple[str, ...]:
    """Return `count` records of JSON, no two alike, of at most three kinds; or with `bad` ones."""
    some = [rng.choice(makers) for _ in range(rng.randint(1, 3))]
    made = [rng.choice(some)(rng) for _ in range(count)]
    if bad:
        for place in rng.sample(range(count), rng.randint(1, max(1, count // 3))):
            made[place] = rng.choice(BAD)(rng)
    return tuple(json.dumps(record, ensure_ascii=False) for record in made)
