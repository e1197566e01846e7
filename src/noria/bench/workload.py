"""What a benchmark asks for: sessions of turns, each a prompt and a number of output tokens, and when each session arrives.

    random          independent prompts of random token ids
    shared-prefix   the same, but each prompt begins with one of a few common prefixes
    multi-turn      conversations: a turn is sent when the answer to the one before it has come, with all that came before
    sharegpt        conversations' first exchanges from a ShareGPT file (see `sharegpt.py`)

The same seed gives the same work. Flags and meanings are those of `vllm bench` where the idea is the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from noria.types import ConfigError

Prompt = tuple[int, ...] | str  # token ids, or a text where the tokens are the server's affair
MakePrompt = Callable[[random.Random, int], Prompt]  # of about so many tokens

DATASETS = ("random", "sharegpt", "shared-prefix", "multi-turn")
AT_ONCE = float("inf")

# Short, frequent words: nearly always one token each in a vocabulary of English text.
WORDS = (
    "the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "as", "with", "his", "they", "at", "be",
    "this", "from", "have", "or", "by", "one", "had", "not", "but", "what", "all", "were", "when", "we", "there", "can",
    "an", "your",
)  # fmt: skip


class WorkloadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths in tokens. A length is drawn uniformly from [len (1 - range_ratio), len (1 + range_ratio)], at least 1."""

    dataset: str = "random"
    num_prompts: int = 64
    input_len: int = 288
    output_len: int = 144
    range_ratio: float = 0.0
    prefix_len: int = 0  # tokens that all prompts have in common (shared-prefix: that those of one prefix have in common)
    num_prefixes: int = 1
    num_turns: int = 4  # of a multi-turn session; `num_prompts` counts turns
    request_rate: float = AT_ONCE  # sessions a second
    burstiness: float = 1.0
    seed: int = 0

    def check(self) -> None:
        """ConfigError for a value that makes no workload."""
        for name in ("num_prompts", "input_len", "output_len", "num_prefixes", "num_turns"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
        if not 0.0 <= self.range_ratio < 1.0:
            raise ConfigError("--random-range-ratio must be in [0, 1)")
        if self.request_rate <= 0 or self.burstiness <= 0:
            raise ConfigError("--request-rate and --burstiness must be positive")
        if self.prefix_len < 0:
            raise ConfigError("a prefix cannot have fewer than 0 tokens")


@dataclass(frozen=True)
class Turn:
    """One request: what is said now, after everything that was said before in its session."""

    prompt: Prompt
    max_tokens: int


@dataclass(frozen=True)
class Session:
    """Turns that follow each other. `arrival` of the first, in seconds after the start."""

    turns: tuple[Turn, ...]
    arrival: float = 0.0


def random_ids(vocab_size: int) -> MakePrompt:
    """Prompts as token ids, clear of the control tokens at both ends of a vocabulary."""
    low, high = min(1000, vocab_size // 4), vocab_size - vocab_size // 5

    def make(rng: random.Random, count: int) -> Prompt:
        return tuple(rng.randrange(low, high) for _ in range(count))

    return make


def random_words(rng: random.Random, count: int) -> Prompt:
    """A prompt as text, for endpoints that take no ids: about a token a word; the server says how many there were."""
    return " ".join(rng.choices(WORDS, k=count))


def arrivals(count: int, rate: float, burstiness: float, rng: random.Random) -> list[float]:
    """Seconds after the start of `count` arrivals, `rate` a second on average; all 0 for an infinite rate.

    The gaps have a gamma distribution of shape `burstiness` and mean 1 / rate, so a coefficient of variation of
    burstiness^-1/2: 1 is a Poisson process, less is burstier, more is steadier.
    """
    times, clock = [], 0.0
    for _ in range(count):
        if rate != AT_ONCE:
            clock += rng.gammavariate(burstiness, 1.0 / (rate * burstiness))
        times.append(clock)
    return times


def generate(spec: WorkloadSpec, make: MakePrompt) -> list[Session]:
    """The synthetic workloads as sessions, in order of arrival. Raises ConfigError for values that make none."""
    spec.check()
    rng = random.Random(spec.seed)
    prefixes = [make(rng, spec.prefix_len) for _ in range(spec.num_prefixes)] if spec.prefix_len else []
    sessions: list[tuple[Turn, ...]] = []
    left = spec.num_prompts
    while left:
        turns = min(spec.num_turns, left) if spec.dataset == "multi-turn" else 1
        prefix = prefixes[len(sessions) % len(prefixes)] if prefixes else None
        sessions.append(tuple(_turns(spec, make, rng, turns, prefix)))
        left -= turns
    return arrive(sessions, spec)


def _turns(spec: WorkloadSpec, make: MakePrompt, rng: random.Random, count: int, prefix: Prompt | None) -> Iterator[Turn]:
    for index in range(count):
        own = make(rng, _length(spec.input_len, spec.range_ratio, rng))
        prompt = own if prefix is None or index else joined(prefix, own)
        yield Turn(prompt, _length(spec.output_len, spec.range_ratio, rng))


def _length(mean: int, ratio: float, rng: random.Random) -> int:
    return rng.randint(max(1, int(mean * (1 - ratio))), max(1, int(mean * (1 + ratio))))


def arrive(sessions: list[tuple[Turn, ...]], spec: WorkloadSpec) -> list[Session]:
    """Give each session its arrival. The times depend on the seed, not on what the sessions hold."""
    times = arrivals(len(sessions), spec.request_rate, spec.burstiness, random.Random(f"arrivals {spec.seed}"))
    return [Session(turns, time) for turns, time in zip(sessions, times, strict=True)]


def joined(first: Prompt, second: Prompt) -> Prompt:
    """One prompt of two parts of the same kind."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first} {second}"
    assert isinstance(first, tuple)
    assert isinstance(second, tuple)
    return first + second
