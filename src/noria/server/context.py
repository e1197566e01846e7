"""What the handlers of one server share. Made when the process starts, completed when the engine is ready."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import TYPE_CHECKING

from noria.config import EngineConfig, ServeConfig
from noria.server.access_log import AccessLog
from noria.server.keys import load_keys
from noria.types import RequestError

if TYPE_CHECKING:
    from noria.observe.metrics import Metrics
    from noria.server.batches.service import BatchService
    from noria.server.client import EngineClient
    from noria.server.wire import EngineFacts
    from noria.text.loader import TextModel

HEALTH_TIMEOUT_S = 10.0  # of a round trip, which waits for the step that runs: far more than a step takes


class Served:
    """A loaded model: the engine behind it, its text half, its metrics, the names it answers to."""

    def __init__(
        self,
        *,
        client: EngineClient,
        facts: EngineFacts,
        text: TextModel,
        metrics: Metrics,
        names: tuple[str, ...],
        model_defaults: bool,
    ) -> None:
        """`model_defaults`: take the sampling defaults of the model's generation_config.json instead of OpenAI's."""
        self.client = client
        self.facts = facts
        self.text = text
        self.metrics = metrics
        self.names = names
        self.created = int(time.time())
        self.eos_ids = tuple(dict.fromkeys((*facts.eos_ids, *text.tokenizer.eos_ids)))
        self.sampling_defaults: dict[str, float] = facts.sampling_defaults if model_defaults else {}


class ServerContext:
    """Settings, and the state of the server: loading (no `served` yet), serving, draining."""

    def __init__(self, engine_config: EngineConfig, config: ServeConfig) -> None:
        """Raises ConfigError for keys that cannot be read, or a log that cannot be written."""
        self.engine_config = engine_config
        self.config = config
        self.keys = load_keys(config.api_key, config.api_key_file)
        self.access_log = AccessLog(config.access_log, config.slow_request_s)
        self.served: Served | None = None
        self.batches: BatchService | None = None  # with an application around it
        self.draining = False
        self.open_requests = 0  # HTTP requests that the engine works for
        self._request_ids = secrets.randbits(32) << 20  # unique inside; the start only keeps logs of two runs apart
        self._round_trip: asyncio.Task[None] | None = None

    def next_request_id(self) -> int:
        """An id for the engine, never chosen by a client."""
        self._request_ids += 1
        return self._request_ids

    def require(self, model: str | None) -> Served:
        """The served model, for a request that wants `model`. Raises RequestError 503 or 404."""
        served = self.served
        if served is None:
            raise RequestError("the model is still loading", status=503, code="loading")
        if self.draining:
            raise RequestError("the server is shutting down", status=503, code="draining")
        if model is not None and model not in served.names:
            raise RequestError(
                f"this server has no model of that name; it serves {', '.join(served.names)}",
                param="model",
                code="model_not_found",
                status=404,
            )
        return served

    async def check_engine(self) -> None:
        """One round trip to the engine, shared by all who ask meanwhile. Raises RequestError 503."""
        if self.served is None:
            raise RequestError("the model is still loading", status=503, code="loading")
        if self._round_trip is None or self._round_trip.done():
            self._round_trip = asyncio.create_task(self.served.client.ping(HEALTH_TIMEOUT_S))
        try:
            await asyncio.shield(self._round_trip)
        except TimeoutError:
            message = f"the engine did not answer within {HEALTH_TIMEOUT_S:g} s"
            raise RequestError(message, status=503, code="engine_hanging") from None
        except Exception as error:  # EngineDead; the module of the client is not imported here
            raise RequestError(str(error), status=503, code="engine_dead") from None
