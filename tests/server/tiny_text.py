"""A tokenizer folder in which the id of a token is the byte it stands for, with ChatML's control tokens after them."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

IM_START, IM_END, BOS = 256, 257, 258
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level BPE, by byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def write_tokenizer(folder: Path, *, chat: bool = True, bos: bool = False) -> Path:
    """Write tokenizer.json and tokenizer_config.json into `folder`, with or without a chat template.

    With `bos`, <|pad|> is a start token that both the template and the tokenizer write.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE({character: byte for byte, character in enumerate(byte_characters())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>", "<|pad|>")])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<|pad|> $A", special_tokens=[("<|pad|>", BOS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "add_bos_token": bos, "tokenizer_class": "PreTrainedTokenizerFast"}
    if bos:
        config["bos_token"] = "<|pad|>"
    if chat:
        config["chat_template"] = ("{{ bos_token }}" if bos else "") + TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
