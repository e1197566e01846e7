"""What crosses a boundary of Noria: requests, outputs, finish reasons and errors.

Every value here is frozen, imports nothing but msgspec, and can travel between processes as it is.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Literal

import msgspec


class NoriaError(Exception):
    """Base of all errors that are meant for a person. `str(error)` is one line that says what to do."""


class RequestError(NoriaError):
    """The request is wrong: HTTP 400 (or `status`). `param` names the field, `code` is OpenAI's error code."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class LoadError(NoriaError):
    """A model cannot be loaded: a missing file, a malformed header, a tensor of the wrong shape."""


class ConfigError(NoriaError):
    """An option that cannot be honoured."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TIMEOUT = "timeout"


class StructuredOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What the text of an answer must match from its first character to its last. `value` by `kind`:

    json_object: nothing, any JSON object; json_schema: the schema, as JSON; regex: the expression; choice: a JSON list of
    strings; grammar: Lark's notation as llguidance reads it; structural_tag: vLLM's object, as JSON.

    `around`: what the answer may hold besides (reasoning before it, tool calls in its place), as Lark rules of the shell's, in
    which the rule `content` is left open for the text; empty for nothing.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar", "structural_tag"]
    value: str = ""
    around: str = ""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of one request are chosen. Names and meanings follow OpenAI and vLLM.

    The shells check the ranges (`noria.server.validate.check_params`); the engine assumes checked values.
    """

    n: int = 1
    max_tokens: int | None = 16  # None: up to the context
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1: no limit
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    seed: int | None = None  # 64 bits; the engine's shell draws one where it is None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # None: none; k: of the sampled token and of the k most likely
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()  # with `logprobs`: those of these tokens are told, not of the most likely ones
    structured_output: StructuredOutput | None = None
    allowed_token_ids: tuple[int, ...] = ()  # nothing else is drawn; (): everything may be

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The natural log probability of one token, and of the most likely ones, before temperature and masks."""

    token: int
    logprob: float
    top_tokens: tuple[int, ...] = ()  # most likely first, ties by lower id; or `logprob_token_ids`, in their order
    top_logprobs: tuple[float, ...] = ()


class Phase(IntEnum):
    """What a request's wall time is divided into. Exhaustive: the parts sum to its end-to-end time."""

    QUEUE = 0
    GRAMMAR = 1
    KV = 2
    PREFILL = 3
    DECODE = 4
    PREEMPTED = 5
    DELIVERY = 6


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt for the engine: token ids in, `SequenceOutput`s out, one stream of them for each choice."""

    request_id: int  # unique inside this server, never chosen by a client
    prompt: tuple[int, ...]
    params: SamplingParams
    stop_ids: tuple[int, ...] = ()  # ids that end a choice: the model's end ids and the client's, less `ignore_eos`
    cache_salt: str = ""
    priority: int = 0  # lower is served first, as vLLM
    tenant: str = ""  # whose share it is taken from under the fair policy
    background: bool = False  # served when no other request waits, the first to be preempted, and may wait for ever
    arrival: float = 0.0  # time.monotonic() of the shell that received it
    grammar_s: float = 0.0  # seconds since then that the shell waited for the verdict on the request's grammar
    prediction: tuple[int, ...] = ()  # what the output may be: where it is, tokens are made several at a time
    deadline: float | None = None  # on the same clock; past it the request ends with FinishReason.TIMEOUT
    pooling: Literal["mean", "last"] | None = None  # embed the prompt; needs max_tokens 0


class SequenceOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What one step made for one choice of one request. Exactly one output of a choice has a finish reason."""

    request_id: int
    index: int  # the choice
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a token, if asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # of prompt[1:], with the first output of choice 0
    embedding: bytes = b""  # of a request with `pooling`: little-endian float32 [hidden size], not normalised
    finish_reason: FinishReason | None = None
    stop_token: int | None = None  # the id that ended the choice, if one did
    error: str | None = None
    # With the last output of a choice:
    cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    cache_miss: str = ""  # why the block behind those was not (`noria.kv.misses`); "": no more could have been
    phases: tuple[float, ...] = ()  # seconds by `Phase`, DELIVERY still 0: stamped by the shell
    preemptions: int = 0
    predicted_tokens: int = 0  # of the choice, foreseen by the request's prediction


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges and counters of an engine after a step; counters only grow."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0  # share of blocks referenced by sequences; cached unused blocks are free
    kv_blocks: int = 0
    steps: int = 0
    step_tokens: int = 0  # computed by all steps, prompt and output tokens together
    iterations: tuple[int, ...] = ()  # steps that had at most 1, 2, 4, 8 ... tokens, and more than the one before
    prompt_tokens: int = 0  # prompt tokens of finished prefills, cached ones included
    generated_tokens: int = 0
    prefix_queries: int = 0  # in tokens
    prefix_hits: int = 0
    preemptions: int = 0
    spec_drafts: int = 0  # times that drafts of a sequence were verified
    spec_draft_tokens: int = 0
    spec_accepted_tokens: int = 0
    finished: dict[str, int] = msgspec.field(default_factory=dict)  # by finish reason, one a request
