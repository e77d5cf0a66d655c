.DEFAULT_GOAL := help
.PHONY: help setup demo test test-long matrix scrapers picture lint clean system-deps

help:           ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup:          ## create .venv, install vLLM (CPU), kvscope and the tools, build the tiny models
	@scripts/bootstrap.sh

demo: setup     ## run a real engine with kvscope on and show what it finds
	@.venv/bin/kvscope demo

test:           ## style, types, unit tests, then the real engine with both runners
	@scripts/test.sh

test-long: setup ## what `make test` leaves out: every fault with both runners and in each way, long forms; over an hour
	@.venv/bin/python -m pytest tests/unit --long -q
	@for runner in v1 v2; do .venv/bin/python -m pytest tests/engine --runner $$runner --long -q || exit 1; done

matrix: setup   ## every feature of vLLM with both runners, kvscope off and on; about half an hour
	@.venv/bin/python -m kvscope.testing.matrix

scrapers: setup ## whether 50 scrapers cost the engine time, which they must not (needs two cores); four minutes
	@.venv/bin/python -m kvscope.testing.scrapers

picture: setup  ## take the picture of the live page in the README again (needs a Chromium); two minutes
	@.venv/bin/python scripts/take_picture.py

lint: setup     ## style and types only
	@scripts/lint.sh

system-deps:    ## install the system packages that a bare Debian or Ubuntu lacks (asks for root)
	@scripts/system-deps.sh

clean:          ## remove what was built, except .venv
	rm -rf build dist .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .hypothesis
