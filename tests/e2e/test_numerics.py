"""The numerics contract: what a request gets is a function of its own prefix, to the last bit.

Five needle requests are run alone, and then inside random traffic: other requests before, beside and after them, some with
the same prefix; random token budgets and chunk limits; prefix hits; pools so small that sequences are preempted; one to three
threads; every tier; right and wrong drafts; steps planned ahead or not. Every token,
logprob and embedding must be equal, with ==.

The control runs the same trials on the torch backend, whose matrix products choose their order of summation by the batch. It
must fail: otherwise these tests could not.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import pytest

import tiny
from fakes import Adversary
from noria.backends.base import BLOCK_SIZE, Backend, KVCacheSpec, KVType
from noria.backends.cost.backend import CostBackend
from noria.backends.cpu import _native
from noria.backends.cpu.backend import CpuBackend
from noria.backends.torch.backend import TorchBackend
from noria.config import EngineConfig
from noria.core.engine import Engine
from noria.core.plan import PlanRow, RowResult, StepPlan
from noria.core.sequence import Sequence as Sequence_
from noria.models import rope
from noria.models.spec import layer_groups
from noria.runner.ledger import blocks_for
from noria.runner.rows import Rows
from noria.runner.runner import Runner
from noria.types import EngineRequest, FinishReason, SamplingParams, TokenLogprobs

TIERS = _native.available_tiers()
FAMILIES = {"llama": tiny.LLAMA_SHAPE, "gemma": tiny.GEMMA_SHAPE}


@dataclass(frozen=True)
class Circumstances:
    """Everything that must not matter, and the cache's type, which does."""

    max_len: int
    kv_dtype: KVType = "bf16"
    pool: float = 8.0  # blocks, in sequences of full length
    max_num_seqs: int = 8
    budget: int = 256
    threshold: int = 0
    prefix_caching: bool = False
    policy: Literal["fcfs", "priority"] = "fcfs"
    draft_errors: float | None = None  # share of wrong drafts of the needles; None: no drafts
    depth: int = 0
    threads: int = 1
    tier: str = "auto"
    arrivals: tuple[tuple[int, EngineRequest], ...] = ()


