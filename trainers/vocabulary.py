"""Whether a teacher reads the student's token ids as the student does: their vocabularies, id by id.

    student's tokenizer ─┬─ teacher's, if its files are here ─▶ id→token of both ─▶ equal, or the first ids that differ
                         └─ else its server's /detokenize ────▶ text of every id, in chunks

What is compared are the tokens that the tokenizers have, not the models' logit dimensions: those may be padded.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

logger = logging.getLogger(__name__)

_SHOWN = 5  # ids in a message
_CHUNK = 512  # ids of one request
_AT_ONCE = 8  # requests

Vocabulary = Mapping[int, str]


def vocabulary_of(tokenizer: Any) -> Vocabulary | None:
    """Token by id, added ones included; None: the tokenizer does not tell."""
    if not hasattr(tokenizer, "get_vocab"):
        return None
    return {index: token for token, index in tokenizer.get_vocab().items()}


def local_tokenizer(root: str | None, trust_remote_code: bool) -> Any | None:
    """The tokenizer of what a server was started with, if its files are on this machine. Blocks."""
    from transformers import AutoTokenizer

    if root is None:
        return None
    if Path(root).is_absolute() and not Path(root).is_dir():
        return None  # a folder of another machine
    try:
        return AutoTokenizer.from_pretrained(root, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # whatever it is, the server can still be asked
        logger.debug("no tokenizer of %s here: %s", root, error)
        return None


def difference(student: Vocabulary, teacher: Vocabulary) -> str | None:
    """The first ids that differ, in words; None: the vocabularies are the same."""
    if student == teacher:
        return None
    ids = [index for index in sorted(student.keys() | teacher.keys()) if student.get(index) != teacher.get(index)]
    shown = ", ".join(f"{index} is {_named(student.get(index))} and {_named(teacher.get(index))}" for index in ids[:_SHOWN])
    return f"{len(ids)} of {len(student)} ids differ: {shown}{', …' if len(ids) > _SHOWN else ''}"


def _named(token: str | None) -> str:
    return "nothing" if token is None else repr(token)


Post = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]


async def served_difference(tokenizer: Any, ids: list[int], model: str, post: Post) -> str | None:
    """As `difference`, by what the server makes of the ids as text. Weaker: pieces of characters look alike.

    Args:
        ids: those of the student's vocabulary.
        post: path and body → status and body of the answer.

    Raises:
        LookupError: the server does not tell.
    """
    slots = asyncio.Semaphore(_AT_ONCE)

    async def served(chunk: list[int]) -> str:
        async with slots:
            status, answer = await post("/detokenize", msgspec.json.encode({"model": model, "tokens": chunk}))
        if status != 200:
            raise LookupError(f"/detokenize answered {status}")
        return json.loads(answer)["prompt"]

    async def differing(chunk: list[int]) -> list[str]:
        if await served(chunk) == tokenizer.decode(chunk):
            return []
        # Text of several may differ by what the decoder does between tokens: only single ones prove it.
        texts = await asyncio.gather(*(served([index]) for index in chunk))
        pairs = zip(chunk, map(tokenizer.decode, [[index] for index in chunk]), texts, strict=True)
        return [f"{index} is {ours!r} and {theirs!r}" for index, ours, theirs in pairs if ours != theirs]

    chunks = [ids[at : at + _CHUNK] for at in range(0, len(ids), _CHUNK)]
    for at in range(0, len(chunks), _AT_ONCE):  # the first differing ids are enough
        found = [text for texts in await asyncio.gather(*map(differing, chunks[at : at + _AT_ONCE])) for text in texts]
        if found:
            return f"ids differ: {', '.join(found[:_SHOWN])}{', …' if len(found) > _SHOWN else ''}"
    return None
