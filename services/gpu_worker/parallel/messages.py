"""What rank 0 tells the other ranks, in order; the commands are the scheduler's own. Leaves sending to the group."""

from __future__ import annotations

import msgspec

from shared.messages.base import Message
from shared.messages.step import StepCommand


class SlotNews(Message, frozen=True, tag=90):
    """What sampling changed in the slots of the oldest step under way: int32 columns, `ended` one byte each."""

    slots: bytes = b""
    last_tokens: bytes = b""
    remaining: bytes = b""
    ended: bytes = b""


class ForgetSlots(Message, frozen=True, tag=91):
    """A new incarnation: no slot is open any more."""


class LaunchStep(Message, frozen=True, tag=92):
    """First half of a step: enqueue its forward. Unless it is deferred, its tokens follow in the stream."""

    command: StepCommand
    deferred: bool = False


class SettleStep(Message, frozen=True, tag=93):
    """Second half of the oldest step under way, one that is not deferred; for one that is, SlotNews."""

    tokens: bytes = b""  # int32, of the rows that still count


ToFollower = StepCommand | SlotNews | ForgetSlots | LaunchStep | SettleStep

encode = msgspec.msgpack.Encoder().encode
decoder: msgspec.msgpack.Decoder[ToFollower] = msgspec.msgpack.Decoder(ToFollower)
