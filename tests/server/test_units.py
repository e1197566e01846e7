"""Small parts of the server: wire, metrics, timeline, log line, keys, logprob shapes."""

from __future__ import annotations

import json

import msgspec
import pytest

from noria.observe.metrics import Metrics
from noria.observe.timeline import timeline
from noria.server import wire
from noria.server.app import make_app
from noria.server.context import ServerContext
from noria.server.dialect import finite
from noria.server.engine_process import serve as serve_engine
from noria.server.serve import example_request, report_line
from noria.types import EngineRequest, EngineStats, FinishReason, Phase, SamplingParams, SequenceOutput, TokenLogprobs


def test_every_message_survives_the_wire() -> None:
    """Red if a field is lost, or a message decodes as another."""
    params = SamplingParams(seed=2**64 - 1, stop=("a",), logit_bias={5: -1.5}, max_tokens=None)
    request = EngineRequest(request_id=2**52, prompt=(1, 2), params=params, stop_ids=(7,), arrival=1.5)
    for message in (wire.Add(request=request), wire.Abort(request_id=1), wire.Ping(nonce=3), wire.Stop()):
        assert wire.decode_to_engine(wire.encode(message)) == message
    output = SequenceOutput(
        request_id=1,
        index=2,
        tokens=(3,),
        logprobs=(TokenLogprobs(3, -0.5, (3, 4), (-0.5, -1.0)),),
        finish_reason=FinishReason.STOP,
        phases=(1.0,) * len(Phase),
    )
    facts = wire.EngineFacts(model="m", max_model_len=1, vocab_size=2, eos_ids=(1,), fingerprint="f")
    for answer in (
        wire.Stage(text="t"),
        wire.Located(path="p"),
        wire.Ready(version=wire.VERSION, facts=facts, stats=EngineStats()),
        wire.Failed(message="m"),
        wire.Outputs(outputs=(output,), stats=EngineStats(finished={"stop": 1})),
        wire.Refused(request_id=1, message="m", param=None, code="c", status=429, retry_after=2.0),
        wire.Pong(nonce=1, stats=EngineStats()),
    ):
        assert wire.decode_from_engine(wire.encode(answer)) == answer


@pytest.mark.parametrize("data", [b"", b"\x80\x04\x95", b"x" * 100, msgspec.msgpack.encode({"type": "Exec", "code": "1"})])
def test_foreign_bytes_on_the_wire_are_refused(data: bytes) -> None:
    """Red if anything but a known message is accepted: pickles and unknown types raise."""
    for decode in (wire.decode_to_engine, wire.decode_from_engine, wire.decode_launch):
        with pytest.raises(msgspec.DecodeError):
            decode(data)


def test_gauges_follow_the_engine_and_counters_the_answers() -> None:
    """Red if a gauge keeps an old value, or a request is counted under two reasons."""
    stats = EngineStats(running=3, waiting=2, kv_usage=0.5, preemptions=4, prefix_queries=10, prefix_hits=6)
    stats = msgspec.structs.replace(stats, step_tokens=70, iterations=(3, 0, 0, 1, 0, 0, 1))
    current = [stats]
    metrics = Metrics("m", lambda: current[0])
    metrics.prefilled(5, 0.1)
    metrics.generated(3, 0.3)
    metrics.finished(FinishReason.STOP, 1.0, (0.1,) * len(Phase))
    text = metrics.exposition().decode()
    for line in (
        'noria_num_requests_running{model_name="m"} 3.0',
        'noria_num_requests_waiting{model_name="m"} 2.0',
        'noria_kv_cache_usage_perc{model_name="m"} 0.5',
        'noria_num_preemptions_total{model_name="m"} 4.0',
        'noria_prefix_cache_queries_total{model_name="m"} 10.0',
        'noria_prefix_cache_hits_total{model_name="m"} 6.0',
        'noria_iteration_tokens_total_bucket{le="1.0",model_name="m"} 3.0',
        'noria_iteration_tokens_total_bucket{le="8.0",model_name="m"} 4.0',
        'noria_iteration_tokens_total_bucket{le="+Inf",model_name="m"} 5.0',
        'noria_iteration_tokens_total_sum{model_name="m"} 70.0',
        'noria_prompt_tokens_total{model_name="m"} 5.0',
        'noria_generation_tokens_total{model_name="m"} 3.0',
        'noria_request_success_total{finished_reason="stop",model_name="m"} 1.0',
        'noria_request_success_total{finished_reason="abort",model_name="m"} 0.0',
        'noria_inter_token_latency_seconds_count{model_name="m"} 3.0',
        'noria_inter_token_latency_seconds_bucket{le="0.1",model_name="m"} 3.0',
        'noria_request_queue_time_seconds_sum{model_name="m"} 0.1',
    ):
        assert line in text
    current[0] = EngineStats()
    assert 'noria_num_requests_running{model_name="m"} 0.0' in metrics.exposition().decode()


