"""LLM: an engine in this process, for scripts.

from noria import LLM, SamplingParams

llm = LLM("smollm2-135m")
for output in llm.generate(["The sky is", "Water is"], SamplingParams(max_tokens=20)):
    print(output.outputs[0].text)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from noria.assembly import build_engine
from noria.config import EngineConfig
from noria.server.answer import Answer, Delta, engine_request, merge
from noria.server.beams import BeamSearch, check_beams
from noria.server.chats import ChatOptions, prepared_chat
from noria.server.embedder import EMBED, Pooling, check_length, unit_vector
from noria.server.judge import Judge
from noria.server.loading import TextOptions, load_text
from noria.server.shapes import message_of
from noria.server.validate import check_params, check_token
from noria.text.chat import encode_chat
from noria.text.constraint import GrammarConstraints
from noria.text.grammar import vocabulary_of
from noria.text.parsing import ParsePlan
from noria.text.tokenizer import Tokenizer
from noria.types import ConfigError, EngineRequest, NoriaError, RequestError, SamplingParams, TokenLogprobs
from noria.weights.hub import cache_directory

if TYPE_CHECKING:
    from types import TracebackType

Prompt = str | Sequence[int]  # a text, or token ids
Message = Mapping[str, Any]  # as OpenAI's
AHEAD = 2  # requests given to the engine, as a multiple of those that may run: its queue never runs dry, nor over


@dataclass(frozen=True)
class Logprob:
    """The natural log probability of a token at a position, its rank (None: not among the reported ones) and its text."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(frozen=True)
