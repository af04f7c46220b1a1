# Every target sets up what it needs: uv (in a private venv when it is not installed), the
# environment in .venv, then the command. `make demo` and `make test` are all a new clone needs.

UV := $(shell command -v uv 2>/dev/null || echo .uv/bin/uv)
RUN := .venv/bin/
ENVIRONMENT := .venv/.synced
export OMP_NUM_THREADS ?= 1
# Tests start up to four ranks each and need about 3 GB: more workers than cores gain nothing. A file
# stays in one process, since its tests fork from what its fixtures built.
WORKERS ?= 2
PYTEST := python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
# Some machines forbid Python to keep bytecode; without it each process takes twice as long to start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo shell train-demo test test-slow test-all test-durations test-contexts tests-of numerics test-trl test-clusters test-ray test-slurm test-trackers test-muon test-te test-verl test-grpo test-vllm test-versions test-megatron lint docs parity parity-2b search bench-convert gpu-check release clean

help: ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(ENVIRONMENT) ## convert a tiny Qwen3-VL-MoE both ways and check it on four processes
	@$(RUN)mcore-qwen3vl demo $(ARGS)

shell: $(ENVIRONMENT) ## a shell with the environment's commands, mcore-qwen3vl among them
	@. .venv/bin/activate && exec $${SHELL:-sh}

train-demo: $(ENVIRONMENT) ## train a tiny model on the CPU: stop, resume, export, generate
	@$(RUN)mcore-qwen3vl train-demo $(ARGS)

test: $(ENVIRONMENT) ## the test suite, the parity matrix included (no GPU needed)
	$(RUN)$(PYTEST) -m "not slow" $(ARGS)

test-slow: $(ENVIRONMENT) ## the slow tests alone; ARGS="--turn 1/3" runs one share of their files
	$(RUN)$(PYTEST) -m slow $(ARGS)

test-all: $(ENVIRONMENT) ## both
	$(RUN)$(PYTEST) $(ARGS)

# The longest files start first, by this record. It is committed; what a run leaves out stays.
test-durations: $(ENVIRONMENT) ## the test suite, whose seconds are written to tests/durations.json
	$(RUN)$(PYTEST) -m "not slow" --record-durations $(ARGS)

test-contexts: $(ENVIRONMENT) ## the test suite; which tests run which file is recorded in build/ for tests-of
	$(RUN)$(PYTEST) -m "not slow" -p tests.tests_of $(ARGS)

tests-of: ## the tests that run a file (FILE=mcore_qwen3vl/data/parts.py)
	@$(firstword $(wildcard .venv/bin/python) python3) -m tests.tests_of '$(FILE)'

numerics: $(ENVIRONMENT) ## what computes, under other instruction sets and thread counts (ARGS=--quick)
	$(RUN)python -m tests.numerics --numprocesses $(WORKERS) --dist loadfile $(ARGS)

test-trl: $(ENVIRONMENT) ## losses against TRL's and sentence-transformers', which are installed for it
	$(UV) run --quiet --with 'trl>=1.16,<1.17' --with 'sentence-transformers>=5.7,<5.8' \
	  python -m pytest tests/losses/test_trl.py tests/losses/test_embedding_contrastive.py \
	  tests/losses/test_sentence_transformers.py $(ARGS)

test-clusters: $(ENVIRONMENT) ## SkyPilot checks its file, Kubeflow's schema the other
	$(UV) run --quiet --with 'skypilot>=0.14,<0.15' python -m pytest tests/launch/test_clusters.py $(ARGS)

test-ray: $(ENVIRONMENT) ## parts as tasks of Ray, installed for it, one worker killed
	$(UV) run --quiet --with 'ray>=2.60,<2.61' python -m pytest tests/launch/test_ray.py $(ARGS)

test-slurm: $(ENVIRONMENT) ## a launch script in a Slurm of two nodes on this machine (Debian's slurm-wlm and munge; root)
	@command -v slurmctld slurmd munged >/dev/null && test "$$(id -u)" = 0 || \
	  { echo 'install slurm-wlm and munge, and run this as root' >&2; exit 2; }
	$(RUN)python -m pytest tests/launch/test_slurm.py $(ARGS)

test-trackers: $(ENVIRONMENT) ## runs with W&B, MLflow, SwanLab and Trackio, installed for it, offline
	$(UV) run --quiet --with 'wandb>=0.31,<0.32' --with 'mlflow-skinny>=3.17,<4' \
	  --with 'sqlalchemy>=2,<3' --with 'alembic>=1,<2' --with 'swanlab>=0.10,<0.11' \
	  --with 'trackio>=0.43,<0.44' \
	  python -m pytest tests/training/logs/test_wandb.py tests/training/logs/test_trackers.py $(ARGS)

test-muon: $(ENVIRONMENT) ## Muon against the package's own on HF's model, which is installed for it
	$(UV) run --quiet --with 'emerging-optimizers>=0.3,<0.4' \
	  python -m pytest tests/training/test_muon.py $(ARGS)

test-verl: .venv-verl/.synced ## the tests with VERL, in an environment of its own (.venv-verl)
	.venv-verl/bin/python -m pytest tests/verl $(ARGS)

test-vllm: .venv-vllm/.synced ## real vLLM serves what is exported, on the CPU (.venv-vllm, 6 GB)
	.venv-vllm/bin/python -m pytest tests/vllm $(ARGS)

