"""Turns the model's GGUF file into a checkpoint that vLLM loads.

python -m tests.vllm.convert GGUF DIRECTORY
"""

import os
import shutil
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers


def convert(gguf: Path, out: Path) -> None:
    """Write config, bfloat16 weights and tokenizer; the directory appears when all is in it."""
    new = out.with_name(f"{out.name}.{os.getpid()}")
    whole = transformers.GgufConfig(gguf_file=gguf.name, dequantize=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=whole
    )
    model.save_pretrained(new)
    tokenizer.save_pretrained(new)
    shutil.rmtree(out, ignore_errors=True)
    new.rename(out)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