@dataclass
class Transcript:
    """All that one choice of a request gave."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    embedding: bytes = b""
    reason: FinishReason | None = None


@dataclass
class Run:
    transcripts: dict[tuple[int, int], Transcript]
    cached_tokens: int = 0  # of needles
    preemptions: int = 0  # of needles


def prompt(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(tiny.VOCAB) for _ in range(length))


_RNG = random.Random(0)
EMBED = SamplingParams(max_tokens=0, seed=0)
SHARED = prompt(_RNG, 300)


@dataclass(frozen=True)
class Scale:
    """How long the sequences of a comparison are. `shared`: the common start of the needles; others share parts of it."""

    max_len: int
    shared: int
    needles: tuple[EngineRequest, ...]


def scale(max_len: int, shared: int, tail: int) -> Scale:
    """Five needles: greedy; sampled with filters and a penalty; two choices with prompt logprobs; two embeddings."""
    start = SHARED[:shared]
    needles = (
        EngineRequest(
            request_id=1,
            prompt=start + prompt(_RNG, tail),
            params=SamplingParams(temperature=0.0, max_tokens=40, logprobs=4, seed=0),
        ),
        EngineRequest(
            request_id=2,
            prompt=start[: shared * 7 // 8],
            params=SamplingParams(
                temperature=0.9, top_p=0.95, top_k=60, repetition_penalty=1.2, max_tokens=50, logprobs=0, seed=2**63 + 5
            ),
        ),
        EngineRequest(
            request_id=3,
            prompt=start[: shared // 2] + prompt(_RNG, tail + 12),
            params=SamplingParams(n=2, temperature=1.0, max_tokens=30, logprobs=2, prompt_logprobs=1, seed=9),
        ),
        EngineRequest(request_id=4, prompt=start + prompt(_RNG, tail), params=EMBED, pooling="mean"),
        EngineRequest(request_id=5, prompt=start + prompt(_RNG, tail), params=EMBED, pooling="last"),
    )
    return Scale(max_len, shared, needles)


SHORT = scale(max_len=144, shared=40, tail=21)  # two full blocks and a half
LONG = scale(max_len=640, shared=290, tail=240)  # prompts and outputs cross positions 256 and 512, where attention splits


def circumstances(trial: int, tiers: Sequence[str], size: Scale = SHORT, **fixed: Any) -> Circumstances:
    """Random traffic and settings, the same for the same trial."""
    rng = random.Random(trial)
    others = []
    for request_id in range(10, 10 + rng.randrange(8, 20)):
        shared = rng.choice((0, 0, 16, size.shared * 4 // 5, size.shared))
        others.append(
            EngineRequest(
                request_id=request_id,
                prompt=SHARED[:shared] + prompt(rng, rng.randrange(1, size.max_len * 5 // 16)),
                params=SamplingParams(
                    n=rng.choice((1, 1, 1, 3)),
                    temperature=rng.choice((0.0, 1.0)),
                    max_tokens=rng.randrange(1, 70),
                    seed=rng.randrange(2**64),
                    logprobs=rng.choice((None, 3)),
                ),
                priority=rng.choice((0, 0, 9)),
            )
        )
    generating, embedding = size.needles[:3], size.needles[3:]
    needles = [msgspec.structs.replace(needle, priority=rng.choice((0, 9, 9))) for needle in generating]
    arrivals = [(rng.randrange(40), request) for request in (*others, *needles)]
    arrivals += [(2 * trial, msgspec.structs.replace(needle, priority=9)) for needle in embedding]
    return Circumstances(
        max_len=size.max_len,
        pool=rng.choice((1.02, 1.1, 1.3, 3.0)),
        max_num_seqs=rng.choice((3, 5, 8)),
        budget=rng.choice((16, 17, 31, 64, 200)),
        threshold=rng.choice((0, 0, 7, 16, 40)),
        prefix_caching=rng.random() < 0.8,
        policy=rng.choice(("fcfs", "priority", "priority")),
        depth=rng.choice((0, 0, 1)),
        draft_errors=rng.choice((None, 0.0, 0.3, 1.0)),
        threads=1 + trial % 3,
        tier=tiers[trial % len(tiers)],
        arrivals=tuple(sorted(arrivals, key=lambda a: a[0])),
        **fixed,
    )


def run(
    loaded: tiny.Loaded,
    make_backend: Callable[[Circumstances], Backend],
    given: Circumstances,
    expected: Mapping[tuple[int, int], Transcript] | None = None,
) -> Run:
    """Serve the arrivals to the end, the needles' transcripts recorded. What is `expected` of them serves as drafts."""
    engine = _engine(loaded, make_backend(given), given)
    if expected is not None and given.draft_errors is not None:

        def outcome(sequence: Sequence_) -> Sequence[int]:
            whole = expected.get((sequence.request.request_id, sequence.index))
            return () if whole is None else (*sequence.request.prompt, *whole.tokens)

        Adversary(engine, outcome, given.draft_errors, seed=given.threads)
    waiting = list(given.arrivals)
    result = Run({})
    step = 0
    while waiting or engine.has_work:
        while waiting and (waiting[0][0] <= step or not engine.has_work):
            engine.add(waiting.pop(0)[1])
        for output in engine.step():
            if output.request_id >= 10:
                continue
            transcript = result.transcripts.setdefault((output.request_id, output.index), Transcript())
            transcript.tokens += output.tokens
            transcript.logprobs += output.logprobs
            transcript.embedding += output.embedding
            if output.prompt_logprobs is not None:
                transcript.prompt_logprobs = output.prompt_logprobs
            if output.finish_reason is not None:
                transcript.reason = output.finish_reason
                result.cached_tokens += output.cached_tokens
                result.preemptions += output.preemptions
        engine.audit()
        step += 1
    engine.close()
    return result