# What warms the model up is trained in .venv: data sets need a newer transformers than VERL takes.
test-grpo: .venv-grpo/.synced $(ENVIRONMENT) ## VERL's trainer: GRPO with vLLM, on the CPU (.venv-grpo, 7 GB)
	.venv-grpo/bin/python -m pytest tests/grpo $(ARGS)

# Its compiled extension needs CUDA; the Python around it runs with the tests' own kernels.
test-te: .venv-te/.synced ## the te spec's numbers, with reference kernels on the CPU (.venv-te)
	.venv-te/bin/$(PYTEST) -p tests.model.te.extension tests/model/te $(ARGS)

# Each is a list of pins in tests/environments; docs/versions.md says what ran when.
VERSIONS := torch-2.11 torch-2.12 torch-2.14 torch-2.15 python-3.13
.PHONY: $(VERSIONS:%=test-%) test-transformers-5.10
.venv-python-3.13/.synced: export UV_PYTHON := 3.13
# What works with the oldest transformers; data and prompts need 5.18. The cache that test_identify_hub makes
# is laid out as huggingface_hub 2 does, which that transformers does not take.
OLD := $(addprefix tests/,model converters tiny verification/parity) --ignore tests/converters/test_identify_hub.py

test-versions: $(VERSIONS:%=test-%) test-transformers-5.10 ## with every supported version, an hour and more

$(VERSIONS:%=test-%): test-%: .venv-%/.synced
	.venv-$*/bin/mcore-qwen3vl demo
	.venv-$*/bin/mcore-qwen3vl train-demo
	.venv-$*/bin/mcore-qwen3vl rehearse launch/sft_2b.sh
	.venv-$*/bin/$(PYTEST) -m "not slow" $(ARGS)

test-transformers-5.10: .venv-transformers-5.10/.synced
	.venv-transformers-5.10/bin/mcore-qwen3vl demo
	.venv-transformers-5.10/bin/$(PYTEST) -m "not slow" $(OLD) $(ARGS)

# One test names the functions whose arguments have changed, which with another Megatron is no failure.
test-megatron: $(ENVIRONMENT) ## with another Megatron before the installed one (MEGATRON=CHECKOUT)
	@test -d '$(MEGATRON)/megatron/core' || { echo 'MEGATRON must name a checkout of Megatron-LM' >&2; exit 2; }
	PYTHONPATH='$(CURDIR):$(abspath $(MEGATRON))' $(RUN)$(PYTEST) -m "not slow" \
	  --deselect tests/training/test_hooks.py::test_canary_every_symbol_that_we_use_by_name_has_the_signature_we_were_tested_with $(ARGS)

lint: $(ENVIRONMENT) ## ruff (lint and format) and mypy
	$(RUN)ruff check .
	$(RUN)ruff format --check .
	$(RUN)mypy

docs: .venv/.synced-docs ## the documentation as a site in build/site; a dead link fails
	NO_MKDOCS_2_WARNING=1 $(RUN)mkdocs build --strict $(ARGS)
	@echo "open build/site/index.html"

parity: $(ENVIRONMENT) ## the layout x batch matrix against Hugging Face, written as a table
	$(RUN)python -m mcore_qwen3vl.verification.parity $(ARGS)

# By its formula up to 24 GB of memory and 34 GB of temporary files (CP 2), beside a model of 9 GB.
parity-2b: $(ENVIRONMENT) ## a whole 2B with random weights against Hugging Face, in four layouts
	$(RUN)python benchmarks/parity.py 2b $(ARGS)

search: $(ENVIRONMENT) ## runs at random, judged by oracles (ARGS="--minutes 30 --seed 7")
	$(RUN)python -W ignore -m mcore_qwen3vl.verification.search $(ARGS)

bench-convert: $(ENVIRONMENT) ## conversion against a plain copy of the same bytes
	$(RUN)python benchmarks/convert.py $(ARGS)

# No environment is made: a GPU machine brings its own, and may have no network.
gpu-check: ## on a machine with GPUs: parity, speed and memory into one report (ARGS="--minutes 8")
	$(firstword $(wildcard .venv/bin/python) python3) benchmarks/gpu_check.py $(ARGS)

release: $(filter .uv/%,$(UV)) ## sdist and wheel in dist/, after their contents and two installations are checked
	$(UV) run --no-project tests/release.py

$(ENVIRONMENT): pyproject.toml .python-version $(filter .uv/%,$(UV))
	@echo "Installing into .venv: 5.4 GB, several minutes the first time"
	$(UV) sync
	@touch $@

# Environments beside .venv: what pyproject.toml and a list of pins resolve to together, and for some
# a list of what replaces the requirements of others.
OVERRIDES = $(wildcard tests/environments/$*.overrides.txt)
.venv-grpo/.synced: tests/environments/grpo.overrides.txt
.venv-vllm/.synced: tests/environments/vllm.overrides.txt
.venv-%/.synced: tests/environments/%.txt tests/environments/tools.txt pyproject.toml $(filter .uv/%,$(UV))
	$(UV) venv --quiet --allow-existing .venv-$*
	$(UV) pip install --no-config --python .venv-$* --requirement $< $(OVERRIDES:%=--override %) --editable .
	@touch $@

.venv/.synced-docs: $(ENVIRONMENT)
	$(UV) sync --group docs
	@touch $@

.uv/bin/uv:
	python3 -m venv .uv
	.uv/bin/python -m pip install --quiet uv

clean: ## remove the environment and caches
	rm -rf .venv .venv-* .uv build dist .pytest_cache .mypy_cache .ruff_cache
