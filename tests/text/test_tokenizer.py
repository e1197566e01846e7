"""Encoding and decoding, against Hugging Face's tokenizers and an independent SentencePiece."""

from __future__ import annotations

import heapq
import json
import struct
import threading
import time
from pathlib import Path

import pytest
import text_helpers as helpers
from hypothesis import given, settings
from hypothesis import strategies as st
from text_helpers import TEXTS
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers import models as library_models
from transformers import AutoTokenizer

from noria.text.loader import load_tokenizer
from noria.text.merges_cache import cached_merges
from noria.text.pretokenizers import PRE_TOKENIZERS, pre_tokenizer
from noria.text.sentencepiece import merges_from_scores, read_sentencepiece
from noria.text.source import TokenizerSource, TokenType, source_from_gguf
from noria.text.tokenizer import Tokenizer
from noria.types import LoadError, RequestError


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False, parse_special=False)


def reference_spm(source: TokenizerSource, text: str) -> list[int]:
    """SentencePiece's BPE as its authors describe it: join the best adjacent pair, leftmost of equals, until there is none.

    User-defined tokens are taken out first, the longest at each place; characters that are no piece become bytes.
    """
    ids = {piece: i for i, piece in enumerate(source.tokens)}
    user = sorted(
        (p for p, kind in zip(source.tokens, source.types, strict=True) if kind == TokenType.USER_DEFINED),
        key=len,
        reverse=True,
    )
    score = {p: s for p, s, kind in zip(source.tokens, source.scores, source.types, strict=True) if kind == TokenType.NORMAL}
    found: list[int] = []

    def merge(run: str) -> None:
        run = ("▁" if source.add_space_prefix else "") + run.replace(" ", "▁")
        symbols: list[str] = list(run)
        following = [*range(1, len(run)), -1]
        before = list(range(-1, len(run) - 1))
        queue: list[tuple[float, int, int, str]] = []

        def offer(left: int, right: int) -> None:
            if left >= 0 and right >= 0 and symbols[left] + symbols[right] in score:
                joined = symbols[left] + symbols[right]
                heapq.heappush(queue, (-score[joined], left, right, joined))

        for i in range(len(run) - 1):
            offer(i, i + 1)
        while queue:
            _, left, right, joined = heapq.heappop(queue)
            if not symbols[left] or not symbols[right] or symbols[left] + symbols[right] != joined:
                continue
            symbols[left], symbols[right] = joined, ""
            following[left] = following[right]
            if following[right] >= 0:
                before[following[right]] = left
            offer(before[left], left)
            offer(left, following[left])
        for symbol in filter(None, symbols):
            found.extend([ids[symbol]] if symbol in score else [ids[f"<0x{b:02X}>"] for b in symbol.encode()])

    start = i = 0
    while i < len(text):
        token = next((u for u in user if text.startswith(u, i)), None)
        if token is None:
            i += 1
            continue
        if start < i:
            merge(text[start:i])
        found.append(ids[token])
        i = start = i + len(token)
    if start < len(text):
        merge(text[start:])
    return found


# --- the same ids as Hugging Face ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_smollm2_equals_the_tokenizer_of_its_own_repository() -> None:
    """Red when the merges, the control tokens or the expressions behind the name "smollm" are read wrongly."""
    source = helpers.source("smollm2-135m")
    # What HuggingFaceTB/SmolLM2-135M-Instruct's tokenizer.json says of the way to words.
    words = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)])
    reference = helpers.transformers_tokenizer(helpers.byte_level_backend(source, words))
    ours = helpers.pulled("smollm2-135m")
    for text in [*TEXTS, "<|im_start|>user\nHi<|im_end|>", "<|endoftext|>x", "<|im_end|"]:
        assert ours.encode(text, add_special_tokens=False, parse_special=True) == reference.encode(text)
        assert plain(ours, text) == reference.encode(text, split_special_tokens=True)
        ids = reference.encode(text)
        assert ours.decode(ids, skip_special_tokens=False) == reference.decode(ids) == text
        assert ours.decode(ids) == reference.decode(ids, skip_special_tokens=True)


@pytest.mark.slow
def test_gemma_equals_an_independent_sentencepiece() -> None:
    """Red when the merges made from scores, user-defined tokens or byte fallback differ from SentencePiece's own algorithm."""
    source, ours = helpers.source("gemma3-270m"), helpers.pulled("gemma3-270m")
    for text in TEXTS:
        ids = plain(ours, text)
        assert ids == reference_spm(source, text), text
        assert ours.decode(ids) == text