def _engine(loaded: tiny.Loaded, backend: Backend, given: Circumstances) -> Engine:
    spec = loaded.spec
    groups = layer_groups(spec)
    config = EngineConfig(
        model="tiny",
        max_num_seqs=given.max_num_seqs,
        max_num_batched_tokens=given.budget,
        long_prefill_token_threshold=given.threshold,
        scheduling_policy=given.policy,
        enable_prefix_caching=given.prefix_caching,
        async_depth=given.depth,
    )
    num_blocks = 1 + int(given.pool * blocks_for(groups, given.max_len, given.budget * (1 + given.depth)))
    blocks_per_row = -(-given.max_len // BLOCK_SIZE)
    executable = backend.build(
        lambda ops: loaded.forward(ops, spec, loaded.weights),
        ropes=[rope.tables(r, given.max_len) for r in spec.ropes],
        kv=KVCacheSpec(
            groups=groups,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=given.kv_dtype,
            num_blocks=num_blocks,
            max_blocks_per_row=blocks_per_row,
        ),
        max_tokens=given.budget,
        max_rows=given.max_num_seqs,
        vocab_size=spec.vocab_size,
    )
    rows = Rows(given.max_num_seqs, given.max_len, len(groups), blocks_per_row)
    return Engine(
        config,
        max_model_len=given.max_len,
        groups=groups,
        num_blocks=num_blocks,
        model_tag=b"tiny",
        runner=Runner(executable, backend, rows, depth=given.depth),
    )


def alone(
    loaded: tiny.Loaded, make_backend: Callable[[Circumstances], Backend], size: Scale = SHORT, **fixed: Any
) -> Mapping[tuple[int, int], Transcript]:
    """Each needle with the machine to itself, its whole prompt in one chunk."""
    transcripts: dict[tuple[int, int], Transcript] = {}
    for needle in size.needles:
        given = Circumstances(max_len=size.max_len, budget=size.max_len, arrivals=((0, needle),), **fixed)
        transcripts |= run(loaded, make_backend, given).transcripts
    assert set(transcripts) == {(1, 0), (2, 0), (3, 0), (3, 1), (4, 0), (5, 0)}
    assert all(bool(t.logprobs) != bool(t.embedding) and t.reason is FinishReason.LENGTH for t in transcripts.values())
    assert len(transcripts[3, 0].prompt_logprobs or ()) == len(size.needles[2].prompt) - 1
    return transcripts


def on_cpu(given: Circumstances) -> Backend:
    return CpuBackend(threads=given.threads, tier=given.tier)


def on_torch(given: Circumstances) -> Backend:
    return TorchBackend()


@pytest.mark.parametrize(
    "format_name", [pytest.param(f, marks=[] if f in ("bf16", "q4-minima") else pytest.mark.slow) for f in tiny.FORMATS]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_request_gets_the_same_bits_in_any_company(family: str, format_name: str) -> None:
    """Red when a kernel's order of summation depends on the batch, the chunk, the thread or the tier; when a cached, a
    recomputed and a fresh block differ; when a draw's noise depends on anything but (seed, position, stream)."""
    loaded = tiny.random_model(FAMILIES[family], format_name)
    expected = alone(loaded, on_cpu)
    for trial in range(8):
        given = circumstances(trial, TIERS)
        assert run(loaded, on_cpu, given, expected).transcripts == expected, given


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["bf16", "f32", "int8"])
@pytest.mark.parametrize("format_name", ["bf16", "q4-minima"])
@pytest.mark.parametrize("family", FAMILIES)
def test_long_sequences_too(family: str, format_name: str, kv_dtype: str) -> None:
    """Red when the splits of attention over 256 keys move with the chunk, or are joined in another order."""
    loaded = tiny.random_model(FAMILIES[family], format_name)
    expected = alone(loaded, on_cpu, LONG, kv_dtype=kv_dtype)
    for trial in range(6):
        given = circumstances(trial, TIERS, LONG, kv_dtype=kv_dtype)
        assert run(loaded, on_cpu, given, expected).transcripts == expected, given


def test_the_trials_reach_what_they_are_meant_to() -> None:
    """Red when the trials above no longer preempt needles or hit the cache: then they would prove less than they say."""
    loaded = tiny.random_model(tiny.GEMMA_SHAPE, "q8")
    for size, trials, preemptions in ((SHORT, range(8), 3), (LONG, range(6), 1)):
        runs = [run(loaded, lambda given: CostBackend(), circumstances(trial, TIERS, size)) for trial in trials]
        assert sum(r.preemptions for r in runs) >= preemptions
        assert sum(r.cached_tokens for r in runs) >= size.shared


@pytest.mark.parametrize("family", FAMILIES)
def test_the_control_fails(family: str) -> None:
    """Red when a backend that reduces in another order for another batch passes the comparison."""
    loaded = tiny.random_model(FAMILIES[family], "f32")
    expected = alone(loaded, on_torch)
    assert any(run(loaded, on_torch, circumstances(trial, ["auto"])).transcripts != expected for trial in range(4))


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_verified_with_the_bits_of_plain_decoding(family: str) -> None:
    """Red when a token verified as a draft is drawn with other logits, noise or penalties than one decoded by itself."""
    loaded = tiny.random_model(FAMILIES[family], "q8")
    params = SamplingParams(temperature=1.0, top_p=0.9, frequency_penalty=0.4, logprobs=2, seed=3)
    known = list(SHARED[:50])

    def sampled(chunks: Sequence[PlanRow]) -> list[RowResult]:
        machine = tiny.Machine(loaded, CpuBackend(threads=2), kv_dtype="bf16", max_len=128)
        machine.take(0, known, params, seed=3)
        runner = Runner(machine.executable, machine.backend, machine.rows)
        results = [runner.wait(runner.launch(StepPlan(step=i, rows=(chunk,)))).rows[0] for i, chunk in enumerate(chunks)]
        runner.close()
        return results

    prefill = PlanRow(row=0, start=0, count=50, tokens=(), samples=1)
    plain = sampled([prefill])
    for _ in range(6):
        decodes = [PlanRow(row=0, start=50 + i, count=1, tokens=r.tokens, samples=1) for i, r in enumerate(plain)]
        plain = sampled([prefill, *decodes])
    drafts = tuple(r.tokens[0] for r in plain[:6])
    verified = sampled([prefill, PlanRow(row=0, start=50, count=6, tokens=drafts, samples=6)])[1]
    wrong = (*drafts[:3], drafts[3] ^ 1, *drafts[4:])
    cut = sampled([prefill, PlanRow(row=0, start=50, count=6, tokens=wrong, samples=6)])[1]
    assert (cut.tokens, cut.logprobs) == (verified.tokens[:3], verified.logprobs[:3])
    assert verified.tokens == tuple(r.tokens[0] for r in plain[1:])
    assert verified.logprobs == tuple(r.logprobs[0] for r in plain[1:])
