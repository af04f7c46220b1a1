"""Prompts of a reranker, which judges one document of a retrieval record at a time.

The prompt is that of Qwen3-VL-Reranker: a system message asks for a judgement, and a user message
holds the instruction, the query and the document. The instruction is the query's system message.
"""

from __future__ import annotations

from typing import Any

from mcore_qwen3vl.data.records.flaws import BadSample
from mcore_qwen3vl.data.records.media import MediaFolder
from mcore_qwen3vl.data.records.parsed import Conversation
from mcore_qwen3vl.data.records.reading import Reading
from mcore_qwen3vl.data.records.retrieval import QUERY, parse_retrieval

_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
_INSTRUCTION = "Given a search query, retrieve relevant candidates that answer the query."


def parse_judgements(
    record: Any, folder: MediaFolder, reading: Reading | None = None
) -> dict[str, Conversation]:
    """Read a retrieval record as one prompt for each document.

    Args:
        record, folder, reading: as for
            :func:`mcore_qwen3vl.data.records.retrieval.parse_retrieval`.

    Returns:
        The prompts by the documents' names: ``positive``, ``negative 0`` and so on.

    Raises:
        BadSample: the record is malformed, or has no query or no document.
    """
    texts = parse_retrieval(record, folder, reading)
    query = texts.pop(QUERY, None)
    if query is None or not texts:
        raise BadSample(
            f"a reranker judges a document by a query; it has no {'document' if query else QUERY}."
        )
    return {name: _judgement(query, document, name) for name, document in texts.items()}


def _judgement(query: Conversation, document: Conversation, name: str) -> Conversation:
    instruction, asked = _split(query, QUERY)
    own, offered = _split(document, name)
    if own not in (None, instruction):
        raise BadSample(f"{name} has a system message; the instruction belongs to the query.")
    content = [
        _text(f"<Instruct>: {_INSTRUCTION if instruction is None else instruction}"),
        *(_text("<Query>:"), *asked),
        *(_text("\n<Document>:"), *offered),
    ]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": content},
    ]
    return Conversation(
        messages,
        [*query.media, *document.media],
        [0.0, 0.0],
        prompt=True,
        format=query.format,
        unread=query.unread,
    )


def _split(text: Conversation, name: str) -> tuple[str | None, list[dict[str, Any]]]:
    """Return the text of the system message, if there is one, and the other message's parts."""
    system, rest = None, text.messages
    if rest[0]["role"] == "system":
        system, rest = "".join(part["text"] for part in _parts(rest[0])), rest[1:]
    if len(rest) != 1:
        raise BadSample(f"{name} has {len(rest)} messages; a reranker takes one.")
    return system, _parts(rest[0])


def _parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message["content"]
    return [_text(content)] if isinstance(content, str) else content


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
