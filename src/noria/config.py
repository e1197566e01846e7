"""One frozen tree of settings. Command-line flags, `--config FILE`, the docs and `noria doctor` are derived from it.

A field is a setting: its name is the flag (`max_model_len` is `--max-model-len`), its `Meta.description` the help text, its
default what a user gets who says nothing. Names follow vLLM where the idea is the same.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

DraftMethod = Literal["ngram", "suffix", "draft_model"]


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How drafts are made, as vLLM's JSON: {"method": "ngram", "num_speculative_tokens": 8}. Several methods are a list."""

    method: DraftMethod | Annotated[tuple[DraftMethod, ...], Meta(min_length=1)]
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=64)] = 8  # the most of one sequence in a step
    suffix_decoding_max_cached_requests: Annotated[int, Meta(ge=0)] = 10_000  # outputs that the method suffix remembers
    model: str | None = None  # of the method draft_model: what --model takes

    def __post_init__(self) -> None:
        if ("draft_model" in self.methods) != (self.model is not None):
            raise ValueError('the method "draft_model" needs a "model" of the same vocabulary, and no other method has one')

    @property
    def methods(self) -> tuple[DraftMethod, ...]:
        """All methods that are asked for."""
        return (self.method,) if isinstance(self.method, str) else self.method


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one engine."""

    model: Annotated[str, Meta(description="catalogue name, hf:ORG/NAME, a .gguf file, or a folder with config.json")]
    quantization: Annotated[
        Literal["q4", "q8", "bf16", "f32"] | None,
        Meta(description="re-quantise a float checkpoint at load (default: as the file is; f32 and f16 files become bf16)"),
    ] = None
    max_model_len: Annotated[int, Meta(ge=1, description="longest prompt + output; default: the model's context")] | None = None
    max_num_seqs: Annotated[int, Meta(ge=1, le=4096, description="most sequences that run at once")] = 64
    max_num_batched_tokens: Annotated[int, Meta(ge=16, le=65536, description="token budget of a step")] = 512
    long_prefill_token_threshold: Annotated[
        int, Meta(ge=0, description="cap on the tokens of one prompt in a step; 0: the whole budget")
    ] = 0
    itl_target_ms: Annotated[
        int,
        Meta(
            ge=0, le=60_000, description="most milliseconds of a step beside decodes; prefill gets what is left; 0: no target"
        ),
    ] = 100
    scheduling_policy: Annotated[
        Literal["fcfs", "priority", "fair"], Meta(description="order of admission; fair: between the tenants of API keys")
    ] = "fcfs"
    max_num_queued_reqs: Annotated[int, Meta(ge=1, description="requests that may wait; more are answered 429")] = 1024
    request_timeout_s: Annotated[float, Meta(gt=0, description="deadline of a request, from its arrival")] | None = None
    enable_prefix_caching: Annotated[bool, Meta(description="reuse the KV of equal prefixes")] = True
    kv_cache_dtype: Annotated[
        Literal["auto", "bf16", "f32", "int8"],
        Meta(description="type of K and V in the cache (auto: bf16; int8: half the memory)"),
    ] = "auto"
    kv_cache_memory_bytes: (
        Annotated[int, Meta(ge=1, description="memory for KV blocks, with suffix (512M, 4G); default: a share of what is free")]
        | None
    ) = None
    speculative_config: (
        Annotated[
            SpeculativeConfig,
            Meta(
                description='drafts, JSON: {"method": ["ngram", "suffix"]} or {"method": "draft_model", "model": NAME} '
                "(docs/speculation.md)"
            ),
        ]
        | None
    ) = None
    async_depth: Annotated[int, Meta(ge=0, le=1, description="steps planned ahead of the device; 0 is right on CPU")] = 0
    backend: Annotated[Literal["cpu", "torch"], Meta(description="cpu: native kernels; torch: the float32 reference")] = "cpu"
    threads: Annotated[int, Meta(ge=0, description="worker threads of the CPU backend; 0: the physical cores we may use")] = 0
    cpu_tier: Annotated[
        Literal["auto", "generic", "avx2", "avx512", "avx512bf16"], Meta(description="instruction set of the kernels")
    ] = "auto"
    cache_dir: Annotated[str | None, Meta(description="models and packed weights; default: $NORIA_CACHE or ~/.cache/noria")] = (
        None
    )
    offline: Annotated[bool, Meta(description="never open a connection to fetch a model")] = False


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the HTTP server."""

    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on")] = 8000
    served_model_name: Annotated[tuple[str, ...], Meta(description="names clients may use; the first is reported")] = ()
    api_key: Annotated[
        tuple[str, ...], Meta(description="accepted keys; none: no authentication. Visible in ps: prefer --api-key-file")
    ] = ()
    api_key_file: Annotated[
        str | None, Meta(description="file of accepted keys: KEY [NAME] a line, or .toml/.json with tenants and limits")
    ] = None
    allowed_origins: Annotated[
        tuple[str, ...], Meta(description="origins whose pages may call us (CORS), as https://app.example; default: none")
    ] = ()
    chat_template: Annotated[str | None, Meta(description="a Jinja template file instead of the model's own")] = None
    tool_call_parser: Annotated[
        str, Meta(description="format of tool calls; auto: the chat template's; none: left as text")
    ] = "auto"
    reasoning_parser: Annotated[str, Meta(description="format of reasoning; auto: the chat template's; none: left as text")] = (
        "auto"
    )
    generation_config: Annotated[
        Literal["auto", "model"], Meta(description="model: also take the sampling defaults of generation_config.json")
    ] = "auto"
    shutdown_timeout_s: Annotated[float, Meta(ge=0, description="how long SIGTERM waits for running requests")] = 30.0
    max_body_bytes: Annotated[int, Meta(ge=1024, description="largest request body; more is 413")] = 16 << 20
    data_dir: Annotated[
        str | None, Meta(description="uploaded files and batches; default: the folder data in the cache directory")
    ] = None
    vllm_metrics: Annotated[bool, Meta(description="also export the metrics under vLLM's names (vllm:...)")] = False
    access_log: Annotated[str | None, Meta(description="file for one JSON line a request, without its text; -: stderr")] = None
    slow_request_s: (
        Annotated[float, Meta(gt=0, description="log requests that took longer, with where their time went")] | None
    ) = None
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="what is logged")] = "info"