@pytest.mark.slow
def test_gemma_equals_hugging_faces_way_to_merges() -> None:
    """Red when the order of merges differs from transformers' generate_merges where it matters."""
    from transformers.tokenization_utils_base import generate_merges

    source, ours = helpers.source("gemma3-270m"), helpers.pulled("gemma3-270m")
    scores = {
        text: score
        for text, score, kind in zip(source.tokens, source.scores, source.types, strict=True)
        if kind == TokenType.NORMAL
    }
    vocab = {text: i for i, text in enumerate(source.tokens)}
    merges = generate_merges({text: vocab[text] for text in scores}, scores)
    reference = Backend(library_models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    reference.normalizer = normalizers.Replace(" ", "▁")
    reference.add_tokens(
        [
            AddedToken(t, normalized=False)
            for t, k in zip(source.tokens, source.types, strict=True)
            if k == TokenType.USER_DEFINED
        ]
    )
    for text in TEXTS:
        assert plain(ours, text) == reference.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("prefix", [True, False])
@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet="abcdefinorst. \n<>think▁éя😀", max_size=60))
def test_scores_give_sentencepieces_ids(prefix: bool, text: str) -> None:
    """Red when merges are ordered or cut otherwise than SentencePiece joins pieces."""
    assert plain(helpers.sentencepiece(prefix), text) == reference_spm(helpers.sentencepiece_source(prefix), text)


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.sets(st.text(alphabet="ab", min_size=2, max_size=5), min_size=1, max_size=12),
    text=st.text(alphabet="ab", max_size=24),
)
def test_any_cut_of_a_piece_has_the_rank_of_the_piece(pieces: set[str], text: str) -> None:
    """Red when only some cuts of a piece are merges: overlapping pieces of two letters reach every kind of cut."""
    ordered = sorted(pieces, key=lambda p: (len(p), p))
    tokens = ["<unk>", *ordered, "a", "b"]
    types = [TokenType.UNKNOWN] + [TokenType.NORMAL] * (len(tokens) - 1)
    scores = [0.0] + [-float(i) for i in range(len(tokens) - 1)]
    source = TokenizerSource(kind="spm", tokens=tokens, types=types, scores=scores, unk_id=0)
    assert plain(load_tokenizer(source), text) == reference_spm(source, text)


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_pre_tokenizer_keeps_the_text(name: str) -> None:
    """Red when an expression does not compile, or when it drops characters."""
    tokenizer = load_tokenizer(helpers.byte_level_source(name))
    for text in TEXTS:
        assert tokenizer.decode(plain(tokenizer, text)) == text


# Words as the models' own repositories cut them: (name, text, words).
_WORDS = [
    ("gpt-2", "I'll pay 1234 €\n\n now", ["I", "'ll", "Ġpay", "Ġ1234", "ĠâĤ¬", "ĊĊ", "Ġnow"]),
    ("smollm", "x 1234", ["x", "Ġ", "1", "2", "3", "4"]),
    ("llama-bpe", "I'LL pay 1234!\n\n  now", ["I", "'LL", "Ġpay", "Ġ", "123", "4", "!ĊĊ", "Ġ", "Ġnow"]),
    ("qwen2", "a 1234\n x", ["a", "Ġ", "1", "2", "3", "4", "Ċ", "Ġx"]),
    ("tekken", "HelloWorld ABCdef 12", ["Hello", "World", "ĠABCdef", "Ġ", "1", "2"]),
    ("gpt-4o", "HelloWorld don't 1234", ["Hello", "World", "Ġdon't", "Ġ", "123", "4"]),
    ("deepseek-v3", "abc中文1234", ["abc", "ä¸Ńæĸĩ", "123", "4"]),
    ("deepseek-llm", "a1\nбв", ["a", "1", "Ċ", "Ð±Ð²"]),
    ("default", "a+b 12345", ["a", "+", "b", "Ġ", "123", "45"]),
]


@pytest.mark.parametrize(("name", "text", "words"), _WORDS)
def test_pre_tokenizers_cut_words(name: str, text: str, words: list[str]) -> None:
    """Red when an expression cuts at other places: digits in groups, contractions, line ends, capital letters."""
    steps = load_tokenizer(helpers.byte_level_source(name)).backend.pre_tokenizer
    assert [word for word, _ in steps.pre_tokenize_str(text)] == words


