"""The connector in real vLLM engines on the CPU; `make test-vllm`, in an environment of its own."""
