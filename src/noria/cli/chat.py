"""noria chat: talk to a model in the terminal. Ctrl-C stops an answer, Ctrl-D or /exit leaves, /reset forgets."""

from __future__ import annotations

import argparse
import signal
import sys
from contextlib import closing
from types import FrameType
from typing import TYPE_CHECKING, Any

from noria.cli.flags import add_flags, settings
from noria.config import EngineConfig
from noria.types import ConfigError, RequestError, SamplingParams

if TYPE_CHECKING:
    from noria.llm import LLM

CHAT_KV_BYTES = 1 << 30  # one conversation needs no more, unless the user says so


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, the engine's settings, and how to answer."""
    add_flags(parser, EngineConfig)
    group = parser.add_argument_group("Conversation")
    group.add_argument("--system", help="system message")
    group.add_argument("--temperature", type=float, default=0.7, help="0: always the most likely token [0.7]")
    group.add_argument("--top-p", type=float, default=0.95, help="[0.95]")
    group.add_argument("--max-tokens", type=int, help="most tokens of an answer [what the context leaves]")
    group.add_argument("--seed", type=int, help="repeat a conversation exactly")
    group.add_argument("--chat-template", metavar="FILE", help="a Jinja template instead of the model's own")


def run(arguments: argparse.Namespace) -> int:
    """Load the model and talk until the user leaves."""
    (config,) = settings(arguments, EngineConfig)
    assert isinstance(config, EngineConfig)
    from noria.llm import LLM

    chosen: dict[str, Any] = {name: getattr(config, name) for name in EngineConfig.__struct_fields__ if name != "model"}
    params = SamplingParams(
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        max_tokens=arguments.max_tokens,
        seed=arguments.seed,
    )
    print(f"loading {config.model} ...", file=sys.stderr)
    with LLM(config.model, chat_template=arguments.chat_template, **chosen) as llm:
        if not llm.has_chat_template:
            raise ConfigError(f"{llm.name} is a base model without a chat template: use noria serve and /v1/completions")
        return Conversation(llm, params, arguments.system).run()


class Conversation:
    """The history, and the loop around it."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._start = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._start)
        self._interrupted = False

    def run(self) -> int:
        """Read, answer, remember, until the end of the input."""
        interactive = sys.stdin.isatty()
        if interactive:
            print("Ctrl-C stops an answer; /reset forgets the conversation; /exit or Ctrl-D leaves.", file=sys.stderr)
        while True:
            try:
                line = input("> " if interactive else "").strip()
            except (EOFError, KeyboardInterrupt):
                return 0
            if line in ("/exit", "/quit"):
                return 0
            if line == "/reset":
                self._messages = list(self._start)
            elif line:
                self._turn(line)

    def _turn(self, line: str) -> None:
        self._messages.append({"role": "user", "content": line})
        try:
            answer = self._answer()
        except RequestError as error:
            self._messages.pop()
            print(f"noria: {error} (/reset forgets the conversation)", file=sys.stderr)
            return
        self._messages.append({"role": "assistant", "content": answer})

    def _answer(self) -> str:
        """Stream one answer. Ctrl-C is looked at between two steps only: inside one it would leave the engine half done."""
        self._interrupted = False
        before = signal.signal(signal.SIGINT, self._on_interrupt)
        parts = []
        try:
            with closing(self._llm.stream_chat(self._messages, self._params)) as stream:
                for text in stream:
                    parts.append(text)
                    print(text, end="", flush=True)
                    if self._interrupted:
                        break
        finally:
            signal.signal(signal.SIGINT, before)
            print(flush=True)
        return "".join(parts)

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        self._interrupted = True
