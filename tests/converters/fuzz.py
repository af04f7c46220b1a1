"""Seeded damage to files that no reader may take for sound, and a process to try it in.

`trial` runs cases in a child process with limited memory, so that a crash, a hang or an oversized
allocation is reported like any other defect.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import random
import resource
import signal
import traceback
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

from mcore_qwen3vl.errors import BadInput

SECONDS = 20
"""Time of the processor after which a case is a hang; one normally takes milliseconds."""

WAITING = 300
"""Seconds on the clock after which a case waits for ever; other processes may take most of them."""

MEGABYTES = 300
"""Growth of memory that counts as a defect; tiny checkpoints need a few MB."""

Mutation = Callable[[random.Random, bytes], bytes]

NASTY: list[Any] = [
    *(None, True, False, 0, 1, -1, 3, 7, 255, 2**31 - 1, 2**31, 2**53, 2**63, 2**64 - 1, 10**30),
    *(1.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", "x", "0", "../x", "/etc/passwd", "..", ".", "a\\b", "a\0b", "\ud800", "9" * 5000),
    *([], {}, [[]], [1, 2, 3], [-1], ["x"], {"x": 1}, [[1] * 50] * 50, [2**40] * 3),
]
"""Values that may replace a number, a name or a list."""


class Hang(BaseException):
    """A case took too long. No `except Exception` may stop it."""


@dataclasses.dataclass
class Tally:
    """The outcomes of the cases: refusals, results as they should be, and defects."""

    refused: int = 0
    equal: int = 0
    defects: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Damage:
    """One file to spoil, and how."""

    file: Path
    mutate: Mutation


def trial(
    damages: list[Damage], attempt: Callable[[], str | None], count: int, seed: str, scratch: Path
) -> None:
    """Spoil one file at a time, call `attempt`, put the file back: all is refused or right.

    Args:
        damages: the choices of damage, of which each case picks one.
        attempt: a call of the readers. Returns None if the result is right, else what is wrong.
        count, seed: the number of cases, and the seed of their randomness.
        scratch: the folder for the child's notes.
    """
    notes = scratch / "fuzz.json"

    def work() -> None:
        _limit_memory()
        tally = Tally()
        for number in range(count):
            notes.write_text(json.dumps(dataclasses.asdict(tally) | {"case": number}))
            _case(random.Random(f"{seed} {number}"), damages, attempt, tally, f"case {number}")
        notes.write_text(json.dumps(dataclasses.asdict(tally)))

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
    found = json.loads(notes.read_text())
    crashed = found.pop("case", None)
    tally = Tally(**found)
    if child.exitcode != 0:
        tally.defects.append(f"case {crashed} ended the process ({child.exitcode})")
    print(f"{seed}: {tally.refused} refused, {tally.equal} equal of {count}")
    assert not tally.defects, f"{len(tally.defects)} defects: " + "\n".join(tally.defects[:8])
    assert tally.refused + tally.equal == count
    assert tally.refused > count // 10  # the damage does reach the readers


def _case(
    rng: random.Random,
    damages: list[Damage],
    attempt: Callable[[], str | None],
    tally: Tally,
    name: str,
) -> None:
    damage = rng.choice(damages)
    sound = damage.file.read_bytes()
    damage.file.write_bytes(damage.mutate(rng, sound))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for kind in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(kind, _hang)
    signal.alarm(WAITING)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    wrong = None
    try:
        wrong = attempt()
        tally.equal += wrong is None
    except BadInput as refusal:
        tally.refused += 1
        if "\n" in str(refusal) or len(str(refusal)) > 2000:
            wrong = f"unreadable message {str(refusal)[:200]!r}"
    except BaseException:
        wrong = " | ".join(traceback.format_exc(limit=-3).split("\n")[1:])
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        damage.file.write_bytes(sound)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    if grown > MEGABYTES:
        wrong = f"{wrong or ''} took {grown} MB"
    if wrong:
        tally.defects.append(f"{name}, {damage.file.name}: {wrong}")


def _hang(*_: object) -> None:
    raise Hang


def _limit_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + 8 * MEGABYTES * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def bytes_outside(protected: list[tuple[int, int]]) -> Mutation:
    """Return a mutation by changed, inserted, removed or repeated bytes outside `protected`.

    `protected` lists ranges (start, stop) whose bytes stay where they are.
    """

    def mutate(rng: random.Random, data: bytes) -> bytes:
        gaps = list(_gaps(protected, len(data)))
        spoiled = bytearray(data)
        start, stop = rng.choice(gaps)
        at = rng.randrange(start, stop)
        width = min(rng.choice([1, 1, 2, 4, 8]), stop - at)
        match rng.randrange(8):
            case 0:
                spoiled[at] ^= 1 << rng.randrange(8)
            case 1:
                spoiled[at] = rng.randrange(256)
            case 2:
                spoiled[at : at + width] = rng.choice([b"\0", b"\xff"]) * width
            case 3:
                number = rng.choice([0, 1, 2**31 - 1, 2**32 - 1, 2**40, 2**63 - 1, len(data)])
                spoiled[at : at + width] = number.to_bytes(8, "little")[:width]
            case 4:
                spoiled[at:at] = rng.randbytes(width)
            case 5:
                del spoiled[at : at + width]
            case 6:
                other = rng.randrange(start, stop)
                copied = data[other : min(other + rng.randrange(1, 64), stop)]
                copied = copied[: stop - at]
                spoiled[at : at + len(copied)] = copied
            case _:
                del spoiled[at:]
        return bytes(spoiled)

    return mutate


spoil_bytes = bytes_outside([])


def _gaps(protected: list[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    at = 0
    for start, stop in sorted(protected):
        if at < start:
            yield at, start
        at = stop
    if at < size:
        yield at, size


def spoil_json(rng: random.Random, data: bytes) -> bytes:
    """Replace, remove, swap or rename something in a JSON document, or spoil its bytes."""
    if rng.random() < 0.2:
        return spoil_bytes(rng, data)
    document = json.loads(data)
    for _ in range(rng.choice([1, 1, 1, 2])):
        document = _spoil_node(rng, document)
    text = json.dumps(document)
    if rng.random() < 0.03:
        text = "[" * 100_000 + text
    return text.encode("utf-8", errors="replace")


def _spoil_node(rng: random.Random, document: Any) -> Any:
    places = list(_places(document))
    if not places:
        return deepcopy(rng.choice(NASTY))
    holder, key = rng.choice(places)
    _, other = rng.choice([place for place in places if place[0] is holder])
    match rng.randrange(7):
        case 0:
            del holder[key]
        case 1:
            holder[key], holder[other] = holder[other], holder[key]
        case 2:
            holder[key] = deepcopy(holder[other])
        case 3 if isinstance(holder, dict):
            holder[rng.choice(["", "x", "../x", f"{key}x", str(key)[:-1]])] = holder.pop(key)
        case 4 if isinstance(holder[key], int) and not isinstance(holder[key], bool):
            holder[key] += rng.choice([-1, 1, holder[key], 1 - holder[key], 10**6, 10**12])
        case _:
            holder[key] = deepcopy(rng.choice(NASTY))
    return document


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield everything in a document, as its container and its key there."""
    keys = list(node) if isinstance(node, dict) else range(len(node))
    for key in keys:
        yield node, key
        if isinstance(node[key], dict | list):
            yield from _places(node[key])


def spoil_header(rng: random.Random, data: bytes) -> bytes:
    """Spoil the header of a safetensors file: its length, its JSON, or its bytes."""
    length = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + length], data[8 + length :]
    kind = rng.randrange(10)
    if kind == 0:
        wrong = rng.choice([0, 1, 2, length - 1, length + 1, length + 8, 2**27, 2**40, 2**64 - 1])
        return wrong.to_bytes(8, "little") + header + body
    if kind < 4:
        return bytes_outside([(8 + length, len(data))])(rng, data)
    header = spoil_json(rng, header)
    header += b" " * (-len(header) % rng.choice([1, 8, 8]))
    return len(header).to_bytes(8, "little") + header + body
