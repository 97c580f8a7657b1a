"""Text to tokens and back, with the model's own tokenizer and chat template."""

import os
from typing import Any, cast

from transformers import AutoTokenizer, PreTrainedTokenizerFast


class Tokenizer:
    """The tokenizer of a Hugging Face directory."""

    def __init__(self, directory: str) -> None:
        self._tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(
            directory, local_files_only=True
        )

    @property
    def end_token(self) -> int | None:
        """The token by which the model ends its answer, if it has one."""
        return cast("int | None", self._tokenizer.eos_token_id)

    def encode_prompt(self, question: str) -> list[int]:
        """A question as the chat template asks it, up to where the answer begins."""
        text = question
        if self._tokenizer.chat_template:
            text = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
            )
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        """Text as it would stand in the middle of an answer."""
        return cast("list[int]", self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: list[int]) -> str:
        """The tokens as text."""
        return cast("str", self._tokenizer.decode(tokens))


def convert_gguf_tokenizer(gguf: str, directory: str) -> None:
    """Write the tokenizer inside a GGUF file in Hugging Face's form."""
    folder, name = os.path.split(gguf)
    tokenizer: Any = AutoTokenizer.from_pretrained(
        folder or ".", gguf_file=name, local_files_only=True
    )
    tokenizer.save_pretrained(directory)