@pytest.mark.parametrize("elapsed", [1.0, 2.5])
def test_timeline_sums_to_the_elapsed_time(elapsed: float) -> None:
    """Red if delivery is not what is left, or a phase has no name."""
    parts = timeline((0.1, 0.0, 0.0, 0.3, 0.4, 0.0, 0.0), elapsed)
    assert sum(parts.values()) == pytest.approx(elapsed)
    assert parts["delivery"] == pytest.approx(elapsed - 0.8)
    assert set(parts) == {phase.name.lower() for phase in Phase}


def test_timeline_of_a_request_without_stamps() -> None:
    """Red if a request that never reached the engine has no timeline."""
    assert timeline((), 1.0)["delivery"] == 1.0


def test_report_line_shows_rates_of_the_interval() -> None:
    """Red if totals are shown instead of rates, or an interval without lookups divides by zero."""
    before = EngineStats(prompt_tokens=100, generated_tokens=50, prefix_queries=100, prefix_hits=50)
    now = EngineStats(
        running=2, waiting=1, kv_usage=0.25, prompt_tokens=1100, generated_tokens=250, prefix_queries=1100, prefix_hits=300
    )
    line = report_line(before, now, 10.0)
    assert line == "running 2, waiting 1, KV 25%, prompt 100 tok/s, output 20 tok/s, prefix hits 25%"
    assert report_line(now, now, 10.0).endswith("prefix hits -")


def test_example_request_has_no_key_in_it() -> None:
    """Red if the secret is printed, or the body is not JSON."""
    line = example_request("http://h:1", "it's", chat=True, key=True)
    assert "$API_KEY" in line
    assert json.loads(line.split(" -d ")[1].replace("'\"'\"'", "'").strip("'"))["model"] == "it's"


def test_logprobs_fit_in_json() -> None:
    """Red if an infinity or NaN leaves the server."""
    assert finite(float("-inf")) == finite(float("nan")) == finite(-1e9) == -9999.0
    assert finite(-0.5) == -0.5


def test_an_app_can_be_made_before_the_engine_is_there() -> None:
    """Red if making the routes needs a loaded model."""
    from noria.config import EngineConfig, ServeConfig

    make_app(ServerContext(EngineConfig(model="m"), ServeConfig()))


class _Script:
    """A channel that hands out prepared messages, and keeps what is sent."""

    def __init__(self, *rounds: list[wire.ToEngine]) -> None:
        self.rounds = list(rounds)
        self.sent: list[wire.FromEngine] = []
        self.waited: list[bool] = []

    def receive(self, *, wait: bool) -> list[wire.ToEngine]:
        self.waited.append(wait)
        return self.rounds.pop(0)

    def send(self, message: wire.FromEngine) -> None:
        self.sent.append(message)


class _LongPrefill:
    """An engine that needs three steps before it says anything."""

    def __init__(self) -> None:
        self.steps = 0
        self.added: list[EngineRequest] = []

    @property
    def has_work(self) -> bool:
        return bool(self.added) and self.steps < 3

    def add(self, request: EngineRequest) -> None:
        self.added.append(request)

    def abort(self, request_id: int, index: int | None = None) -> list[SequenceOutput]:
        return []

    def step(self) -> list[SequenceOutput]:
        self.steps += 1
        return [SequenceOutput(request_id=1, index=0, tokens=(5,))] if self.steps == 3 else []

    def stats(self) -> EngineStats:
        return EngineStats(steps=self.steps, running=int(self.has_work))

    def close(self) -> None:
        pass


def test_engine_loop_tells_gauges_between_outputs_and_blocks_only_without_work() -> None:
    """Red if a long prompt leaves the gauges old, a ping waits for its end, or the loop polls while idle."""
    request = EngineRequest(request_id=1, prompt=(1,), params=SamplingParams(seed=0))
    script = _Script([wire.Add(request=request)], [wire.Ping(nonce=4)], [], [wire.Abort(request_id=9)], [wire.Stop()])
    serve_engine(_LongPrefill(), script)  # type: ignore[arg-type]
    assert script.waited == [True, False, False, True, True]
    steps = [message.stats.steps for message in script.sent if isinstance(message, wire.Outputs)]
    assert steps == [1, 2, 3]
    assert isinstance(script.sent[1], wire.Pong)
    assert [len(m.outputs) for m in script.sent if isinstance(m, wire.Outputs)] == [0, 0, 1]
