"""Messages over the socket pair, in both directions and dialects."""

from __future__ import annotations

import asyncio
import socket
import threading

import numpy as np
import pytest

from trainers.rollouts.channel import AsyncChannel, Channel, Message

ARRAYS = {
    "ids": np.arange(6, dtype=np.int32).reshape(2, 3),
    "empty": np.zeros((0, 4), np.float32),
    "mask": np.array([True, False]),
    "large": np.arange(300_000, dtype=np.float64),  # more than a socket buffer
}


async def test_messages_arrive_whole_and_in_order() -> None:
    ours, theirs = socket.socketpair()
    channel, other = Channel(ours), await AsyncChannel.open(theirs)
    answers: list[Message] = []

    def trainer() -> None:
        channel.send(Message("first", {"text": "ä", "none": None}, ARRAYS))
        channel.send(Message("second"))
        answers.append(channel.recv())

    thread = threading.Thread(target=trainer)
    thread.start()
    first, second = await other.recv(), await other.recv()
    await other.send(Message("answer", {"n": 1}, ARRAYS))
    await asyncio.to_thread(thread.join)
    assert (first.type, first.fields, second.type, second.arrays) == ("first", {"text": "ä", "none": None}, "second", {})
    for message in (first, answers[0]):
        assert message.arrays.keys() == ARRAYS.keys()
        for name, array in ARRAYS.items():
            np.testing.assert_array_equal(message.arrays[name], array, strict=True)
    other.close()
    channel.close()


async def test_the_end_of_the_other_side_is_seen() -> None:
    ours, theirs = socket.socketpair()
    channel, other = Channel(ours), await AsyncChannel.open(theirs)
    assert not channel.wait(0)
    ours.sendall(b"\x05\x00")  # half a header, then death
    channel.close()
    with pytest.raises(EOFError):
        await other.recv()
    other.close()

    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    theirs.close()
    assert channel.wait(5)
    with pytest.raises(EOFError):
        channel.recv()
    channel.close()
