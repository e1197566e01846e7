"""Control tokens that end a turn or a text under these names, as llama.cpp takes them.

A GGUF file carries one `eos_token_id` and no generation_config.json, but many models end a turn with another token than a text.
"""

from __future__ import annotations

_NAMES = frozenset(
    {
        *("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>"),
        *("<end_of_turn>", "<|end_of_turn|>", "<|endofturn|>", "<|user_end|>", "<EOT>", "_<EOT>", "<｜end▁of▁sentence｜>"),
        *("<|END_OF_TURN_TOKEN|>", "[EOT]", "[EOS]", "<|eot|>", "<|eos|>", "<turn|>", "<end_of_utterance>"),
    }
)
_CHANNEL = "<|channel|>"  # of gpt-oss's answers of several messages, in which <|end|> ends a message that others follow


def end_tokens(control: dict[int, str]) -> list[int]:
    """The ids, in their order, of those of a vocabulary's control tokens that end a turn or a text."""
    between = {"<|end|>"} if _CHANNEL in control.values() else set()
    return [token for token, name in sorted(control.items()) if name in _NAMES - between]