def test_an_unknown_pre_tokenizer_is_refused_by_name() -> None:
    """Red when an unknown name falls back to some expression, which gives a model ids it was not trained on."""
    with pytest.raises(LoadError, match="'brand-new'"):
        pre_tokenizer("brand-new")


# --- control tokens ------------------------------------------------------------------------------------------------------


def test_text_becomes_a_control_token_only_where_the_caller_says_so() -> None:
    """Red when `parse_special=False` lets a user's text end a turn."""
    tokenizer = helpers.byte_level()
    text = "a<|im_end|>b"
    assert 2 in tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    ids = plain(tokenizer, text)
    assert not tokenizer.control_ids & set(ids)
    assert tokenizer.decode(ids) == text


def test_user_defined_tokens_are_tokens_in_any_text() -> None:
    """Red when user-defined tokens are treated as control tokens: hidden, or made only on demand."""
    tokenizer = helpers.sentencepiece()
    token = helpers.token(tokenizer, "<think>")
    ids = plain(tokenizer, "x<think>y")
    assert token in ids
    assert tokenizer.decode(ids) == "x<think> y"  # the prefix space after an added token is SentencePiece's


@pytest.mark.parametrize("parse", [True, False])
def test_the_start_token_is_never_doubled(parse: bool) -> None:
    """Red when a prompt that begins with the start token gets another one."""
    tokenizer = helpers.sentencepiece()
    assert tokenizer.add_bos
    bos = tokenizer.bos_id
    assert tokenizer.encode("ab", add_special_tokens=True, parse_special=parse)[0] == bos
    spelled = tokenizer.encode("<s>ab", add_special_tokens=True, parse_special=True)
    assert spelled.count(bos) == 1
    assert bos not in tokenizer.encode("ab", add_special_tokens=False, parse_special=parse)
    assert tokenizer.encode("", add_special_tokens=True, parse_special=parse) == [bos]


def test_parts_are_encoded_as_one_text_would_be() -> None:
    """Red when cutting at control tokens changes ids: words split, prefix spaces lost or added."""
    for tokenizer in (helpers.byte_level(), helpers.sentencepiece(), helpers.sentencepiece(False)):
        for text in ("<s>", "a<s>b", "<s> a  b</s>\n<|im_start|>c", "</s><s>", "é<s>"):
            whole = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
            assert tokenizer.encode_parts(tokenizer.split_control(text)) == whole


# --- bytes ---------------------------------------------------------------------------------------------------------------


def test_token_bytes_are_exact() -> None:
    """Red when the byte alphabet is off, or when parts of characters come as replacement characters."""
    tokenizer = helpers.byte_level()
    ids = plain(tokenizer, "é😀")
    assert b"".join(map(tokenizer.token_bytes, ids)) == "é😀".encode()
    assert {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)} >= {bytes([b]) for b in range(256)}
    spm = helpers.sentencepiece()
    assert spm.token_bytes(helpers.token(spm, "<0xE2>")) == b"\xe2"
    assert spm.token_text(helpers.token(spm, "<0xE2>")) == "\ufffd"
    assert spm.token_bytes(spm.vocab_size + 5) == b""


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=80))
def test_what_is_encoded_is_decoded(text: str) -> None:
    """Red when any character is lost on the way to ids and back, in either kind of tokenizer."""
    assert helpers.byte_level().decode(plain(helpers.byte_level(), text)) == text
    spm = helpers.sentencepiece(False)
    assert spm.decode(plain(spm, text)) == text.replace("▁", " ")


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 599), max_size=40))
def test_decoding_any_ids_reads_their_bytes_as_utf8(ids: list[int]) -> None:
    """Red when decode does anything but join bytes; equality with Hugging Face's byte-level decoder on every id sequence."""
    tokenizer = helpers.byte_level()
    joined = b"".join(map(tokenizer.token_bytes, ids))
    assert tokenizer.decode(ids, skip_special_tokens=False) == joined.decode("utf-8", "replace")
    reference = helpers.byte_level_backend(helpers.byte_level_source(), pre_tokenizers.ByteLevel())
    visible = [i for i in ids if i not in tokenizer.control_ids]
    assert tokenizer.decode(ids) == reference.decode(visible)


