# Everything a newcomer needs. `make demo` and `make test` set up all they use, in .venv.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
DEMO   := runs/en-es
SENTENCE := this cat is very large
RUNGS  := lstm gru dot additive transformer
PEERS  := .venv-bench
AUDIT  := .venv-audit
COMPAT := .venv-compat-oldest .venv-compat-newest

# Tests start Python often: it shall keep what it has compiled.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help demo ladder test everyday test-core test-slow test-compat fuzz campaign audit bench lint wheel clean

help: ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# torch is pinned in constraints.txt, so that a build of that version that is there stays, whether for a CPU (README) or
# a GPU.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("regard needs Python 3.11 or newer, not %d.%d" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	@$(BIN)/python -W ignore -m compileall -q -j 0 $(VENV)/lib > /dev/null 2>&1 || true  # on all cores; some files are templates
	@touch $@

demo: $(READY) ## train English to Spanish, score it, translate a sentence, draw its attention
	@$(BIN)/regard train en-es --out $(DEMO)
	@echo; echo '== held-out pairs: noun with adjective, subject with verb, verb with object never seen together in training'
	@$(BIN)/regard evaluate $(DEMO)
	@echo; echo '== $(SENTENCE)'
	@$(BIN)/regard translate $(DEMO) '$(SENTENCE)'
	@echo; $(BIN)/regard draw $(DEMO) '$(SENTENCE)'
	@$(BIN)/regard draw $(DEMO) '$(SENTENCE)' --out $(DEMO)/attention.svg

ladder: $(READY) ## train five models from the LSTM to the Transformer on en-es (under 15 minutes), and compare them
	@for rung in $(RUNGS); do $(BIN)/regard train ladder-$$rung --out runs/ladder-$$rung || exit; done
	@echo; $(BIN)/regard compare $(RUNGS:%=runs/ladder-%) --buckets 4,6,8,10,12,14 --out runs/ladder.svg

# mypy works while tests wait for other processes.
test: $(READY) ## the everyday tests, and lint at the same time
	@$(MAKE) --no-print-directory -j 2 everyday lint

everyday: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist load -m 'not slow'

test-core: $(READY) ## the main path through the package, in under a minute
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist load -m core

test-slow: $(READY) ## the long ones: kills at 20 random moments, a corpus of 5 million pairs, more toys
	$(BIN)/python -m pytest -m slow

# The oldest transformers that the extra `formats` allows, and the newest. All else is as in constraints.txt, torch too.
.venv-compat-%/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	grep -vE '^(transformers|tokenizers|huggingface_hub)==' constraints.txt > $(@D)/constraints.txt
	test $* = newest || sed -nE 's/.*"transformers>=([0-9.]+)".*/transformers==\1/p' pyproject.toml >> $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c $(@D)/constraints.txt -e '.[formats,ctranslate2,onnx,vision,audio,serve]' pytest hypothesis peft openai
	@touch $@

test-compat: $(COMPAT:%=%/.ready) ## the tests of formats with the oldest and the newest transformers
	@status=0; for venv in $(COMPAT); do \
	  echo "== $$($$venv/bin/python -m pip list 2>/dev/null | grep -E '^(transformers|tokenizers|torch) ' | tr -s ' \n' ' ')"; \
	  CI=1 OMP_NUM_THREADS=1 $$venv/bin/python -m pytest tests/interop || status=1; \
	done; exit $$status

fuzz: $(READY) ## a minute of hostile files, requests and command lines, with a fixed seed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.campaign fuzz --seconds 60 --seed 1

campaign: $(READY) ## kills, flipped bits, hostile files, requests and command lines (about 20 minutes on 2 cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.campaign

# pip-audit lives apart from .venv, so that what it needs is not audited. A local version (+cpu) is unknown to the index.
audit: $(READY) ## compare the dependencies with known vulnerabilities (needs a network)
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet --disable-pip-version-check pip-audit
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+.*//' > $(AUDIT)/requirements.txt
	$(AUDIT)/bin/pip-audit --strict --no-deps --disable-pip -r $(AUDIT)/requirements.txt

# The peers, and regard itself, live apart from .venv: what they need is not what regard needs. torch is the same one.
$(PEERS)/.ready: pyproject.toml constraints.txt bench/requirements.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r bench/requirements.txt -e '.[serve]'
	@touch $@

bench: $(PEERS)/.ready ## training, decoding, packing and start-up on this CPU, beside the peers (about 10 minutes; BENCH=--quick)
	@$(PEERS)/bin/python -m bench.cpu $(BENCH)

lint: $(READY)
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy

wheel: $(READY) ## build a wheel into dist/
	$(BIN)/python -m build --wheel

clean: ## remove the environment and what was built (runs stay)
	rm -rf $(VENV) $(PEERS) $(AUDIT) $(COMPAT) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
