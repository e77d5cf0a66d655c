#!/usr/bin/env bash
# Style, and types as each supported Python version sees them; `lint.sh style` or `lint.sh types VERSION` for a part.
# Expects an environment made by bootstrap.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

style() {
  .venv/bin/ruff check .
  .venv/bin/ruff format --check .
}

types() { .venv/bin/mypy --python-version "$1"; }

if [ $# -gt 0 ]; then
  "$@"
else
  style
  for version in 3.10 3.11 3.12; do types "$version"; done
fi