# --- long and bad input --------------------------------------------------------------------------------------------------


def test_text_that_is_not_unicode_is_the_clients_error() -> None:
    """Red when half a surrogate pair from JSON reaches the library as a TypeError, an HTTP 500."""
    with pytest.raises(RequestError, match="surrogate"):
        plain(helpers.byte_level(), "a\ud800b")


@pytest.mark.parametrize("letter", ["a", " ", "1", "<", "é"])
def test_a_text_far_over_the_context_is_refused_at_once(letter: str) -> None:
    """Red when ten megabytes of one letter are encoded to the end before they are found too long."""
    tokenizer = helpers.byte_level()
    start = time.perf_counter()
    with pytest.raises(RequestError) as refused:
        tokenizer.encode(letter * 10_000_000, add_special_tokens=True, parse_special=True, max_tokens=8192)
    assert time.perf_counter() - start < 1.0
    assert refused.value.code == "context_length_exceeded"
    assert len(tokenizer.encode(letter * 4000, add_special_tokens=True, parse_special=True, max_tokens=8192)) <= 8192


def test_encoding_lets_other_threads_run() -> None:
    """Red when the interpreter lock is held while a long text is encoded: streams of other clients would stall."""
    tokenizer, text = helpers.byte_level(), "The quick brown fox. " * 40_000
    longest = 0.0
    done = threading.Event()

    def watch() -> None:
        nonlocal longest
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    plain(tokenizer, text)
    took = time.perf_counter() - start
    done.set()
    watcher.join()
    assert longest < took / 2


def test_threads_share_a_tokenizer() -> None:
    """Red when encoding keeps state between calls."""
    tokenizer = helpers.byte_level()
    expected = {(t, p): tokenizer.encode(t, add_special_tokens=True, parse_special=p) for t in TEXTS for p in (True, False)}
    wrong: list[str] = []

    def work() -> None:
        for (text, parse), ids in expected.items():
            if tokenizer.encode(text, add_special_tokens=True, parse_special=parse) != ids or tokenizer.decode(ids) is None:
                wrong.append(text)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- GGUF metadata ---------------------------------------------------------------------------------------------------------


def metadata(**changes: object) -> dict[str, object]:
    source = helpers.byte_level_source()
    base: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": list(source.tokens),
        "tokenizer.ggml.token_type": [int(t) for t in source.types],
        "tokenizer.ggml.merges": list(source.merges),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{{ messages }}",
        "tokenizer.chat_template.tool_use": "{{ tools }}",
    }
    return {k: v for k, v in (base | {f"tokenizer.{k}": v for k, v in changes.items()}).items() if v is not None}


