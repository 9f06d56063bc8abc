# Targets for developers. Everything runs in .venv, which is installed from the lock files, with hashes.

PYTEST := .venv/bin/python -m pytest
LOCK   := .venv/bin/uv pip compile --universal --fork-strategy fewest --python-version 3.11 --generate-hashes --no-emit-index-url \
          --no-emit-find-links --no-annotate --quiet --custom-compile-command "make lock"

.DEFAULT_GOAL := help
.PHONY: help venv serve cluster test check audit quick-tests format bench bench-peers bench-both torture simulate mutate dist docs man lock etc clean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-18s %s\n", $$1, $$2 }'

serve:  ## install dependencies, then run the daemon; options go in ARGS="--bind 127.0.0.1:0"
	@etc/venv run
	@exec .venv/bin/plainsong serve $(ARGS)

# DATA and PORTS reach it through the environment.
cluster:  ## run ZooKeeper, HBase with its gateway and three instances on this machine; Ctrl-C stops all
	@etc/venv run
	@exec etc/cluster/up

test: venv tools  ## run every ring of tests, in parallel; some of them: RINGS="sql spark"
	@exec .venv/bin/python -m tests.rings $(RINGS)

check: venv audit  ## quick checks: format, lint, types, layers, dependencies, and the fast tests
	@$(MAKE) --no-print-directory static
	$(PYTEST) $(wildcard tests/test_house.py tests/protocol tests/actors)

sync:  ## write the client for threads (plainsong/_sync) from the one for event loops (plainsong/_async)
	.venv/bin/python scripts/unasync.py

.PHONY: static sync
static:
	.venv/bin/python scripts/unasync.py --check
	.venv/bin/python scripts/manpages.py --check
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/mypy --config-file tests/mypy.ini tests
	.venv/bin/mypy $(wildcard examples/*.py)
	.venv/bin/lint-imports --no-cache

audit: venv  ## look up the locked dependencies in the database of known vulnerabilities
	.venv/bin/python scripts/audit.py

format: venv  ## format the code
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

bench:  ## run the benchmark; report and plots in bench/report; options go in ARGS
	@etc/venv bench
	.venv/bin/python -m bench $(ARGS)

bench-peers:  ## compare the daemon with the original service, Kafka, NATS, Redis and PostgreSQL, all synced; report in bench/report/peers
	@etc/venv bench
	.venv/bin/python -m bench.peers $(ARGS)

bench-both:  ## compare everything else that the original service can do; report in bench/report/both
	@etc/venv bench
	.venv/bin/python -m bench.peers.both $(ARGS)

torture: venv tools  ## run every test with many more rounds, an hour of soak, and every disk call failing (hours); report in build/torture
	@etc/venv bench
	@status=0; \
	$(PYTEST) -m "torture or not torture" --hypothesis-profile=torture || status=1; \
	.venv/bin/python -m tests.torture.soak || status=1; \
	.venv/bin/python -m tests.torture $(ARGS) || status=1; \
	exit $$status

simulate: venv  ## run simulated daemons under simulated faults, judged by a checker: ARGS="--seconds 600", ARGS="--seed 7"
	.venv/bin/python -m tests.simulation $(ARGS)

mutate: venv  ## mutate the protocol's code: each mutation should fail a test; ARGS="--sample 200", ARGS="--help"
	.venv/bin/python -m tests.mutation $(ARGS)

dist: venv  ## build the three distributions into dist/: client, server, Spark
	.venv/bin/python scripts/dist.py

docs: venv  ## write the API reference (docs/reference) from the code, and build the site of all documents into build/site
	.venv/bin/python scripts/reference.py
	.venv/bin/python scripts/site.py

man: venv  ## write the manual pages and the shells' completions (etc/dist/*/share) from the verbs
	.venv/bin/python scripts/manpages.py

venv:
	@etc/venv dev

.PHONY: tools
tools:
	@etc/tools

lock:  ## resolve the dependencies of pyproject.toml again (the only target that chooses versions)
	@etc/venv dev
	.venv/bin/python -m pip install --quiet "uv>=0.8"
	$(LOCK) pyproject.toml --group run --upgrade -o requirements.lock
	$(LOCK) pyproject.toml --group run --upgrade --group dev -c requirements.lock -o requirements-dev.lock
	$(LOCK) pyproject.toml --group run --upgrade --group bench -c requirements-dev.lock -o requirements-bench.lock
	$(LOCK) --upgrade --group pyproject.toml:audit -c requirements-dev.lock -o requirements-audit.lock
	$(LOCK) --upgrade --group pyproject.toml:mutate -c requirements-dev.lock -c requirements-audit.lock -o requirements-mutate.lock
	$(LOCK) --upgrade --group pyproject.toml:engines -c requirements-dev.lock -o requirements-engines.lock

pictures: venv tools  ## take the console's pictures again, into docs/pictures
	.venv/bin/python -m tests.console.pictures

etc: venv  ## write etc/plainsong.toml from the settings in broker/config
	.venv/bin/python -m broker.config.example > etc/plainsong.toml

clean:  ## remove .venv and all caches; never a data directory
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
