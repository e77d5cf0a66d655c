#!/usr/bin/env bash
# The whole check, as continuous integration runs it: environment, style and types, unit tests, the real engine with
# both model runners, coverage. Stops at the first stage that fails and says how long each took.
#
# The two engine stages run side by side, one process a runner: a process cannot change its runner, and an engine in
# a test keeps one core busy.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

began=$SECONDS
reports=build/test
python=.venv/bin/python
# The packages whose rules decide what is a finding are held to this coverage, in per cent.
required_coverage=90
judging=(facts state checks boundary)

stage() {
  local name=$1 from=$SECONDS
  shift
  echo "== $name"
  if "$@"; then
    echo "== $name: $((SECONDS - from)) s"
  else
    echo "== $name: FAILED after $((SECONDS - from)) s" >&2
    echo "== total: $((SECONDS - began)) s" >&2
    exit 1
  fi
}

covered_pytest() { COVERAGE_FILE=build/test/.coverage "$python" -m coverage run -m pytest "$@"; }

unit_tests() { covered_pytest tests/unit -q -p no:cacheprovider; }

# Runs both; the second one's output is shown when the first is through, so that the lines do not mix.
engine_tests() {
  local other status=0
  covered_pytest tests/engine --runner v2 -m "not long" -q -p no:cacheprovider >"$reports/engine-v2.txt" 2>&1 &
  other=$!
  echo "-- runner v1"
  covered_pytest tests/engine --runner v1 -m "not long" -q -p no:cacheprovider || status=1
  wait "$other" || status=1
  echo "-- runner v2 (ran beside it)"
  cat "$reports/engine-v2.txt"
  return "$status"
}

coverage_report() {
  local include="" package
  for package in "${judging[@]}"; do
    if [ -d "src/kvscope/$package" ]; then include+="${include:+,}src/kvscope/$package/*"; fi
  done
  export COVERAGE_FILE=build/test/.coverage
  "$python" -m coverage combine -q
  "$python" -m coverage report --format=total | sed 's/$/ % of kvscope is covered/'
  if [ -z "$include" ]; then
    echo "not run: coverage threshold: none of ${judging[*]} exists"
    return
  fi
  "$python" -m coverage report --include="$include" --fail-under="$required_coverage"
}

stage bootstrap scripts/bootstrap.sh
rm -rf "$reports" && mkdir -p "$reports"
stage "style and types" scripts/lint.sh
stage "unit tests" unit_tests
stage "engine tests" engine_tests
stage coverage coverage_report
echo "== total: $((SECONDS - began)) s"