def test_metadata_is_read_with_its_defaults() -> None:
    """Red when a default of the GGUF specification or of llama.cpp is read otherwise."""
    source = source_from_gguf(metadata())
    assert (source.add_bos, source.add_eos, source.add_space_prefix) == (False, False, False)
    assert source.chat_templates == {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    tokenizer = load_tokenizer(source)
    # <|im_end|> and others end a turn though the file names only <|endoftext|>; </s>, a text's end in no list, does not.
    assert tokenizer.eos_ids[:2] == (0, 2)
    assert 4 not in tokenizer.eos_ids
    assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>"}
    assert source_from_gguf(metadata(**{"ggml.pre": "llama-bpe"})).add_bos
    assert not source_from_gguf(metadata(**{"ggml.pre": "llama-bpe", "ggml.add_bos_token": False})).add_bos


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ggml.model": "t5"}, "'t5'"),
        ({"ggml.model": None}, "no tokenizer"),
        ({"ggml.pre": "unheard-of"}, "'unheard-of'"),
        ({"ggml.tokens": []}, "empty vocabulary"),
        ({"ggml.token_type": [1]}, "1 token types"),
        ({"ggml.merges": None}, "without merges"),
        ({"ggml.model": "llama"}, "0 scores"),
        ({"ggml.bos_token_id": 10**6}, "bos_token_id is 1000000"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(changes: dict[str, object], message: str) -> None:
    """Red when a malformed file becomes a tokenizer or a traceback."""
    with pytest.raises(LoadError, match=message):
        source_from_gguf(metadata(**changes))


def test_merges_of_texts_that_are_no_tokens_are_refused() -> None:
    """Red when the library's own exception reaches the user."""
    with pytest.raises(LoadError, match="merges do not fit"):
        load_tokenizer(source_from_gguf(metadata(**{"ggml.merges": ["qq zz"]})))


def test_unused_tokens_have_no_text() -> None:
    """Red when padding of a vocabulary shows up in output."""
    types = [int(t) for t in helpers.byte_level_source().types]
    types[-1] = int(TokenType.UNUSED)
    tokenizer = load_tokenizer(source_from_gguf(metadata(**{"ggml.token_type": types})))
    assert tokenizer.token_bytes(len(types) - 1) == b""


@pytest.mark.slow
def test_smollm2_loads_in_time() -> None:
    """Red when the tokenizer alone would take a third of the second that a start may take."""

    def seconds() -> float:
        source = helpers.source.__wrapped__("smollm2-135m")
        start = time.perf_counter()
        load_tokenizer(source)
        return time.perf_counter() - start

    assert min(seconds() for _ in range(3)) < 0.3


# --- the cache of merges ---------------------------------------------------------------------------------------------------


def test_merges_are_cached_by_content(tmp_path: Path) -> None:
    """Red when a second start works the merges out again, or when another vocabulary gets them."""
    source = helpers.sentencepiece_source()
    merges = merges_from_scores(source)
    assert cached_merges(source, tmp_path) == merges
    (file,) = (tmp_path / "tokenizers").iterdir()
    written = file.stat().st_mtime_ns
    assert cached_merges(source, tmp_path) == merges
    assert file.stat().st_mtime_ns == written
    other = helpers.sentencepiece_source()
    scores = list(other.scores)
    scores[-1], scores[-2] = scores[-2], scores[-1]
    cached_merges(TokenizerSource(kind="spm", tokens=other.tokens, types=other.types, scores=scores), tmp_path)
    assert len(list((tmp_path / "tokenizers").iterdir())) == 2


def test_a_damaged_cache_is_made_again(tmp_path: Path) -> None:
    """Red when a flipped bit or a short file becomes wrong ids."""
    source = helpers.sentencepiece_source()
    merges = cached_merges(source, tmp_path)
    (file,) = (tmp_path / "tokenizers").iterdir()
    good = file.read_bytes()
    for bad in (good[:-1], good[:40] + bytes([good[40] ^ 1]) + good[41:], b"", b"x" * 100):
        file.write_bytes(bad)
        assert cached_merges(source, tmp_path) == merges
        assert file.read_bytes() == good


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    """Red when a read-only or full disk keeps a model from starting."""
    (tmp_path / "tokenizers").write_text("a file where the folder should be")
    source = helpers.sentencepiece_source()
    assert cached_merges(source, tmp_path) == merges_from_scores(source)


# --- Hugging Face folders ---------------------------------------------------------------------------------------------------


def test_a_folder_equals_transformers(tmp_path: Path) -> None:
    """Red when tokenizer.json, its post-processor or tokenizer_config.json's tokens are applied otherwise."""
    backend = helpers.byte_level_backend(helpers.byte_level_source(), pre_tokenizers.ByteLevel(False))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 3), ("</s>", 4)])
    tool = backend.get_vocab_size()
    end = tool + 1
    backend.enable_truncation(5)  # left over from training; never applied to a prompt
    config = {
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>"},
        "added_tokens_decoder": {
            str(tool): {"__type": "AddedToken", "content": "<tool>", "special": False},
            str(end): {"__type": "AddedToken", "content": "<end>", "special": True},
        },
    }
    folder = helpers.huggingface_folder(tmp_path, backend, **config)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, 4]}))
    ours, reference = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    reference.backend_tokenizer.no_truncation()
    assert (ours.bos_id, ours.eos_ids, ours.prefix, ours.suffix) == (3, (end, 4), (3,), (4,))
    for text in [*TEXTS, "<tool>x<end>", "a</s>"]:
        assert ours.encode(text, add_special_tokens=False, parse_special=True) == reference.encode(
            text, add_special_tokens=False
        )
    assert ours.encode("ab <tool>", add_special_tokens=True, parse_special=True) == reference.encode("ab <tool>")
    assert ours.token_text(tool) == "<tool>"
    assert end in ours.control_ids
    assert tool not in ours.control_ids


