"""One union per direction of an edge: the decoder of that socket accepts nothing else."""

from __future__ import annotations

from shared.messages.control import Heartbeat, Hello, Ping, Pong
from shared.messages.kv import (
    KvCancel,
    KvChunk,
    KvDone,
    KvInventory,
    KvLoad,
    KvOffer,
    KvReady,
    KvReceive,
    KvSend,
    KvStore,
    KvStored,
    KvTaken,
)
from shared.messages.request import (
    AbortRequest,
    GenerateRequest,
    Operation,
    OperationDone,
    RequestRejected,
    StreamAck,
    SystemStatus,
)
from shared.messages.step import (
    Drain,
    StepCommand,
    StepResult,
    TokenMasks,
    WorkerDrain,
    WorkerFault,
    WorkerHello,
    WorkerReset,
    WorkerWelcome,
)
from shared.messages.stream import StopMatched, StreamOpen, TextChunks, TokenChunks

FromTokenizer = Hello | Heartbeat | GenerateRequest | AbortRequest | StreamAck | Operation | Ping | Pong
ToTokenizer = SystemStatus | RequestRejected | OperationDone | Ping | Pong

FromDetokenizer = Hello | Heartbeat | StopMatched | Ping | Pong
ToDetokenizer = StreamOpen | TokenChunks | Ping | Pong

TokenizerToDetokenizer = Hello | Ping
DetokenizerToTokenizer = TextChunks | Pong

KvTold = KvReady | KvDone | KvStored | KvInventory
KvOrder = KvSend | KvReceive | KvCancel | KvStore | KvLoad

FromWorker = WorkerHello | Heartbeat | StepResult | WorkerFault | KvTold | WorkerDrain | Ping | Pong
ToWorker = WorkerWelcome | WorkerReset | StepCommand | TokenMasks | KvOrder | Drain | Ping | Pong
WorkerToWorker = KvChunk | KvOffer | KvTaken
