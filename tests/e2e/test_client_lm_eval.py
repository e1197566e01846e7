"""lm-eval measures a server through `local-completions`: its log likelihoods are the float32 reference's."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import RunningServer

from noria import LLM, SamplingParams

pytestmark = pytest.mark.slow

FLAGS = {"quantization": "f32", "kv_cache_dtype": "f32", "kv_cache_memory_bytes": 32 << 20, "max_model_len": 512}
QUESTIONS = [
    {"question": "The sky is", "choices": [" blue.", " green.", " a large wooden table."], "answer": 0},
    {"question": "Two and two are", "choices": [" four", " 5", " héllo 漢字"], "answer": 0},
    {"question": "A longer question, so that its prompt crosses a block of the cache:", "choices": [" a", " b"], "answer": 1},
]


@pytest.fixture(scope="module")
def lm_eval(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The package, offline, with its caches in a folder of this run."""
    with pytest.MonkeyPatch.context() as patch:
        home = str(tmp_path_factory.mktemp("hf"))
        for name, value in {"HF_HOME": home, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TQDM_DISABLE": "1"}.items():
            patch.setenv(name, value)
        yield pytest.importorskip("lm_eval", reason="lm-eval is in the test extra")


@pytest.fixture(scope="module")
def served(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    flags = [text for name, value in FLAGS.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    with RunningServer.real(str(tiny_folder), *flags, log=tmp_path_factory.mktemp("log") / "server.log") as running:
        yield running


def task(folder: Path, name: str, **fields: Any) -> dict[str, Any]:
    """A task over QUESTIONS that lm-eval loads from a local file."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(question, ensure_ascii=False) + "\n" for question in QUESTIONS))
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "target_delimiter": "",
        **fields,
    }


def evaluate(lm_eval: Any, server: RunningServer, tokenizer: Path, tasks: Sequence[dict[str, Any]]) -> Any:
    arguments = {
        "model": server.model,
        "base_url": f"{server.url}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": str(tokenizer),
        "num_concurrent": 2,
        "max_length": 256,
    }
    return lm_eval.simple_evaluate(
        "local-completions", model_args=arguments, tasks=list(tasks), batch_size=2, verbosity="ERROR"
    )


def test_log_likelihoods_are_the_references(lm_eval: Any, served: RunningServer, tiny_folder: Path, tmp_path: Path) -> None:
    """Red when echo shifts by a token, a prompt token is scored from another position, or kernels leave the reference."""
    choice = task(
        tmp_path, "noria_choice", output_type="multiple_choice", doc_to_choice="{{choices}}", doc_to_target="{{answer}}"
    )
    text = task(
        tmp_path,
        "noria_text",
        output_type="generate_until",
        doc_to_target="x",
        generation_kwargs={"until": ["\n"], "max_gen_toks": 8},
        metric_list=[{"metric": "bypass", "aggregation": "bypass", "higher_is_better": True}],
    )
    found = evaluate(lm_eval, served, tiny_folder, [choice, text])
    settings: dict[str, Any] = {**FLAGS, "backend": "torch"}
    with LLM(str(tiny_folder), **settings) as reference:
        for sample in found["samples"]["noria_choice"]:
            likelihoods = [float(response[0][0]) for response in sample["resps"]]
            greedy = [str(response[0][1]) == "True" for response in sample["resps"]]
            expected = [_likelihood(reference, sample["doc"]["question"], ending) for ending in sample["doc"]["choices"]]
            assert likelihoods == pytest.approx([value for value, _ in expected], abs=1e-4)
            assert greedy == [is_greedy for _, is_greedy in expected]
        greedy_params = SamplingParams(temperature=0.0, max_tokens=8, stop=("\n",))
        for sample in found["samples"]["noria_text"]:
            (output,) = reference.generate(sample["doc"]["question"], greedy_params, use_tqdm=False)
            assert sample["resps"] == [[output.outputs[0].text]]
    assert 0 <= found["results"]["noria_choice"]["acc,none"] <= 1
    assert served.idle()


def _likelihood(reference: LLM, prompt: str, ending: str) -> tuple[float, bool]:
    """(log likelihood of `ending` behind `prompt`, whether each of its tokens is the most likely one), by the reference."""
    ids = list((prompt + ending).encode())  # the tokenizer's ids are bytes
    (scored,) = reference.generate([ids], SamplingParams(max_tokens=0, prompt_logprobs=1), use_tqdm=False)
    assert scored.prompt_logprobs is not None
    places = range(len(prompt.encode()), len(ids))
    entries = [scored.prompt_logprobs[place] or {} for place in places]
    total = math.fsum(entry[ids[place]].logprob for place, entry in zip(places, entries, strict=True))
    return total, all(entry[ids[place]].rank == 1 for place, entry in zip(places, entries, strict=True))