@pytest.mark.parametrize("wanted", [True, False, None])
def test_add_bos_token_has_the_last_word(tmp_path: Path, wanted: bool | None) -> None:
    """Red when an explicit `add_bos_token` is ignored, as tokenizer.json alone would have it."""
    backend = helpers.byte_level_backend(helpers.byte_level_source(), pre_tokenizers.ByteLevel(False))
    config = {} if wanted is None else {"add_bos_token": wanted}
    folder = helpers.huggingface_folder(tmp_path, backend, bos_token="<s>", **config)
    assert load_tokenizer(folder).add_bos is bool(wanted)


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_prefix_spaces_of_a_sentencepiece_folder(tmp_path: Path, scheme: str) -> None:
    """Red when the space before the first text is added elsewhere, left out, or shown in the output."""
    vocab = {text: i for i, text in enumerate(helpers.sentencepiece_source().tokens)}
    merges = merges_from_scores(helpers.sentencepiece_source())
    backend = Backend(library_models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + ([] if scheme == "never" else [decoders.Strip(" ", 1, 0)]))
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in ("<s>", "</s>")])
    ours = load_tokenizer(helpers.huggingface_folder(tmp_path, backend, bos_token="<s>"))
    for text in ("Hello", " Hello", "  x", "<s>Hello", "a</s>b <s> c", "", "▁x", "é", "\n"):
        expected = backend.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False, parse_special=True) == expected
        assert ours.decode(expected) == backend.decode(expected, skip_special_tokens=True)
        assert ours.encode_parts(ours.split_control(text)) == expected


def test_a_folder_without_a_fast_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    """Red when a missing tokenizer is a traceback, or when vocab.json alone is taken for one."""
    with pytest.raises(LoadError, match="no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(LoadError, match=r"slow tokenizer \(vocab.json\).*save_pretrained"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{]")
    with pytest.raises(LoadError, match="cannot read"):
        load_tokenizer(tmp_path)


def test_a_decoder_without_a_meaning_in_bytes_is_refused(tmp_path: Path) -> None:
    """Red when a WordPiece tokenizer is decoded as if it were another kind."""
    backend = helpers.byte_level_backend(helpers.byte_level_source(), pre_tokenizers.ByteLevel(False))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(LoadError, match="WordPiece"):
        load_tokenizer(helpers.huggingface_folder(tmp_path, backend))


# --- tokenizer.model --------------------------------------------------------------------------------------------------------


def protobuf(number: int, value: int | bytes | float) -> bytes:
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value % (1 << 64))
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def sentencepiece_model(source: TokenizerSource, model_type: int = 2, prefix: bool = True) -> bytes:
    pieces = b"".join(
        protobuf(1, protobuf(1, text.encode()) + protobuf(2, float(score)) + protobuf(3, int(kind)))
        for text, score, kind in zip(source.tokens, source.scores, source.types, strict=True)
    )
    trainer = protobuf(3, model_type) + protobuf(41, 1) + protobuf(42, 2) + protobuf(43, -1)
    return pieces + protobuf(2, trainer) + protobuf(3, protobuf(1, b"identity") + protobuf(3, int(prefix)))


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_model_is_read(tmp_path: Path, prefix: bool) -> None:
    """Red when a field of the protocol buffer is read wrongly: pieces, scores, kinds, ids, the prefix space."""
    source = helpers.sentencepiece_source(prefix)
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(source, prefix=prefix))
    ours = load_tokenizer(tmp_path)
    assert (ours.bos_id, ours.eos_ids, ours.prefix) == (1, (2,), (1,))
    for text in TEXTS:
        assert plain(ours, text) == plain(helpers.sentencepiece(prefix), text)


def test_a_bad_sentencepiece_model_is_refused(tmp_path: Path) -> None:
    """Red when a damaged file or a unigram model becomes a tokenizer or a traceback."""
    path = tmp_path / "tokenizer.model"
    good = sentencepiece_model(helpers.sentencepiece_source())
    path.write_bytes(sentencepiece_model(helpers.sentencepiece_source(), model_type=1))
    with pytest.raises(LoadError, match="another kind than BPE"):
        read_sentencepiece(path)
    for bad in (b"", good[:-3], b"\xff" * 20, b"\x0b" + good, b"not a protocol buffer"):
        path.write_bytes(bad)
        with pytest.raises(LoadError):
            read_sentencepiece(path)
