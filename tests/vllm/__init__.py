"""Inside vLLM: `make vllm` runs these in an environment of its own."""
