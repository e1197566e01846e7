"""Parsing and ranges. Red if a wrong value reaches the engine, a constraint is ignored, or a fault does not name its field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from noria.server.requests import ChatBody, CompletionBody, parse_body, prompts_of, sampling_params
from noria.server.validate import check_params, check_room
from noria.types import RequestError

VOCAB = 1000


def checked(kind: type[CompletionBody] | type[ChatBody], **fields: Any) -> Any:
    """Parse, and check what has a range, as the server does."""
    body, _ = parse_body(msgspec.json.encode({"model": "m", **fields}), kind)
    if isinstance(body, CompletionBody):
        prompts_of(body)
    check_params(sampling_params(body, {}, logprobs=None, max_tokens=body.token_limit()), VOCAB)
    return body


def completion(**fields: Any) -> Any:
    return checked(CompletionBody, **{"prompt": "x", **fields})


def chat(**fields: Any) -> Any:
    return checked(ChatBody, **{"messages": [{"role": "user", "content": "x"}], **fields})


WRONG: list[tuple[str, Any]] = [
    *[("n", value) for value in (0, -1, 129, 3_000_000, 2**63, 2**200, 1.5, "2", True, [1])],
    *[("temperature", value) for value in (-0.1, 2.1, "hot", True, [1], 10**400)],
    *[("top_p", value) for value in (-0.1, 1.1, "x", [1])],
    *[("min_p", value) for value in (-0.1, 2)],
    *[("top_k", value) for value in (-2, -5, 1.5, "all")],
    *[("presence_penalty", value) for value in (-2.1, 9)],
    *[("frequency_penalty", value) for value in (-2.1, 2.5)],
    *[("repetition_penalty", value) for value in (0, -1, 1000)],
    *[("max_tokens", value) for value in (-1, "many", 1.5, True)],
    *[("max_completion_tokens", value) for value in (-1, "many")],
    *[("min_tokens", value) for value in (-1, 17, True)],
    *[("seed", value) for value in (2**64, -(2**63) - 1, "s", 1.5, True)],
    *[("stop", value) for value in ([""], "", ["a"] * 33, ["x" * 2000], 5, [1], {"a": 1})],
    *[("stop_token_ids", value) for value in ([VOCAB], [-1], ["1"], [True], 5)],
    *[
        ("logit_bias", v)
        for v in ({"1000": 1}, {"-1": 1}, {"abc": 1}, {"5": 101}, {"5": -101}, {"5": "x"}, [1], {str(2**40): 1})
    ],
    *[("prompt_logprobs", value) for value in (-1, 21, True)],
    *[("stream", value) for value in ("yes", 1)],
    *[("cache_salt", value) for value in (5, ["s"], {"a": 1}, "s" * 5000)],
    *[("priority", value) for value in (-(10**18), 2**31, "high", 1.5)],
    *[("request_id", value) for value in ("r" * 300, 5)],
    *[("truncate_prompt_tokens", value) for value in (-2, "x")],
    *[("ignore_eos", value) for value in (1, "true")],
    *[("stream_options", value) for value in (5, {"include_usage": 1})],
]


@pytest.mark.parametrize("make", [completion, chat])
@pytest.mark.parametrize(("name", "value"), WRONG)
def test_wrong_values_name_their_field(make: Any, name: str, value: Any) -> None:
    """Red if one is accepted, or the client is not told which field it is."""
    fields = {"max_tokens": 16, name: value} if name == "min_tokens" else {name: value}
    with pytest.raises(RequestError) as told:
        make(**fields)
    assert told.value.status == 400
    assert told.value.param == ("max_tokens" if name == "max_completion_tokens" and value == -1 else name)
    assert len(str(told.value)) < 300


RIGHT: list[tuple[str, Any]] = [
    *[("n", value) for value in (1, 128, None)],
    *[("temperature", value) for value in (0, 2, 1, 0.5, None)],
    *[("top_p", value) for value in (0, 1)],
    *[("top_k", value) for value in (-1, 0, 5, 9_999_999)],
    *[("repetition_penalty", value) for value in (0.5, 1, 100)],
    *[("max_tokens", value) for value in (0, 1, 10**9, None)],
    *[("seed", value) for value in (-(2**63), 0, 2**64 - 1)],
    *[("stop", value) for value in ("a", [], ["a"] * 32, None)],
    *[("logit_bias", value) for value in ({}, {"999": 100, "0": -100}, None)],
    *[("stream_options", value) for value in ({}, {"include_usage": True, "include_obfuscation": False})],
    *[("truncate_prompt_tokens", value) for value in (-1, 5)],
    ("cache_salt", ""),
]


@pytest.mark.parametrize("make", [completion, chat])
@pytest.mark.parametrize(("name", "value"), RIGHT)
def test_values_at_the_edges_are_accepted(make: Any, name: str, value: Any) -> None:
    """Red if a bound is off by one, or null is not the same as absent."""
    make(**{name: value})


REFUSED: list[tuple[str, Any]] = [
    *[(name, {"a": 1}) for name in ("structured_outputs", "grammar", "guided_anything_new")],
    *[(name, "x") for name in ("structural_tag", "ebnf", "chat_template", "suffix", "lora_path")],
    *[("response_format", value) for value in ({"type": "json_schema"}, "text", {})],
    ("functions", [{"name": "f"}]),
    ("audio", {"voice": "x"}),
    ("modalities", ["text", "audio"]),
    ("prediction", {"type": "content"}),  # completions have none; a chat's needs its content
    ("logits_processors", ["x"]),
    ("bad_words", ["x"]),
    ("service_tier", "flex"),
    ("kv_transfer_params", {"remote_host": "127.0.0.1"}),
    ("kv_transfer_params", "x"),
    *[(name, 1) for name in ("bootstrap_room", "bootstrap_port", "data_parallel_rank", "remote_port", "do_remote_prefill")],
    ("bootstrap_host", "2.2.2.2"),
    ("session_params", {"id": "x"}),
    *[("best_of", value) for value in (2, 10**6, "1", True)],
]


@pytest.mark.parametrize("value", ["auto", "required", {"type": "function"}])
def test_completions_have_no_tools(value: Any) -> None:
    """Red if a field that chat has is passed over here."""
    for name, given in (("tools", [{"type": "function"}]), ("tool_choice", value)):
        with pytest.raises(RequestError) as told:
            completion(**{name: given})
        assert told.value.param == name


@pytest.mark.parametrize("make", [completion, chat])
@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_what_would_silently_not_happen_is_refused(make: Any, name: str, value: Any) -> None:
    """Red if a constraint, a hand-over record or a feature that is not there is ignored."""
    with pytest.raises(RequestError) as told:
        make(**{name: value})
    assert told.value.param == name
    assert told.value.status == 400


@pytest.mark.parametrize(
    ("name", "value"), [("tools", [{"type": "function"}]), *[("tool_choice", value) for value in ("auto", "required", {})]]
)
def test_tools_belong_to_chat(name: str, value: Any) -> None:
    """Red if a completions request that asks for tool calls is answered without any."""
    with pytest.raises(RequestError) as told:
        completion(**{name: value})
    assert told.value.param == name


@pytest.mark.parametrize(
    ("name", "value", "hint"), [("functions", [{"name": "f"}], "tools"), ("function_call", {}, "tool_choice")]
)
def test_the_older_names_of_tools_are_refused_with_the_newer_ones(name: str, value: Any, hint: str) -> None:
    """Red if a client of the older interface is not told what to change."""
    with pytest.raises(RequestError, match=f"send {hint} instead"):
        chat(**{name: value})


ASKS_NOTHING: list[tuple[str, Any]] = [
    ("response_format", {"type": "text"}),
    ("tools", []),
    ("tool_choice", "none"),
    ("suffix", ""),
    ("best_of", 1),
    ("use_beam_search", False),
    ("service_tier", "auto"),
    ("service_tier", "default"),
    ("guided_json", None),
    ("kv_transfer_params", None),
    ("modalities", ["text"]),
    ("user", "u"),
    ("metadata", {"a": "b"}),
    ("store", True),
    ("parallel_tool_calls", False),
    ("verbosity", "low"),
    ("prompt_cache_key", "k"),
    ("safety_identifier", "s"),
]


@pytest.mark.parametrize("make", [completion, chat])
@pytest.mark.parametrize(("name", "value"), ASKS_NOTHING)
def test_fields_at_their_defaults_ask_for_nothing(make: Any, name: str, value: Any) -> None:
    """Red if a client that spells out a default is refused."""
    make(**{name: value})


def test_tools_may_be_sent_along_when_none_is_to_be_called() -> None:
    """Red if tool_choice "none" with tools is refused, or tools without it pass."""
    chat(tools=[{"type": "function"}], tool_choice="none")


def test_best_of_equal_to_n() -> None:
    """Red if best_of is compared with a constant."""
    completion(n=3, best_of=3)
    with pytest.raises(RequestError):
        completion(n=3, best_of=2)


@pytest.mark.parametrize(("logprobs", "fine"), [(0, True), (5, True), (6, False), (-1, False), (10**6, False), (True, False)])
def test_completion_logprobs_bounds(logprobs: Any, fine: bool) -> None:
    """Red if the legacy bound of 5 moves."""
    if fine:
        completion(logprobs=logprobs)
    else:
        with pytest.raises(RequestError) as told:
            completion(logprobs=logprobs)
        assert told.value.param == "logprobs"


@pytest.mark.parametrize(("top", "fine"), [(0, True), (20, True), (21, False), (2 * 10**9, False), ("5", False)])
def test_chat_top_logprobs_bounds(top: Any, fine: bool) -> None:
    """Red if the bound of 20 moves."""
    if fine:
        chat(logprobs=True, top_logprobs=top)
    else:
        with pytest.raises(RequestError) as told:
            chat(logprobs=True, top_logprobs=top)
        assert told.value.param == "top_logprobs"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [(1, 2)]),
        ([[1], [2, 3]], [(1,), (2, 3)]),
    ],
)
def test_the_four_forms_of_a_prompt(prompt: Any, prompts: Any) -> None:
    """Red if a form is read as another."""
    body, _ = parse_body(msgspec.json.encode({"model": "m", "prompt": prompt}), CompletionBody)
    assert prompts_of(body) == prompts


@pytest.mark.parametrize(
    "prompt", [[], [[]], [["a"]], ["a", 1], [1, "a"], [1.5], [True], [[1], []], [[True]], {"a": 1}, 5, ["a"] * 3000]
)
def test_no_other_form_of_a_prompt(prompt: Any) -> None:
    """Red if booleans pass as ids, mixtures are guessed at, or a batch has no bound."""
    with pytest.raises(RequestError) as told:
        completion(prompt=prompt)
    assert told.value.param == "prompt"


def test_choices_of_a_batch_are_bounded_together() -> None:
    """Red if prompts times n has no limit."""
    with pytest.raises(RequestError) as told:
        completion(prompt=["a"] * 100, n=100)
    assert told.value.param == "n"


@pytest.mark.parametrize("depth", [70, 900, 100_000])
def test_nesting_is_bounded(depth: int) -> None:
    """Red if a nested body reaches the template (and Python's stack), or ends the process."""
    deep = b"[" * depth + b"]" * depth
    with pytest.raises(RequestError):
        parse_body(
            b'{"model":"m","messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"a":' + deep + b"}}", ChatBody
        )


@pytest.mark.parametrize(
    "data", [b'{"a":NaN}', b'{"a":Infinity}', b'{"temperature":1e400}', b'{"a":"\xff"}', b"null", b"[]", b"1"]
)
def test_strict_json(data: bytes) -> None:
    """Red if what is not JSON, or no object, is parsed."""
    with pytest.raises(RequestError):
        parse_body(data, CompletionBody)


def test_unknown_fields_are_returned_for_counting() -> None:
    """Red if they are lost, or a known one is among them."""
    _, unknown = parse_body(b'{"model":"m","prompt":"x","new":1,"n":1,"user":"u","null_one":null}', CompletionBody)
    assert unknown == ["new"]


def test_server_defaults_fill_only_what_is_absent() -> None:
    """Red if --generation-config model overrides a client."""
    body, _ = parse_body(b'{"model":"m","prompt":"x","temperature":0.5}', CompletionBody)
    params = sampling_params(body, {"temperature": 0.9, "top_k": 40}, logprobs=None, max_tokens=16)
    assert (params.temperature, params.top_k, params.top_p) == (0.5, 40, 1.0)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "fits"),
    [(10, 6, True), (10, 7, False), (15, None, True), (16, None, False), (16, 0, True), (17, 0, False)],
)
def test_room_in_the_context(prompt: int, max_tokens: int | None, fits: bool) -> None:
    """Red if prompt and output may be one token longer than the context, or one less."""
    if fits:
        check_room(prompt, max_tokens, 16)
    else:
        with pytest.raises(RequestError) as told:
            check_room(prompt, max_tokens, 16)
        assert told.value.code == "context_length_exceeded"
        assert "16" in str(told.value)
