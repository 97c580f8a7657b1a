"""The model's tokenizer: every token is a word, and words are separated by spaces."""

import os

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvtier_worker.cot.vocabulary import NAMES, PAD, STOP_TOKEN, text_of


def write_tokenizer(directory: str) -> None:
    """Write the tokenizer's files in Hugging Face's form."""
    words = {text_of(token): token for token in range(len(NAMES))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=text_of(PAD)))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=text_of(STOP_TOKEN),
        pad_token=text_of(PAD),
        unk_token=text_of(PAD),
        clean_up_tokenization_spaces=False,
    ).save_pretrained(os.fspath(directory))
