"""Embedder: prompts in, vectors out. Many prompts go to the engine some at a time, so that its queue does not overflow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from noria.server.answer import Answer
from noria.server.context import Served, ServerContext
from noria.server.generation import Generation
from noria.types import EngineRequest, RequestError, SamplingParams

Pooling = Literal["mean", "last"]
AHEAD = 2  # requests given to the engine, as a multiple of those that may run: it never waits for the next ones
EMBED = SamplingParams(max_tokens=0, temperature=0.0, seed=0)  # draws nothing


class Embedder:
    """Embeds prompts for one client call. Call `abort()` when nobody waits any more."""

    def __init__(
        self, context: ServerContext, served: Served, arrival: float, *, cache_salt: str = "", priority: int = 0
    ) -> None:
        self._context = context
        self._served = served
        self._arrival = arrival
        self._cache_salt = cache_salt
        self._priority = priority
        self._running: Generation | None = None
        self._aborted = False

    async def embed(self, prompts: Sequence[tuple[int, ...]], pooling: Pooling) -> list[bytes]:
        """The pooled hidden states of each prompt, little-endian float32. Raises RequestError; [] after `abort`."""
        vectors: list[bytes] = []
        most = AHEAD * self._context.engine_config.max_num_seqs
        for first in range(0, len(prompts), most):
            answers = [self._answer(prompt, pooling) for prompt in prompts[first : first + most]]
            self._running = Generation(self._served.client, self._served.metrics, answers)
            async for _ in self._running.steps():
                pass
            if self._aborted:
                return []
            vectors += [answer.embedding for answer in answers]
        return vectors

    def abort(self) -> None:
        """End what runs, and start nothing more."""
        self._aborted = True
        if self._running is not None:
            self._running.abort()

    def _answer(self, prompt: tuple[int, ...], pooling: Pooling) -> Answer:
        request = EngineRequest(
            request_id=self._context.next_request_id(),
            prompt=prompt,
            params=EMBED,
            cache_salt=self._cache_salt,
            priority=self._priority,
            arrival=self._arrival,
            pooling=pooling,
        )
        return Answer(self._served.text.tokenizer, request)


def check_length(prompt: Sequence[int], context: int, param: str) -> None:
    """Raise RequestError unless a prompt that is only read fits in the context."""
    if not prompt:
        raise RequestError(f"{param} has an empty text", param=param)
    if len(prompt) > context:
        raise RequestError(
            f"this model's maximum context length is {context} tokens, and {param} has a text of {len(prompt)}: shorten it, "
            "or set truncate_prompt_tokens to -1",
            param=param,
            code="context_length_exceeded",
        )


def unit_vector(embedding: bytes, dimensions: int | None = None) -> bytes:
    """The first `dimensions` numbers of a float32 vector (None: all), scaled to length 1. A vector of zeros stays one.

    The sum of squares is exact to the last bit of float64 (`math.fsum`), so that no machine scales otherwise than another.
    """
    import numpy as np  # not with the module: a server that embeds nothing need not load it

    vector = np.frombuffer(embedding, "<f4")[:dimensions].astype(np.float64)
    length = math.sqrt(math.fsum((vector * vector).tolist()))
    return (vector / (length or 1.0)).astype("<f4").tobytes()


def cosine(first: bytes, second: bytes) -> float:
    """The cosine of the angle between two vectors of length 1, summed exactly: the same either way round."""
    import numpy as np

    one, other = np.frombuffer(first, "<f4").astype(np.float64), np.frombuffer(second, "<f4").astype(np.float64)
    return min(1.0, max(-1.0, math.fsum((one * other).tolist())))
