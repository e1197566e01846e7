"""Draws as `backends.base.Draws` documents them, in plain numpy, one after the other: what the native sampler is tested with.

The noise of a token is a function of (seed, position, stream, token) alone. Its random bits are Philox4x32-10 (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011): key = (seed low, seed high), counter = (position low, position high,
stream, token // 4); word token % 4 of the output makes u = (word + 0.5) / 2^32 and the noise -log(-log(u)).
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from noria.backends.base import Drawn, Draws, Masks

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
UInt64 = npt.NDArray[np.uint64]

LOWEST_LOGPROB = np.float32(-1e9)

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NAP_S = 20e-6  # between two looks at whether the masks are filled
_LOW = np.uint64(0xFFFFFFFF)


def philox(counter: tuple[UInt64, UInt64, UInt64, UInt64], key: tuple[int, int]) -> tuple[UInt64, ...]:
    """Ten rounds over arrays of counters. All words are 32-bit numbers held in uint64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, low0, high1, low1 = p0 >> np.uint64(32), p0 & _LOW, p1 >> np.uint64(32), p1 & _LOW
        c0, c1, c2, c3 = high1 ^ c1 ^ np.uint64(k0), low1, high0 ^ c3 ^ np.uint64(k1), low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & 0xFFFFFFFF, (k1 + _KEY_STEPS[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def gumbel(seed: int, position: int, stream: int, vocab_size: int) -> Float64:
    """The noise of every token [vocab_size] at one place of one stream."""
    quads = np.arange(-(-vocab_size // 4), dtype=np.uint64)
    same = np.zeros_like(quads)
    counter = (
        same + np.uint64(position & 0xFFFFFFFF),
        same + np.uint64(position >> 32),
        same + np.uint64(stream),
        quads,
    )
    words = np.stack(philox(counter, (seed & 0xFFFFFFFF, seed >> 32)), axis=1).reshape(-1)[:vocab_size]
    uniform = (words.astype(np.float64) + 0.5) * 2.0**-32
    noise: Float64 = -np.log(-np.log(uniform))
    return noise


def draw(logits: Float32, draws: Draws) -> Drawn:
    """All draws of a step from its logits [L, vocab]."""
    count = len(draws)
    widest = int(max(draws.num_top.max(initial=0), 0))
    drawn = Drawn(
        token=np.zeros(count, np.int32),
        logprob=np.zeros(count, np.float32),
        top_tokens=np.full((count, widest), -1, np.int32),
        top_logprobs=np.zeros((count, widest), np.float32),
    )
    for d in range(count):
        row = logits[draws.logit_row[d]]
        target = int(draws.target[d])
        token = target if target >= 0 else _choose(_adjusted(row, draws, d), draws, d)
        drawn.token[d] = token
        top = int(draws.num_top[d])
        if top < 0:
            continue
        logprobs = _log_softmax(row)
        drawn.logprob[d] = logprobs[token]
        order = _most_likely_first(row)[:top]
        drawn.top_tokens[d, : len(order)] = order
        drawn.top_logprobs[d, : len(order)] = logprobs[order]
    return drawn


def _log_softmax(row: Float32) -> Float32:
    shifted = row.astype(np.float64) - float(row.max())
    result = shifted - np.log(np.exp(shifted).sum())
    logprobs: Float32 = np.maximum(result.astype(np.float32), LOWEST_LOGPROB)
    return logprobs


def _most_likely_first(values: Float32 | Float64) -> npt.NDArray[np.intp]:
    """Indices by falling value; equal values by rising index."""
    return np.argsort(-values, kind="stable")


def _adjusted(row: Float32, draws: Draws, d: int) -> Float32:
    """A copy of the row after penalties, bias, bans and mask."""
    row = row.copy()
    seen = slice(draws.history_offsets[d], draws.history_offsets[d + 1])
    tokens, counts = draws.history_tokens[seen], draws.history_counts[seen]
    if draws.repetition[d] != 1.0:
        values = row[tokens]
        row[tokens] = np.where(values > 0, values / draws.repetition[d], values * draws.repetition[d])
    row[tokens] -= np.where(counts > 0, draws.presence[d], np.float32(0))
    row[tokens] -= draws.frequency[d] * counts.astype(np.float32)
    biased = slice(draws.bias_offsets[d], draws.bias_offsets[d + 1])
    row[draws.bias_tokens[biased]] += draws.bias_values[biased]
    row[draws.ban_tokens[draws.ban_offsets[d] : draws.ban_offsets[d + 1]]] = -np.inf
    if draws.masks is not None and draws.masks.index[d] >= 0:
        row[~_allowed(draws.masks, d, len(row))] = -np.inf
    return row


def _allowed(masks: Masks, d: int, vocab_size: int) -> npt.NDArray[np.bool_]:
    """[vocab_size] whether the mask of a draw lets each token pass, as soon as that is known."""
    while not masks.ready[0]:
        time.sleep(_NAP_S)
    words = masks.words[masks.index[d]].astype("<u4", copy=False)
    return np.unpackbits(words.view(np.uint8), count=vocab_size, bitorder="little").astype(bool)


def _choose(row: Float32, draws: Draws, d: int) -> int:
    temperature = float(draws.temperature[d])
    if temperature == 0.0:
        return int(np.argmax(row))
    scaled = row.astype(np.float64) / temperature
    order = _most_likely_first(scaled)
    if draws.top_k[d] > 0:
        order = order[: draws.top_k[d]]
    probabilities = np.exp(scaled[order] - scaled[order[0]])
    probabilities /= probabilities.sum()
    if draws.top_p[d] < 1.0:
        before = np.cumsum(probabilities) - probabilities  # what the more likely tokens hold already
        keep = max(int((before < draws.top_p[d]).sum()), 1)
        order, probabilities = order[:keep], probabilities[:keep]
    order = order[probabilities >= draws.min_p[d] * probabilities[0]]
    kept = np.sort(order)
    noise = gumbel(int(draws.seed[d]), int(draws.position[d]), int(draws.stream[d]), len(row))
    return int(kept[np.argmax(scaled[kept] + noise[kept])])
