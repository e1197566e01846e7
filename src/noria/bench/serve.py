"""noria bench serve: load at a rate of arrivals, on a server that runs, on one of our own, or on an engine process alone."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noria.bench.beside import Beside, parse_beside
from noria.bench.flags import (
    Stages,
    add_engine_flags,
    add_result_flags,
    add_workload_flags,
    described,
    engine_config,
    ignores_eos,
    model_tokenizer,
    progress_bar,
    sessions_of,
    tell,
    write_json,
)
from noria.bench.report import METRICS, Figures, parse_goodput
from noria.bench.workload import AT_ONCE, MakePrompt, Session
from noria.config import EngineConfig
from noria.types import ConfigError, NoriaError

if TYPE_CHECKING:
    from noria.bench.client import Target
    from noria.bench.http import HttpClient
    from noria.bench.report import RequestTimes

Measured = tuple[list["RequestTimes"], float]
SHOWN_ERRORS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_flags(parser)
    group = parser.add_argument_group("server")
    group.add_argument(
        "--base-url", metavar="URL", help="an OpenAI-compatible server; without it, MODEL in a process of our own"
    )
    group.add_argument(
        "--http", action="store_true", help="MODEL behind a server of our own, whose processes are measured too (Linux)"
    )
    group.add_argument(
        "--model", dest="model_name", metavar="NAME", help="of --base-url: the model to ask for [the first it lists]"
    )
    group.add_argument(
        "--endpoint",
        choices=("/v1/completions", "/v1/chat/completions"),
        default="/v1/completions",
        help="of --base-url and --http [/v1/completions]",
    )
    group.add_argument("--api-key", metavar="KEY", help="of --base-url: bearer token")
    group.add_argument(
        "--tokenizer", metavar="MODEL", help="of --base-url: a model here whose tokenizer counts the tokens of sharegpt's texts"
    )
    group.add_argument(
        "--vocab-size",
        type=int,
        default=32000,
        metavar="N",
        help="of --base-url and --http: prompt ids are drawn below [32000]",
    )
    load = parser.add_argument_group("load")
    load.add_argument("--request-rate", type=float, default=AT_ONCE, metavar="R", help="arrivals a second [inf: all at once]")
    load.add_argument(
        "--burstiness", type=float, default=1.0, metavar="B", help="gamma shape of the gaps: 1 Poisson, below 1 burstier [1]"
    )
    load.add_argument("--max-concurrency", type=int, metavar="N", help="most requests open at once")
    load.add_argument(
        "--beside",
        action="append",
        default=[],
        metavar="KIND:N",
        help="of --base-url and --http: N unmeasured requests at once beside the load, of KIND plain, grammar or flood",
    )
    load.add_argument("--flood-len", type=int, default=4000, metavar="N", help="prompt tokens of --beside flood [4000]")
    add_workload_flags(parser, num_prompts=64, input_len=288, output_len=144)
    add_result_flags(parser)
    results = parser.add_argument_group("figures")
    results.add_argument("--goodput", nargs="+", default=(), metavar="NAME:MS", help="objectives: ttft:500 tpot:50 e2el:9000")
    results.add_argument(
        "--percentile-metrics", default=",".join(METRICS), metavar="NAMES", help="of ttft, tpot, itl, e2el [all]"
    )
    results.add_argument("--metric-percentiles", default="90,99", metavar="LIST", help="percentiles to report [90,99]")
    results.add_argument("--save-result", action="store_true", help="write the figures to a file in --result-dir")
    results.add_argument("--save-detailed", action="store_true", help="the same, with every request's times")
    results.add_argument("--result-dir", type=Path, default=Path("."), metavar="DIR", help="where [.]")
    results.add_argument("--result-filename", metavar="FILE", help="under which name [by rate, model and date]")


def run(arguments: argparse.Namespace) -> int:
    """0 if every request was answered, else 1."""
    import uvloop

    from noria.bench.plot import plot_latencies
    from noria.bench.report import series, summary, table

    objectives, metrics = parse_goodput(arguments.goodput), _metrics(arguments.percentile_metrics)
    percentiles = _percentiles(arguments.metric_percentiles)
    if arguments.max_concurrency is not None and arguments.max_concurrency < 1:
        raise ConfigError("--max-concurrency must be at least 1")
    beside = parse_beside(arguments.beside)
    if arguments.base_url is None:
        _refuse_url_flags(arguments)
    elif arguments.http or arguments.model is not None:
        hint = "leave out --http" if arguments.http else "name the model to ask for with --model"
        raise ConfigError(f"{'--http' if arguments.http else arguments.model}: with --base-url, {hint}")
    if arguments.http:
        name, (times, seconds), uses = _against_server(arguments, beside)
    else:
        uses = {}
        url = arguments.base_url
        name, (times, seconds) = uvloop.run(_against_http(arguments, url, beside) if url else _against_engine(arguments))
    for error in sorted({t.error for t in times if t.error})[:SHOWN_ERRORS]:
        tell(f"failed: {error}")
    figures = summary(times, seconds, objectives=objectives, metrics=metrics, percentiles=percentiles)
    figures |= uses
    print(table(figures))
    if arguments.plot:
        plot_latencies({m: v for m, v in series(times).items() if m in metrics}, arguments.plot, name)
    _save(arguments, name, figures, times)
    return 0 if figures["failed"] == 0 else 1


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise ConfigError(f"--percentile-metrics: {', '.join(unknown)} is not among {', '.join(METRICS)}")
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = (-1.0,)
    if not all(0 <= value <= 100 for value in values):
        raise ConfigError(f"--metric-percentiles {text}: write numbers from 0 to 100, with commas between them")
    return values


def _refuse_url_flags(arguments: argparse.Namespace) -> None:
    given = {"--model": arguments.model_name, "--api-key": arguments.api_key, "--tokenizer": arguments.tokenizer}
    for flag, value in given.items():
        if value is not None:
            hint = "; name the model to load without a flag" if flag == "--model" else ""
            raise ConfigError(f"{flag} is for a server: give its --base-url{hint}")
    if arguments.http:
        return
    if arguments.endpoint != "/v1/completions":
        raise ConfigError("--endpoint is for a server: give its --base-url, or --http")
    if arguments.beside:
        raise ConfigError("--beside is for a server: give its --base-url, or --http")


def _against_server(arguments: argparse.Namespace, beside: Beside) -> tuple[str, Measured, Figures]:
    """A server of our own, and what its processes used during the load."""
    import uvloop

    from noria.bench.processes import check_supported, server_use, shares
    from noria.bench.server_child import ServerChild

    check_supported()
    config = engine_config(arguments)
    with ServerChild(config, on_stage=Stages()) as server:
        before = server_use(server.pid)
        name, measured = uvloop.run(_against_http(arguments, server.url, beside))
        return name, measured, shares(before, server_use(server.pid), measured[1])


async def _against_http(arguments: argparse.Namespace, url: str, beside: Beside) -> tuple[str, Measured]:
    from noria.bench.beside import running_beside
    from noria.bench.client import CHAT, ServerTarget
    from noria.bench.http import HttpClient
    from noria.bench.workload import random_ids, random_words

    chat = arguments.endpoint == CHAT
    if arguments.dataset_name == "multi-turn" and not chat:
        raise ConfigError("multi-turn needs the answers' texts: use --endpoint /v1/chat/completions")
    make: MakePrompt = random_words if chat else random_ids(arguments.vocab_size)
    sessions = sessions_of(arguments, make, lambda: _tokenizer_of(arguments.tokenizer), as_ids=False)
    client = HttpClient(url, arguments.api_key)
    try:
        name = arguments.model_name or await _first_model(client)
        target = ServerTarget(client, model=name, endpoint=arguments.endpoint, ignore_eos=ignores_eos(arguments))
        ids = random_ids(arguments.vocab_size)
        async with running_beside(client, name, beside, lambda rng: ids(rng, arguments.flood_len)):
            return name, await _measure(target, sessions, arguments)
    finally:
        client.close()


async def _first_model(client: HttpClient) -> str:
    import orjson

    answer = await client.get("/v1/models")
    try:
        return str(orjson.loads(answer)["data"][0]["id"])
    except (orjson.JSONDecodeError, LookupError, TypeError):
        raise NoriaError("/v1/models lists no model: say which one to ask for with --model") from None


def _tokenizer_of(model: str | None) -> Any:
    from noria.weights.hub import cache_directory, resolve_model

    if model is None:
        return None
    return model_tokenizer(resolve_model(model, cache_directory(), offline=True).path, EngineConfig(model=model))


async def _against_engine(arguments: argparse.Namespace) -> tuple[str, Measured]:
    """The engine in a child process, driven through the channel that the HTTP server uses."""
    from noria.bench.client import EngineTarget
    from noria.bench.workload import random_ids
    from noria.server.client import EngineClient
    from noria.server.launch import EngineProcess

    config = engine_config(arguments)
    client = EngineClient(EngineProcess(config), on_stage=Stages())
    try:
        facts = await client.start()
        path = Path(await client.located)
        make = random_ids(facts.vocab_size)
        sessions = sessions_of(arguments, make, lambda: model_tokenizer(path, config), as_ids=True)
        target = EngineTarget(client, facts, ignore_eos=ignores_eos(arguments))
        return facts.model, await _measure(target, sessions, arguments)
    finally:
        client.close()


async def _measure(target: Target, sessions: Sequence[Session], arguments: argparse.Namespace) -> Measured:
    """One short request to see that it works at all, then the load."""
    from noria.bench.client import drive
    from noria.bench.workload import Turn

    first = sessions[0].turns[0]
    trial, _ = await drive(target, [Session((Turn(first.prompt[:32], 4),))], open_loop=False)
    if trial[0].error is not None:
        raise NoriaError(f"the first request failed: {trial[0].error}")
    with progress_bar(sum(len(s.turns) for s in sessions)) as progress:
        return await drive(
            target,
            sessions,
            open_loop=arguments.request_rate != AT_ONCE,
            max_concurrency=arguments.max_concurrency,
            progress=progress,
        )


def _save(arguments: argparse.Namespace, name: str, figures: Figures, times: Sequence[RequestTimes]) -> None:
    # JSON has no infinity: an infinite rate is written as "inf", as vLLM does.
    rate = arguments.request_rate if arguments.request_rate != AT_ONCE else "inf"
    result = described("serve", name) | {
        "dataset_name": arguments.dataset_name,
        "num_prompts": arguments.num_prompts,
        "request_rate": rate,
        "burstiness": arguments.burstiness,
        "max_concurrency": arguments.max_concurrency,
        "beside": arguments.beside,
        **figures,
    }
    if arguments.save_detailed:
        good = [t for t in times if t.good]
        result |= {
            "input_lens": [t.input_tokens for t in good],
            "output_lens": [t.output_tokens for t in good],
            "ttfts": [t.ttft for t in good],
            "itls": [t.gaps for t in good],
            "start_times": [t.scheduled - times[0].scheduled for t in good],
            "errors": [t.error or "" for t in times],
        }
    if arguments.output_json:
        write_json(arguments.output_json, result)
    if arguments.save_result or arguments.save_detailed:
        default = f"noria-{rate}qps-{name.replace('/', '--')}-{result['date']}.json"
        write_json(arguments.result_dir / (arguments.result_filename or default), result)
