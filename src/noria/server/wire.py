"""The channel between the HTTP process and an engine process: typed messages, msgpack over a ZeroMQ Unix socket.

    HTTP process                                       engine process
        | -- Launch (stdin, length first) ----------------> |   then stdin stays open: its end is the parent's death
        | <------------- Stage, Located, Ready | Failed |
        | -- Add, Abort, Ping, Vocabulary ----------------> |
        | <------------- Outputs (one a step), Refused, Pong |
        | -- Stop ----------------------------------------> |   leaves at once, exit code 0

Every message is a tagged msgspec struct, decoded by type; nothing is ever unpickled. `Ready.version` must equal
`VERSION`: it is raised whenever a message changes its meaning.
"""

from __future__ import annotations

import struct

import msgspec

from noria.config import EngineConfig
from noria.text.grammar import Vocabulary
from noria.types import EngineRequest, EngineStats, SequenceOutput

VERSION = 2
LAUNCH_LENGTH = struct.Struct("<I")  # bytes of the launch record, before it on stdin


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine process is started with. Sent once through its stdin."""

    config: EngineConfig
    channel: str  # ZeroMQ address of the parent's socket
    factory: str  # "module:function" that builds the engine from `config`
    die_with_parent: bool  # also ask the kernel for SIGKILL when the starting thread ends (Linux)


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a shell has to know about a loaded engine."""

    model: str
    max_model_len: int
    vocab_size: int
    hidden_size: int = 0  # of its embeddings; 0: it gives none
    eos_ids: tuple[int, ...]
    fingerprint: str  # names weights, settings, numerics revision and version
    sampling_defaults: dict[str, float | int] = {}  # of the model's generation_config.json
    ledger: tuple[str, ...] = ()  # the memory ledger, as lines for a person


class Stage(msgspec.Struct, frozen=True, tag=True):
    """Progress of the start, for a person."""

    text: str


class Located(msgspec.Struct, frozen=True, tag=True):
    """The model's files are complete on this machine: a shell may read the tokenizer from them."""

    path: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine accepts requests."""

    version: int
    facts: EngineFacts
    stats: EngineStats


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start, or met a fault it cannot survive. One line for a person."""

    message: str


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """Everything one step made, for all requests, and the state after it."""

    outputs: tuple[SequenceOutput, ...]
    stats: EngineStats


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A request was not taken: the fields of `RequestError`. No output follows."""

    request_id: int
    message: str
    param: str | None
    code: str | None
    status: int
    retry_after: float | None  # seconds, with a full queue


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Ping` of the same nonce."""

    nonce: int
    stats: EngineStats


class Add(msgspec.Struct, frozen=True, tag=True):
    """Take a request."""

    request: EngineRequest


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End a request, or one choice of it, with FinishReason.ABORT. Unknown ids are ignored: it may just have ended."""

    request_id: int
    index: int | None = None


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Answer with `Pong`, between two steps."""

    nonce: int


class UseVocabulary(msgspec.Struct, frozen=True, tag=True):
    """The model's tokens. Comes once, before the first request whose output is constrained."""

    vocabulary: Vocabulary


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Close the engine and leave."""


FromEngine = Stage | Located | Ready | Failed | Outputs | Refused | Pong
ToEngine = Add | Abort | Ping | UseVocabulary | Stop

_encoder = msgspec.msgpack.Encoder()
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_launch: msgspec.msgpack.Decoder[Launch] = msgspec.msgpack.Decoder(Launch)


def encode(message: FromEngine | ToEngine | Launch) -> bytes:
    """One message as msgpack."""
    return _encoder.encode(message)


def decode_from_engine(data: bytes) -> FromEngine:
    """A message that the engine sent. Raises msgspec.DecodeError for anything else."""
    return _from_engine.decode(data)


def decode_to_engine(data: bytes) -> ToEngine:
    """A message for the engine. Raises msgspec.DecodeError for anything else."""
    return _to_engine.decode(data)


def decode_launch(data: bytes) -> Launch:
    """The launch record. Raises msgspec.DecodeError for anything else."""
    return _launch.decode(data)
