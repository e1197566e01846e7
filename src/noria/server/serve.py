"""The life of a server: listen, start the engine, announce, drain, leave.

bind the port ── start the engine process ── import HTTP and text, load the tokenizer ─┐
                      └─ load weights, build the engine ──────────────────────── Ready ┴─ serve
SIGTERM or SIGINT: drain (ready turns 503), leave. A second one: leave at once.
The engine dies: every open request is told, then exit code 1.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from noria.config import EngineConfig, ServeConfig
from noria.server.launch import ENGINE_FACTORY, EngineProcess
from noria.types import ConfigError, EngineStats

if TYPE_CHECKING:
    from noria.server.client import EngineClient
    from noria.server.context import ServerContext

log = logging.getLogger("noria")

REPORT_EVERY_S = 10.0
LAST_ANSWERS_S = 2.0  # for open requests to be told that the engine died, or that time is up
POLL_S = 0.05


def serve(engine_config: EngineConfig, config: ServeConfig, *, factory: str = ENGINE_FACTORY) -> int:
    """Serve until told to stop. Returns the exit status. Raises ConfigError or LoadError if it cannot start."""
    began = time.monotonic()
    listener = _listen(config)
    process = EngineProcess(engine_config, factory=factory)
    try:
        logging.basicConfig(
            level=config.log_level.upper(),
            format="%(asctime)s %(levelname)s %(message)s",
            datefmt="%H:%M:%S",
        )
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        import uvloop

        server = Server(engine_config, config, process, listener, began)
        return uvloop.run(server.run())
    finally:
        process.close()


def _listen(config: ServeConfig) -> socket.socket:
    """A bound socket, before anything slow: a port in use is told at once."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(f"cannot listen on {config.host} port {config.port}: {reason}; choose another --port") from None
    listener.set_inheritable(False)
    return listener


class Server:
    """One run of `serve`, inside the event loop."""

    def __init__(
        self,
        engine_config: EngineConfig,
        config: ServeConfig,
        process: EngineProcess,
        listener: socket.socket,
        began: float,
    ) -> None:
        self._engine_config = engine_config
        self._config = config
        self._process = process
        self._listener = listener
        self._began = began
        self._signals = 0

    async def run(self) -> int:
        """Everything from the first accepted connection to the exit status."""
        import asyncio

        from noria.server.app import make_app
        from noria.server.client import EngineClient
        from noria.server.context import ServerContext
        from noria.server.http import HttpServer

        loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_signal)
        client = EngineClient(self._process, on_stage=self._stage)
        context = ServerContext(self._engine_config, self._config)
        http = HttpServer(make_app(context), self._listener)
        accepting = asyncio.create_task(http.serve())
        self._stage("accepting connections")
        try:
            starting = asyncio.create_task(self._start(context, client))
            stopping = asyncio.create_task(self._stop.wait())
            await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
                self._stage("stopped before the model was loaded")
                return 1
            starting.result()
            reporting = asyncio.create_task(report(context))
            await asyncio.wait((stopping, client.died), return_when=asyncio.FIRST_COMPLETED)
            reporting.cancel()
            if client.dead is not None:
                await _until(lambda: context.open_requests == 0, LAST_ANSWERS_S)
                raise client.dead
            await self._drain(context)
            return 0
        finally:
            await http.close(accepting)
            if context.batches is not None:
                await context.batches.close()
            client.close()

    async def _start(self, context: ServerContext, client: EngineClient) -> None:
        """Load the text half here while the engine loads there; complete the context; say how to talk to us."""
        from prometheus_client import disable_created_metrics

        from noria.observe.metrics import Metrics
        from noria.server.context import Served
        from noria.server.exchange import stamped
        from noria.server.judge import Judge
        from noria.server.loading import TextOptions, start
        from noria.server.settle import settle
        from noria.text.grammar import vocabulary_of
        from noria.weights.hub import cache_directory

        disable_created_metrics()  # type: ignore[no-untyped-call]
        cache = cache_directory(self._engine_config.cache_dir)
        config = self._config
        options = TextOptions(
            chat_template=config.chat_template,
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
        )
        facts, text = await start(client, cache, options, progress=self._stage)
        client.stamp = stamped
        names = self._config.served_model_name or (facts.model,)
        ends = tuple(dict.fromkeys((*facts.eos_ids, *text.tokenizer.eos_ids)))
        client.judge = Judge(lambda: vocabulary_of(text.tokenizer, facts.vocab_size, ends))
        context.served = Served(
            client=client,
            facts=facts,
            text=text,
            metrics=Metrics(names[0], lambda: client.stats, vllm_names=self._config.vllm_metrics),
            names=names,
            model_defaults=self._config.generation_config == "model",
        )
        assert context.batches is not None
        await context.batches.start()
        for line in facts.ledger:
            self._stage(line)
        settle()
        self._announce(names[0], chat=text.template is not None)

    @property
    def _guarded(self) -> bool:
        """Whether clients need a key."""
        return bool(self._config.api_key or self._config.api_key_file)

    def _stage(self, text: str) -> None:
        print(f"noria: [{time.monotonic() - self._began:6.2f} s] {text}", file=sys.stderr, flush=True)

    def _announce(self, model: str, *, chat: bool) -> None:
        """The last lines of the start: where we are, and a request that works."""
        host = "127.0.0.1" if self._config.host in ("0.0.0.0", "::") else self._config.host
        url = f"http://{f'[{host}]' if ':' in host else host}:{self._listener.getsockname()[1]}"
        self._stage(f"{model} is served at {url}")
        print(example_request(url, model, chat=chat, key=self._guarded), flush=True)

    def _on_signal(self) -> None:
        self._signals += 1
        self._stop.set()
        if self._signals > 1:
            self._process.process.kill()
            os._exit(1)

    async def _drain(self, context: ServerContext) -> None:
        """New requests are refused; running ones get `shutdown_timeout_s` to finish, then their error."""
        context.draining = True
        assert context.served is not None
        assert context.batches is not None
        await context.batches.close()
        if context.open_requests:
            log.info("draining: %d requests open; a second signal ends at once", context.open_requests)
        if not await _until(lambda: context.open_requests == 0, self._config.shutdown_timeout_s):
            log.warning("%d requests did not finish in %g s", context.open_requests, self._config.shutdown_timeout_s)
            context.served.client.abort_all()
            await _until(lambda: context.open_requests == 0, LAST_ANSWERS_S)