class CompletionOutput:
    """One choice. `logprobs` holds for each token {id: Logprob} of it and of the most likely ones, if they were asked for."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: list[dict[int, Logprob]] | None
    cumulative_logprob: float | None
    finish_reason: str | None  # "stop" or "length"; None while it is being written
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it
    message: dict[str, Any] | None = None  # of a chat, once it has ended: OpenAI's, with content, reasoning and tool_calls


@dataclass(frozen=True)
class RequestOutput:
    """One prompt and its choices."""

    request_id: int
    prompt: str | None  # as it was given; None for token ids and messages
    prompt_token_ids: tuple[int, ...]
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = True
    num_cached_tokens: int = 0
    seed: int | None = None  # repeats a sampled answer


@dataclass(frozen=True)
class BeamSearchParams:
    """As Hugging Face's `generate`: a beam's score is the sum of its log probabilities over length ** length_penalty."""

    beam_width: int
    max_tokens: int | None = 16
    length_penalty: float = 1.0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None


def engine_config(model: str, settings: Mapping[str, Any]) -> EngineConfig:
    """The settings of an engine from keywords. Raises ConfigError naming what is wrong."""
    try:
        return msgspec.convert({"model": model, **settings}, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"settings: {error}") from None


class LLM:
    """A model, loaded and ready. Not thread-safe. Keywords are the fields of EngineConfig.

    Raises LoadError or ConfigError, in one line that says what to do.
    """

    def __init__(self, model: str, *, chat_template: str | None = None, **settings: Any) -> None:
        config = engine_config(model, settings)
        built = build_engine(config)
        text = load_text(built.checkpoint.path, cache_directory(config.cache_dir), TextOptions(chat_template=chat_template))
        self.name = built.name
        self.tokenizer = text.tokenizer
        self.max_model_len = built.engine.max_model_len
        self._text = text
        self._vocab_size = built.spec.vocab_size
        self._hidden_size = built.spec.hidden_size
        self._eos_ids = tuple(dict.fromkeys((*built.eos_ids, *text.tokenizer.eos_ids)))
        self._engine = built.engine
        self._judge = Judge(lambda: vocabulary_of(self.tokenizer, self._vocab_size, self._eos_ids))
        self._most_open = AHEAD * config.max_num_seqs
        self._next_id = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts, in their order. One SamplingParams for all, or one for each; `use_tqdm` shows a progress bar.

        Raises RequestError for the first prompt or parameter that is wrong, before anything runs.
        """
        listed = _listed(prompts)
        answers = [
            self._answer(self._ids(prompt), params, prompt if isinstance(prompt, str) else None)
            for prompt, params in zip(listed, _one_each(sampling_params, len(listed)), strict=True)
        ]
        return self._outputs(answers, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        response_format: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, each with the same tools and format. As `generate` otherwise.

        Tools and formats are OpenAI's. A choice's `text` is what the model wrote, its `message` what it comes to.
        """
        conversations: list[Sequence[Message]] = (
            [messages] if messages and isinstance(messages[0], Mapping) else list(messages)  # type: ignore[list-item, arg-type]
        )
        template = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
        }
        options = ChatOptions(
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            response_format=response_format,
            template=template,
        )
        answers = []
        for conversation, params in zip(conversations, _one_each(sampling_params, len(conversations)), strict=True):
            size, limit = self._vocab_size, self.max_model_len
            chat = prepared_chat(self._text, conversation, params, options, vocab_size=size, max_tokens=limit)
            answers.append(self._answer(chat.ids, chat.params, None, chat.parse))
        return self._outputs(answers, use_tqdm, chat=True)

    def stream_chat(self, messages: Sequence[Message], sampling_params: SamplingParams | None = None) -> Generator[str]:
        """One conversation's answer, text by text as it is made. Closing the iterator ends the request."""
        ids = encode_chat(self._text.template, messages, max_tokens=self.max_model_len)
        for _, delta in self._run([self._answer(tuple(ids), sampling_params or SamplingParams(max_tokens=None), None)]):
            yield delta.text

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[RequestOutput]:
        """The `beam_width` best continuations of each prompt, best first. Raises RequestError as `generate`."""
        sampling = SamplingParams(
            n=params.beam_width,
            max_tokens=params.max_tokens,
            temperature=0.0,
            ignore_eos=params.ignore_eos,
            stop_token_ids=params.stop_token_ids,
            logprobs=params.logprobs,
        )
        texts = _listed(prompts)
        answers = [self._answer(self._ids(text), sampling, text if isinstance(text, str) else None) for text in texts]
        for answer in answers:
            check_beams(sampling, answer.request.stop_ids, params.length_penalty)
        searches = {
            answer: BeamSearch(answer.request, max_model_len=self.max_model_len, length_penalty=params.length_penalty)
            for answer in answers
        }
        while live := [search for search in searches.values() if not search.done]:
            rounds = [[self._answer(ids, asked, None) for ids, asked in search.requests()] for search in live]
            entries = {answer: delta.logprobs[0] for answer, delta in self._run(chain(*rounds)) if delta.logprobs}
            for search, answered in zip(live, rounds, strict=True):
                search.advance([entries[answer] for answer in answered])
        made = [
            [[delta] for output in search.outputs(None, 0, ()) if (delta := answer.take(output)) is not None]
            for answer, search in searches.items()
        ]
        return [request_output(self.tokenizer, answer, deltas) for answer, deltas in zip(answers, made, strict=True)]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling = "mean",
        dimensions: int | None = None,
        use_tqdm: bool = True,
    ) -> npt.NDArray[np.float32]:
        """[prompts, hidden size or `dimensions`]: pooled final hidden states, each row of length 1.

        "mean" is over all tokens of a prompt, "last" is the last one's. Raises RequestError as `generate`.
        """
        if dimensions is not None and not 1 <= dimensions <= self._hidden_size:
            raise RequestError(f"dimensions must be 1 to {self._hidden_size}, the model's hidden size", param="dimensions")
        answers = []
        for prompt in _listed(prompts):
            ids = self._ids(prompt, parse_special=False)
            check_length(ids, self.max_model_len, "prompt")
            self._next_id += 1
            request = EngineRequest(
                request_id=self._next_id, prompt=ids, params=EMBED, arrival=time.monotonic(), pooling=pooling
            )
            answers.append(Answer(self.tokenizer, request))
        for _ in _with_progress(self._run(answers), answers, show=use_tqdm):
            pass
        return np.stack([np.frombuffer(unit_vector(answer.embedding, dimensions), "<f4") for answer in answers])

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` can work: base models have no template."""
        return self._text.template is not None

    def close(self) -> None:
        """Free the model's memory and stop its threads."""
        self._judge.close()
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _ids(self, prompt: Prompt, *, parse_special: bool = True) -> tuple[int, ...]:
        if isinstance(prompt, str):
            encode = self.tokenizer.encode
            return tuple(encode(prompt, add_special_tokens=True, parse_special=parse_special, max_tokens=self.max_model_len))
        for token in (min(prompt, default=0), max(prompt, default=0)):
            check_token("prompt", token, self._vocab_size)
        return tuple(prompt)

    def _answer(self, ids: tuple[int, ...], params: SamplingParams, text: str | None, plan: ParsePlan | None = None) -> Answer:
        check_params(params, self._vocab_size, control_ids=self.tokenizer.control_ids)
        if params.structured_output is not None:
            self._judge.check(params.structured_output)
        if self._engine.constraints is None and (params.structured_output is not None or params.allowed_token_ids):
            self._engine.constraints = GrammarConstraints(self._judge.vocabulary)
        self._next_id += 1
        request = engine_request(
            self._next_id,
            ids,
            params,
            eos_ids=self._eos_ids,
            max_model_len=self.max_model_len,
            arrival=time.monotonic(),
        )
        return Answer(self.tokenizer, request, text=text, plan=plan)

    def _outputs(self, answers: Sequence[Answer], show: bool, *, chat: bool = False) -> list[RequestOutput]:
        made: dict[int, list[list[Delta]]] = {
            answer.request.request_id: [[] for _ in range(answer.request.params.n)] for answer in answers
        }
        for answer, delta in _with_progress(self._run(answers), answers, show=show):
            made[answer.request.request_id][delta.index].append(delta)
        return [request_output(self.tokenizer, answer, made[answer.request.request_id], chat=chat) for answer in answers]

    def _run(self, answers: Iterable[Answer]) -> Generator[tuple[Answer, Delta]]:
        """Run requests to their ends: each delta as it is made. What is open when the reader leaves is aborted."""
        waiting = deque(answers)
        open_answers: dict[int, Answer] = {}
        try:
            while waiting or open_answers:
                while waiting and len(open_answers) < self._most_open:
                    answer = waiting.popleft()
                    self._engine.add(answer.request)
                    open_answers[answer.request.request_id] = answer
                for output in self._engine.step():
                    running = open_answers.get(output.request_id)
                    if running is None:
                        continue  # ended by a stop string in this very step
                    delta = running.take(output)
                    if running.failure is not None:
                        raise NoriaError(f"request {output.request_id} ended early: {running.failure_text or running.failure}")
                    if delta is not None:
                        yield running, delta
                    if delta is not None and delta.finish_reason is not None and output.finish_reason is None:
                        for last in self._engine.abort(output.request_id, output.index):  # a stop string
                            running.take(last)
                    if running.closed:
                        del open_answers[output.request_id]
        finally:
            for request_id in open_answers:
                self._engine.abort(request_id)


def request_output(
    tokenizer: Tokenizer, answer: Answer, deltas: Sequence[Sequence[Delta]], *, finished: bool = True, chat: bool = False
) -> RequestOutput:
    """What a request has made so far; `deltas` by choice. Choices of a `chat` that have ended come with their message."""
    request = answer.request
    scores = answer.prompt_logprobs
    return RequestOutput(
        request_id=request.request_id,
        prompt=answer.text,
        prompt_token_ids=request.prompt,
        outputs=[_completion(tokenizer, index, made, request.params, chat) for index, made in enumerate(deltas)],
        prompt_logprobs=None if scores is None else [None, *(_logprobs(tokenizer, entry) for entry in scores)],
        finished=finished,
        num_cached_tokens=answer.cached_tokens,
        seed=request.params.seed,
    )


def _completion(
    tokenizer: Tokenizer, index: int, deltas: Sequence[Delta], params: SamplingParams, chat: bool
) -> CompletionOutput:
    if not deltas:
        return CompletionOutput(index, "", (), None, None, None)
    whole = merge(deltas)
    asked = params.logprobs is not None
    return CompletionOutput(
        index=index,
        text=whole.text,
        token_ids=whole.tokens,
        logprobs=[_logprobs(tokenizer, entry, ranked=not params.logprob_token_ids) for entry in whole.logprobs]
        if asked
        else None,
        cumulative_logprob=sum(entry.logprob for entry in whole.logprobs) if asked else None,
        finish_reason=None if whole.finish_reason is None else whole.finish_reason.value,
        stop_reason=whole.stop_reason,
        message=message_of(whole.events) if chat and whole.finish_reason is not None else None,
    )


def _logprobs(tokenizer: Tokenizer, entry: TokenLogprobs, *, ranked: bool = True) -> dict[int, Logprob]:
    """{id: Logprob} of a position: the most likely tokens in their order (or named ones, not ranked), and the token itself."""
    found = {
        token: Logprob(logprob, rank if ranked else None, tokenizer.token_text(token))
        for rank, (token, logprob) in enumerate(zip(entry.top_tokens, entry.top_logprobs, strict=True), 1)
    }
    found.setdefault(entry.token, Logprob(entry.logprob, None, tokenizer.token_text(entry.token)))
    return found


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as several. A list of numbers is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if not prompts:
        raise RequestError("there is no prompt", param="prompt")
    if isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling params for {count} prompts: give one for all, or one for each")
    return params


def _with_progress(
    run: Iterator[tuple[Answer, Delta]], answers: Sequence[Answer], *, show: bool
) -> Generator[tuple[Answer, Delta]]:
    """Pass deltas on, and show on stderr how many prompts are done and how fast tokens come."""
    if not show:
        yield from run
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]:.0f} tok/s"), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=False) as progress:
        task = progress.add_task("prompts", total=len(answers), rate=0.0)
        tokens, done, began = 0, set[int](), time.monotonic()
        for answer, delta in run:
            tokens += len(delta.tokens)
            if answer.ended:
                done.add(answer.request.request_id)
            progress.update(task, completed=len(done), rate=tokens / (time.monotonic() - began))
            yield answer, delta
