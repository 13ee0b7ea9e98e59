"""Messages of every edge: who is there, is it alive, what does it measure."""

from __future__ import annotations

from typing import Literal

from shared.messages.base import PROTOCOL_VERSION, Message

ServiceName = Literal["tokenizer", "detokenizer", "scheduler", "worker"]


class Hello(Message, frozen=True, tag=1):
    """A tokenizer or detokenizer introduces itself; repeated until a SystemStatus or Pong answers."""

    service: ServiceName
    service_id: str
    incarnation: int
    endpoint: str = ""  # where a detokenizer's ROUTER for tokenizers listens
    protocol: int = PROTOCOL_VERSION


class Heartbeat(Message, frozen=True, tag=2):
    """Sent once a second from the sender's I/O loop; also carries its measurements.

    A step counter and its age ride along because an I/O loop may live while the compute thread hangs.
    """

    service_id: str
    incarnation: int
    last_step_id: int = -1
    step_age_ms: float = 0.0  # how long the step now in execution has been running; 0 when idle
    gauges: dict[str, float] = {}
    histograms: dict[str, tuple[float, ...]] = {}  # cumulative counts by the bucket table, then sum


class Ping(Message, frozen=True, tag=3):
    """Goes through the receiver's main loop, so that a stuck loop does not answer."""

    nonce: int


class Pong(Message, frozen=True, tag=4):
    nonce: int
    healthy: bool = True
    detail: str = ""


class ServiceMetrics(Message, frozen=True):
    """The newest measurements of one process, as the scheduler heard them (part of SystemStatus)."""

    service: ServiceName
    service_id: str
    gauges: dict[str, float] = {}
    histograms: dict[str, tuple[float, ...]] = {}
    heartbeat_age_s: float = 0.0
