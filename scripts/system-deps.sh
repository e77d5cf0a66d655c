#!/usr/bin/env bash
# Installs what kvscope's development environment needs from the system: Python 3.11 with venv, make, a headless
# Chromium (the tests of the live page do not run without), Prometheus with promtool (neither do the tests that scrape
# and query, and those of rules and alerts), and a C++ compiler (torch.compile builds its CPU kernels with one).
set -euo pipefail

if ! command -v apt-get >/dev/null; then
  echo "system-deps: no apt-get here; install python3.11 with its venv module, make and g++ yourself" >&2
  exit 1
fi
sudo=()
if [ "$(id -u)" -ne 0 ]; then sudo=(sudo); fi
packages=(make g++ ca-certificates chromium-headless-shell prometheus)
python3.11 -c 'import ensurepip, venv' 2>/dev/null || packages+=(python3.11 python3.11-venv)
"${sudo[@]}" apt-get update -q
"${sudo[@]}" apt-get install -q -y --no-install-recommends "${packages[@]}"
