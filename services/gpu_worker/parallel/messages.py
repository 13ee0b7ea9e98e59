"""What rank 0 tells the other ranks, in order; the commands are the scheduler's own. Leaves sending to the group."""

from __future__ import annotations

import msgspec

from shared.messages.base import Message
from shared.messages.step import StepCommand


class SlotNews(Message, frozen=True, tag=90):
    """What sampling changed in the slots of the step before: int32 columns, `ended` one byte each."""

    slots: bytes = b""
    last_tokens: bytes = b""
    remaining: bytes = b""
    ended: bytes = b""


class ForgetSlots(Message, frozen=True, tag=91):
    """A new incarnation: no slot is open any more."""


ToFollower = StepCommand | SlotNews | ForgetSlots

encode = msgspec.msgpack.Encoder().encode
decoder: msgspec.msgpack.Decoder[ToFollower] = msgspec.msgpack.Decoder(ToFollower)
