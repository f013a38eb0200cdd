"""The connector's parts that need no vLLM; `make vllm` runs the rest."""
