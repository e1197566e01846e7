"""noria bench quality: what a weight format and a KV type cost in quality.

Every combination reads the same slices of text; of each position the whole distribution is compared with that of the
reference, the same file in float32 weights and float32 KV:

    perplexity     exp of the mean negative log probability of the text's next token
    KL             sum over the vocabulary of p log(p / q), p the reference's: the mean, and the 99th percentile over positions
    top-1          share of positions where the most likely token is the same
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from noria.bench.flags import (
    add_engine_flags,
    add_result_flags,
    columns,
    described,
    engine_config,
    model_tokenizer,
    tell,
    write_json,
)
from noria.config import EngineConfig
from noria.types import ConfigError, LoadError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from noria.bench.steps import SteppedModel

AS_IS = "as-is"
LOGIT_BYTES = 64 << 20  # of logits that are compared at once


def choices_of(setting: str) -> tuple[str, ...]:
    """The values that a setting of EngineConfig allows: a format or KV type that is added there is measured here."""
    hint = get_type_hints(EngineConfig)[setting]
    parts = (hint,) if get_origin(hint) is Literal else get_args(hint)
    return tuple(str(v) for part in parts if get_origin(part) is Literal for v in get_args(part) if v != "auto")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    weights, kv = (AS_IS, *choices_of("quantization")), choices_of("kv_cache_dtype")
    add_engine_flags(parser)
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--weights", nargs="+", choices=weights, default=weights, metavar="FORMAT", help=f"of {', '.join(weights)} [all]"
    )
    group.add_argument("--kv-types", nargs="+", choices=kv, default=kv, metavar="TYPE", help=f"of {', '.join(kv)} [all]")
    group.add_argument(
        "--text", type=Path, metavar="FILE", help="a text in UTF-8 [the language reference that comes with Python]"
    )
    group.add_argument("--num-slices", type=int, default=4, metavar="N", help="slices of the text [4]")
    group.add_argument("--slice-len", type=int, default=512, metavar="N", help="tokens of a slice [512]")
    add_result_flags(parser, plot=False)


def run(arguments: argparse.Namespace) -> int:
    """Print the table; 1 if a combination could not be measured, which its line says."""
    from noria.bench.text import load_corpus, slices
    from noria.weights.hub import cache_directory, resolve_model

    config = engine_config(arguments)
    if arguments.num_slices < 1 or arguments.slice_len < 2:
        raise ConfigError("--num-slices must be at least 1 and --slice-len at least 2")
    if config.quantization is not None or config.kv_cache_dtype != "auto":
        raise ConfigError("choose what to measure with --weights and --kv-types, not --quantization and --kv-cache-dtype")
    corpus = load_corpus(arguments.text)
    path = resolve_model(config.model, cache_directory(config.cache_dir), config.offline).path
    texts = slices(corpus, model_tokenizer(path, config), arguments.num_slices, arguments.slice_len)
    config = msgspec.structs.replace(config, max_num_seqs=1, max_model_len=arguments.slice_len, enable_prefix_caching=False)
    rows, failed = [], False
    with tempfile.TemporaryFile() as file:
        reference = Reference(config, texts, file)
        for weights in arguments.weights:
            for kv in arguments.kv_types:
                tell(f"{weights} weights, {kv} KV")
                try:
                    rows.append(compare(_variant(config, weights, kv), texts, reference).row(weights, kv))
                except (ConfigError, LoadError) as error:
                    failed = True
                    rows.append({"weights": weights, "kv": kv, "error": str(error)})
    print(f"{config.model}: {len(texts)} slices of {arguments.slice_len} tokens of {corpus.name} ({corpus.sha256[:12]})")
    print(table(rows))
    if arguments.output_json:
        about = {"text": corpus.name, "text_sha256": corpus.sha256, "reference_perplexity": reference.perplexity}
        shape = {"num_slices": len(texts), "slice_len": arguments.slice_len}
        write_json(arguments.output_json, described("quality", config.model) | about | shape | {"rows": rows})
    return int(failed)


def _variant(config: EngineConfig, weights: str, kv: str) -> EngineConfig:
    quantization = None if weights == AS_IS else weights
    return msgspec.structs.replace(config, quantization=quantization, kv_cache_dtype=kv)


# -- distributions -------------------------------------------------------------------------------------------------------


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """[rows, vocab] log probabilities; the sum is taken in float64."""
    import numpy as np

    shifted = logits - logits.max(axis=1, keepdims=True)
    total = np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)
    result: npt.NDArray[np.float32] = shifted - np.log(total).astype(np.float32)
    return result


def log_probabilities(
    config: EngineConfig, texts: Sequence[tuple[int, ...]]
) -> Iterator[tuple[tuple[int, ...], npt.NDArray[np.float32]]]:
    """Chunk by chunk: the tokens that follow, and the log probabilities [tokens, vocab] that the model gives there."""
    from noria.bench.steps import SteppedModel

    stepped = SteppedModel(config)
    try:
        for text in texts:
            stepped.reset()
            stepped.take(0, text)
            yield from _chunks(stepped, text)
    finally:
        stepped.close()


def _chunks(stepped: SteppedModel, text: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], npt.NDArray[np.float32]]]:
    size = max(1, min(stepped.config.max_num_batched_tokens, LOGIT_BYTES // (4 * stepped.vocab_size)))
    for start in range(0, len(text) - 1, size):
        count = min(size, len(text) - 1 - start)
        yield text[start + 1 : start + 1 + count], log_softmax(stepped.logits(0, start, count))


class Reference:
    """The float32 distributions of all positions, in a file: each combination is compared with them."""

    def __init__(self, config: EngineConfig, texts: Sequence[tuple[int, ...]], file: Any) -> None:
        import numpy as np

        tell("the reference: float32 weights and KV")
        self.log_probabilities: npt.NDArray[np.float32] | None = None
        positions, at, nll = sum(len(text) - 1 for text in texts), 0, 0.0
        for targets, scores in log_probabilities(_variant(config, "f32", "f32"), texts):
            if self.log_probabilities is None:
                self.log_probabilities = np.memmap(file, np.float32, "w+", shape=(positions, scores.shape[1]))
            self.log_probabilities[at : at + len(targets)] = scores
            nll -= float(scores[np.arange(len(targets)), list(targets)].sum(dtype=np.float64))
            at += len(targets)
        self.perplexity = math.exp(nll / positions)


@dataclass
class Comparison:
    """One combination beside the reference, position by position."""

    reference_perplexity: float
    nll: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    same_top: int = 0

    def add(self, targets: Sequence[int], p: npt.NDArray[np.float32], q: npt.NDArray[np.float32]) -> None:
        """Log probabilities of the reference (p) and of this (q) at positions before `targets`."""
        import numpy as np

        self.nll += (-q[np.arange(len(targets)), list(targets)]).tolist()
        self.kl += np.einsum("ij,ij->i", np.exp(p), p - q, dtype=np.float64).tolist()
        self.same_top += int((p.argmax(axis=1) == q.argmax(axis=1)).sum())

    def row(self, weights: str, kv: str) -> dict[str, Any]:
        from noria.bench.report import percentile

        perplexity = math.exp(sum(self.nll) / len(self.nll))
        return {
            "weights": weights,
            "kv": kv,
            "perplexity": perplexity,
            "perplexity_ratio": perplexity / self.reference_perplexity,
            "mean_kl": sum(self.kl) / len(self.kl),
            "p99_kl": percentile(self.kl, 99),
            "top1_agreement": self.same_top / len(self.kl),
        }


def compare(config: EngineConfig, texts: Sequence[tuple[int, ...]], reference: Reference) -> Comparison:
    """ConfigError or LoadError where the combination does not exist."""
    assert reference.log_probabilities is not None
    comparison, at = Comparison(reference.perplexity), 0
    for targets, scores in log_probabilities(config, texts):
        comparison.add(targets, reference.log_probabilities[at : at + len(targets)], scores)
        at += len(targets)
    return comparison


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The combinations for people; an error in the place of its figures."""
    lines = [("weights", "KV", "perplexity", "to f32", "mean KL", "p99 KL", "top-1")]
    errors = []
    for row in rows:
        if "error" in row:
            errors.append(f"{row['weights']} weights, {row['kv']} KV: {row['error']}")
            continue
        ratio, top = f"{row['perplexity_ratio'] - 1:+.2%}", f"{row['top1_agreement']:.2%}"
        figures = f"{row['perplexity']:.3f}", ratio, f"{row['mean_kl']:.2e}", f"{row['p99_kl']:.2e}", top
        lines.append((row["weights"], row["kv"], *figures))
    return "\n".join([columns(lines), *errors])
