"""Events, for which nothing has to wait on the CPU."""

from __future__ import annotations

from dataclasses import dataclass


class EventHandle:
    """A recorded event."""


@dataclass
class EventOverlap:
    """A wrapper of an event; a call that was not asynchronous returns one without an event."""

    event: EventHandle | None = None

    def current_stream_wait(self) -> None:
        assert self.event is not None, "nothing asynchronous was started"


def check_stream(
    previous_event: EventOverlap | None, async_finish: bool, allocate_on_comm_stream: bool
) -> EventOverlap:
    """Check the options that all calls share, and return the event of the call."""
    assert not allocate_on_comm_stream or (previous_event is not None and async_finish)
    return EventOverlap(EventHandle() if async_finish else None)