async def _until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until `condition` holds, at most `seconds`; whether it does."""
    import asyncio

    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= end:
            return False
        await asyncio.sleep(POLL_S)
    return True


def example_request(url: str, model: str, *, chat: bool, key: bool) -> str:
    """A curl command line that works: a chat, or a completion for a model without a chat template."""
    if chat:
        path = "/v1/chat/completions"
        question = {"role": "user", "content": "Why is the sky blue?"}
        body: dict[str, object] = {"model": model, "messages": [question], "max_tokens": 80, "temperature": 0}
    else:
        path = "/v1/completions"
        body = {"model": model, "prompt": "The capital of France is", "max_tokens": 32, "temperature": 0}
    command = ["curl", "-s", url + path, "-H", "Content-Type: application/json"]
    line = shlex.join(command) + (' -H "Authorization: Bearer $API_KEY"' if key else "")
    return f"{line} -d {shlex.quote(json.dumps(body))}"


async def report(context: ServerContext) -> None:
    """A log line every ten seconds while there is work."""
    import asyncio

    served = context.served
    assert served is not None
    before, then = served.client.stats, time.monotonic()
    while True:
        await asyncio.sleep(REPORT_EVERY_S)
        now, stats = time.monotonic(), served.client.stats
        if not stats == before or stats.running or stats.waiting:  # noqa: SIM201 - msgspec: x != x is True
            log.info(report_line(before, stats, now - then))
        before, then = stats, now


def report_line(before: EngineStats, now: EngineStats, seconds: float) -> str:
    """What happened between two looks at an engine."""
    queries = now.prefix_queries - before.prefix_queries
    hits = now.prefix_hits - before.prefix_hits
    share = f"{hits / queries:.0%}" if queries else "-"
    return (
        f"running {now.running}, waiting {now.waiting}, KV {now.kv_usage:.0%}, "
        f"prompt {(now.prompt_tokens - before.prompt_tokens) / seconds:.0f} tok/s, "
        f"output {(now.generated_tokens - before.generated_tokens) / seconds:.0f} tok/s, prefix hits {share}"
    )
