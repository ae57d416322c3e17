# make demo: train on all GPUs, or on two processes. make check: lint and the quick tests. make test: all tests.
# make benchmarks: measure this machine. make gpu: measure one GPU. make fuzz: more random checkpoints and archives.
# make site: the documents as a site. make compare: docs/compare.html, after a change of a recipe.
# make mutants: see that the tests notice faults that are put into the code. Each creates .venv first.
VENV ?= .venv
PYTHON ?= python3
# REQUIRE_ALL=1 (in CI): a missing component fails the run instead of skipping its tests
REQUIRE_ALL ?=
export REQUIRE_ALL
# four tests at a time on two cores: some of them wait
PYTEST = $(VENV)/bin/python -m pytest -n 4 --dist worksteal
SCRIPTS = $(wildcard benchmarks/*.sh scripts/*.sh slurm/*.sh tests/helpers/*.sh) .ci/run

demo: $(VENV)/.recipes
	@$(VENV)/bin/python mnist/single.py --dry-run --device cpu > /dev/null && images= || images=--synthetic; \
	test -z "$$images" || echo "The demo uses generated images instead, which are easy to tell apart."; \
	processes=$$($(VENV)/bin/python -c "import torch; print(torch.cuda.device_count())"); device=; \
	if test $$processes = 0; then processes=2; device="--device cpu"; fi; \
	OMP_NUM_THREADS=1 $(VENV)/bin/torchrun --nproc-per-node=$$processes mnist/ddp_launch.py --epochs 3 $$device $$images
	@echo "That was mnist/ddp_launch.py. Next: read it beside mnist/single.py, look at its curves with"
	@echo "  $(VENV)/bin/tensorboard --logdir runs"
	@echo "or run another recipe: the table in README.md says which."

check: lint
	$(PYTEST) -m check

test: $(VENV)/.tools $(VENV)/.horovod
	$(PYTEST)

lint: $(VENV)/.tools
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check --quiet .
	for script in $(SCRIPTS); do bash -n $$script || exit 1; done
	if command -v shellcheck > /dev/null; then shellcheck $(SCRIPTS); else test -z "$(REQUIRE_ALL)"; fi

$(VENV)/.recipes: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet -r requirements.txt
	touch $@

$(VENV)/.tools: $(VENV)/.recipes tests/requirements.txt
	$(VENV)/bin/pip install --quiet -r tests/requirements.txt
	touch $@

# Without an old wheel, which another script has built, or a machine without MPI.
$(VENV)/.horovod: $(VENV)/.recipes scripts/install_horovod.sh
	rm -rf $(VENV)/wheels/torch-*
	PYTHON="$(abspath $(VENV))/bin/python" HOROVOD_WHEELS="$(abspath $(VENV))/wheels" scripts/install_horovod.sh \
		&& touch $@ || test -z "$(REQUIRE_ALL)"

benchmarks: $(VENV)/.tools $(VENV)/.horovod
	PATH="$(abspath $(VENV))/bin:$$PATH" benchmarks/all.sh

gpu: $(VENV)/.tools
	PATH="$(abspath $(VENV))/bin:$$PATH" python benchmarks/gpu.py $(ARGS)

fuzz: $(VENV)/.tools
	FUZZ=200000 $(PYTEST) --timeout 0 tests/common tests/imagenet -k fuzz

# The documents with a search, in .site/html; and the page that shows two scripts side by side.
site: $(VENV)/.tools
	rm -rf .site
	git checkout-index --all --prefix=.site/files/
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

compare: $(VENV)/.tools
	$(VENV)/bin/python docs/compare.py

# ARGS="fsdp watchdog": those with one of these words in their names
mutants: $(VENV)/.tools $(VENV)/.horovod
	$(VENV)/bin/python tests/mutants.py $(ARGS)

.PHONY: demo check test lint benchmarks gpu fuzz site compare mutants
