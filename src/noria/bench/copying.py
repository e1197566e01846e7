"""What speculation brings, and what it costs: copying workloads from real text, with drafts and without in turn.

    repeat    the model is asked to repeat a passage of the corpus: drafts come from the prompt
    edit      it is given a function of Python's library to rename a variable in, and the function as the prediction
    again     four questions are asked again and again: drafts come from earlier answers (`--method suffix`)
    random    prompts of random ids, answers sampled at temperature 1: nothing to copy, the drafts' cost alone

    python -m noria.bench.copying MODEL [--pairs 20] [--streams 1] [--tokens 128] [--method ngram --method suffix]

Both engines are one: speculation is switched between runs, whose outputs must be equal. But for `again`, each run has a salt
of its own, so that no run copies from the one before.
"""

from __future__ import annotations

import argparse
import inspect
import json
import time
from collections.abc import Sequence
from random import Random

from noria.assembly import BuiltEngine, build_engine
from noria.bench.pairs import interleave, median_ratio
from noria.bench.text import load_corpus
from noria.config import EngineConfig, SpeculativeConfig
from noria.server.loading import load_text
from noria.text.chat import encode_chat
from noria.text.tokenizer import Tokenizer
from noria.types import EngineRequest, SamplingParams
from noria.weights.hub import cache_directory

PASSAGE = 160  # tokens
WORKLOADS = ("repeat", "edit", "again", "random")
QUESTIONS = (
    "Explain how a water wheel works.",
    "Write a short story about a lighthouse keeper.",
    "List ten uses of salt, one sentence each.",
    "What are the seasons, and why are there seasons?",
)
Prompt = tuple[tuple[int, ...], tuple[int, ...]]  # ids, and those of the prediction


def prompts(workload: str, tokenizer: Tokenizer, template: object, vocab: int, count: int) -> list[Prompt]:
    """`count` prompts of a workload, each of another passage."""
    if workload == "random":
        random = Random(0)
        return [(tuple(random.randrange(vocab) for _ in range(PASSAGE)), ()) for _ in range(count)]
    if workload == "edit":
        codes = [inspect.getsource(f) for f in (json.dumps, json.load, json.loads, inspect.getmodule)][:count]
        asked = [f"Rename the variable `obj` to `item`. Answer with the whole code only.\n\n{code}" for code in codes]
        return [
            (_chat(template, text), tuple(tokenizer.encode(code, add_special_tokens=False, parse_special=False)))
            for text, code in zip(asked, codes, strict=True)
        ]
    if workload == "again":
        return [(_chat(template, question), ()) for question in QUESTIONS]
    ids = tokenizer.encode(load_corpus(None).text, add_special_tokens=False, parse_special=False)
    stride = len(ids) // count
    passages = [tokenizer.decode(ids[i * stride : i * stride + PASSAGE]) for i in range(count)]
    return [(_chat(template, f"Repeat this text word for word:\n\n{passage}"), ()) for passage in passages]


def _chat(template: object, text: str) -> tuple[int, ...]:
    return tuple(encode_chat(template, [{"role": "user", "content": text}]))  # type: ignore[arg-type]


class Copying:
    """One engine, and the workload's requests."""

    def __init__(self, built: BuiltEngine, work: Sequence[Prompt], workload: str, streams: int, tokens: int) -> None:
        self.accepted = self.drafted = 0
        self._engine = built.engine
        self._work = work
        self._streams = streams
        self._tokens = tokens
        self._temperature = float(workload == "random")
        self._salted = workload != "again"
        self._runs = 0
        self._next_id = 0

    def seconds(self, index: int, speculation: bool) -> tuple[float, list[tuple[int, ...]]]:
        """Run `streams` requests: (seconds of decoding a token, outputs)."""
        engine = self._engine
        engine.speculator.active = speculation
        self._runs += 1
        salt = str(self._runs) if self._salted else ""
        said: dict[int, tuple[int, ...]] = {}
        for stream in range(self._streams):
            ids, prediction = self._work[(index * self._streams + stream) % len(self._work)]
            self._next_id += 1
            params = SamplingParams(temperature=self._temperature, max_tokens=self._tokens, ignore_eos=True, seed=0)
            prediction = prediction if speculation else ()
            engine.add(
                EngineRequest(request_id=self._next_id, prompt=ids, params=params, prediction=prediction, cache_salt=salt)
            )
        engine.reset_prefix_cache()
        begin: float | None = None
        while engine.has_work:
            outputs = engine.step()
            for output in outputs:
                said[output.request_id] = said.get(output.request_id, ()) + output.tokens
            if begin is None and len(said) == self._streams:
                begin, before = time.perf_counter(), sum(map(len, said.values()))
        assert begin is not None
        return (time.perf_counter() - begin) / (sum(map(len, said.values())) - before), [
            said[request] for request in sorted(said)
        ]


def main() -> None:
    """Print, by workload, how much faster a stream decodes with drafts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--workload", choices=WORKLOADS, action="append")
    parser.add_argument("--method", choices=("ngram", "suffix"), action="append")
    args = parser.parse_args()
    speculative = SpeculativeConfig(method=tuple(args.method or ("ngram",)))
    config = EngineConfig(model=args.model, max_model_len=2048, speculative_config=speculative)
    built = build_engine(config)
    text = load_text(built.checkpoint.path, cache_directory(config.cache_dir), None)
    for workload in args.workload or WORKLOADS:
        work = prompts(workload, text.tokenizer, text.template, built.spec.vocab_size, max(4, args.streams))
        copying = Copying(built, work, workload, args.streams, args.tokens)
        before = built.engine.stats()
        outputs: dict[tuple[bool, int], list[tuple[int, ...]]] = {}

        def run(index: int, speculation: bool, copying: Copying = copying, outputs: dict = outputs) -> float:  # type: ignore[type-arg]
            seconds, outputs[speculation, index] = copying.seconds(index, speculation)
            return seconds

        ratio = median_ratio(interleave(lambda i: run(i, False), lambda i: run(i, True), args.pairs))
        after = built.engine.stats()
        drafted = after.spec_draft_tokens - before.spec_draft_tokens
        accepted = after.spec_accepted_tokens - before.spec_accepted_tokens
        equal = all(outputs[True, i] == outputs[False, i] for i in range(args.pairs))
        print(f"{workload:8} {args.streams} streams: {ratio} times as fast; {accepted} of {drafted} drafts; equal: {equal}")
    built.engine.close()


if __name__ == "__main__":
    main()
