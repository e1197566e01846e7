"""What a benchmark asks for: prompts as random token ids, output lengths, arrival times. The same seed gives the same work."""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec


class WorkloadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths are in tokens and drawn uniformly from [low, high]; names follow `vllm bench` where the idea is the same."""

    num_prompts: int = 64
    input_len: tuple[int, int] = (64, 512)
    output_len: tuple[int, int] = (32, 256)
    prefix_len: int = 0  # tokens that all prompts have in common, before their own
    request_rate: float = float("inf")  # arrivals a second; inf: all at once
    burstiness: float = 1.0  # shape of the gamma distribution of gaps: 1 is Poisson, below 1 burstier
    seed: int = 0


@dataclass(frozen=True)
class WorkItem:
    prompt: tuple[int, ...]
    max_tokens: int
    arrival: float  # seconds after the start


def generate(spec: WorkloadSpec, vocab_size: int) -> list[WorkItem]:
    """The workload as a list, in order of arrival. Ids stay clear of the control tokens at both ends of a vocabulary."""
    rng = random.Random(spec.seed)
    low, high = min(1000, vocab_size // 4), vocab_size - vocab_size // 5

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(low, high) for _ in range(count))

    prefix = ids(spec.prefix_len)
    items, clock = [], 0.0
    for _ in range(spec.num_prompts):
        if spec.request_rate != float("inf"):
            clock += rng.gammavariate(spec.burstiness, 1.0 / (spec.request_rate * spec.burstiness))
        items.append(WorkItem(prefix + ids(rng.randint(*spec.input_len)), rng.randint(*spec.output_len), clock))
    return items
