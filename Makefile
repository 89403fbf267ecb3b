# Two commands set everything up on a fresh machine: `make demo` runs the main job, `make test` runs the tests.

PYTHON ?= python3
BIN := .venv/bin
export DS_BUILD_OPS := 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo install install-test test check unit test-nvme test-trackers test-lab test-faults test-sweep docs clean

demo: install
	$(BIN)/shardmake demo
	$(BIN)/snakemake --profile profiles/local
	$(BIN)/shardmake status docs-chat

install: .venv/installed

# torch goes first: DeepSpeed's build looks for it, and its version decides whether CUDA packages come along.
.venv/installed: pyproject.toml constraints.txt
	PYTHON=$(PYTHON) envs/system.sh demo
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install -q setuptools wheel
	$(BIN)/pip install -q -c constraints.txt --no-build-isolation -e .
	touch $@

install-test: .venv/installed-test

.venv/installed-test: .venv/installed
	PYTHON=$(PYTHON) envs/system.sh test
	$(BIN)/pip install -q -c constraints.txt --no-build-isolation -e '.[test]'
	touch $@

test: install-test
	$(MAKE) check
	$(BIN)/pytest -n 2 tests/unit
	$(BIN)/pytest -n 2 --dist loadgroup tests/workflow
	$(BIN)/pytest tests/cluster

# Style, types, workflow: seconds, no processes.
check: install-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/snakefmt --check Snakefile workflow
	$(BIN)/shardmake demo
	$(BIN)/snakemake --lint

unit: install-test
	$(BIN)/pytest tests/unit

# DeepSpeed compiles its asynchronous I/O and its Adam for several minutes first.
test-nvme: install-test
	$(BIN)/pytest -m nvme tests/workflow

# W&B and trackio bring packages along that nothing else here needs; trackio also wants another pillow than ours.
test-trackers: install-test
	$(BIN)/pip install -q -c constraints.txt wandb
	$(BIN)/pip install -q trackio
	$(BIN)/pytest -m trackers tests/workflow

# Two users of a lab at once on the three-node Slurm.
test-lab: install-test
	$(BIN)/pytest -m lab tests/cluster

# Every fault for every strategy on the three-node Slurm: two hours.
test-faults: install-test
	$(BIN)/pytest -m faults tests/cluster

# A rank is killed at every write of a save: about an hour.
test-sweep: install-test
	$(BIN)/pytest -m sweep tests/workflow

docs: install
	$(BIN)/python -m tools.config_reference

clean:
	rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
