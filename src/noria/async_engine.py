"""AsyncEngine: an engine in a child process, for programs with an event loop of their own.

async with AsyncEngine("smollm2-135m") as engine:
    async for output in engine.generate("The sky is", SamplingParams(max_tokens=20)):
        print(output.outputs[0].text)
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from noria.llm import Message, Prompt, RequestOutput, engine_config, request_output
from noria.observe.metrics import Metrics
from noria.server.answer import Answer, Delta, engine_request
from noria.server.chats import Chat, ChatOptions, prepared_chat
from noria.server.client import EngineClient
from noria.server.generation import Generation
from noria.server.judge import Judge
from noria.server.launch import ENGINE_FACTORY, EngineProcess
from noria.server.loading import TextOptions, start
from noria.server.validate import check_params, check_token
from noria.text.grammar import vocabulary_of
from noria.types import EngineStats, SamplingParams
from noria.weights.hub import cache_directory

if TYPE_CHECKING:
    from types import TracebackType


class AsyncEngine:
    """A model in a child process. Keywords are the fields of EngineConfig.

    Use it as `async with`, on one event loop. Entering raises LoadError or ConfigError; the child ends with the block, and
    with this program however that ends.
    """

    def __init__(self, model: str, *, chat_template: str | None = None, factory: str = ENGINE_FACTORY, **settings: Any) -> None:
        self._config = engine_config(model, settings)
        self._chat_template = chat_template
        self._factory = factory
        self._next_id = 0

    async def __aenter__(self) -> AsyncEngine:
        self._process = EngineProcess(self._config, factory=self._factory)
        self._client = EngineClient(self._process)
        try:
            cache = cache_directory(self._config.cache_dir)
            self._facts, self._text = await start(self._client, cache, TextOptions(chat_template=self._chat_template))
        except BaseException:
            self._client.close()
            raise
        self._metrics = Metrics(self._facts.model, lambda: self._client.stats)
        self._eos_ids = tuple(dict.fromkeys((*self._facts.eos_ids, *self._text.tokenizer.eos_ids)))
        size, ends = self._facts.vocab_size, self._eos_ids
        self._client.judge = Judge(lambda: vocabulary_of(self._text.tokenizer, size, ends))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    @property
    def max_model_len(self) -> int:
        """The longest prompt + output."""
        return self._facts.max_model_len

    @property
    def stats(self) -> EngineStats:
        """Gauges and counters of the engine after its last step."""
        return self._client.stats

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0, cache_salt: str = ""
    ) -> AsyncGenerator[RequestOutput]:
        """Complete a prompt: after each step that made something, all that there is so far. Leaving the loop ends the request.

        Raises RequestError for a wrong prompt or parameter, and if the engine refuses or ends the request.
        """
        tokenizer = self._text.tokenizer
        if isinstance(prompt, str):
            ids = tokenizer.encode(prompt, add_special_tokens=True, parse_special=True, max_tokens=self.max_model_len)
        else:
            ids = list(prompt)
            for token in (min(ids, default=0), max(ids, default=0)):
                check_token("prompt", token, self._facts.vocab_size)
        text = prompt if isinstance(prompt, str) else None
        run = self._run(ids, sampling_params or SamplingParams(), text, priority, cache_salt)
        async with aclosing(run):
            async for output in run:
                yield output

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        response_format: Mapping[str, Any] | None = None,
        **template_options: Any,
    ) -> AsyncGenerator[RequestOutput]:
        """Answer a conversation; tools and formats are OpenAI's, `template_options` those of `noria.text.chat.encode_chat`.

        As `generate` else; a choice that has ended has its `message`.
        """
        options = ChatOptions(
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            response_format=response_format,
            template=template_options,
        )
        params = sampling_params or SamplingParams(max_tokens=None)
        size, limit = self._facts.vocab_size, self.max_model_len
        chat = prepared_chat(self._text, messages, params, options, vocab_size=size, max_tokens=limit)
        run = self._run(chat.ids, chat.params, None, 0, "", chat)
        async with aclosing(run):
            async for output in run:
                yield output

    async def _run(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        text: str | None,
        priority: int,
        cache_salt: str,
        chat: Chat | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        check_params(params, self._facts.vocab_size, control_ids=self._text.tokenizer.control_ids)
        self._next_id += 1
        request = engine_request(
            self._next_id,
            tuple(ids),
            params,
            eos_ids=self._eos_ids,
            max_model_len=self.max_model_len,
            arrival=time.monotonic(),
            cache_salt=cache_salt,
            priority=priority,
        )
        answer = Answer(self._text.tokenizer, request, text=text, plan=None if chat is None else chat.parse)
        made: list[list[Delta]] = [[] for _ in range(params.n)]
        finished = False
        async with aclosing(Generation(self._client, self._metrics, [answer]).steps()) as steps:
            async for step in steps:
                for _, delta in step:
                    made[delta.index].append(delta)
                finished = answer.closed
                yield request_output(self._text.tokenizer, answer, made, finished=finished, chat=chat is not None)
        if not finished:  # ended by a stop string, which the engine has now been told of
            yield request_output(self._text.tokenizer, answer, made, chat=chat is not None)
