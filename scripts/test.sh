#!/usr/bin/env bash
# The whole check, as continuous integration runs it: environment, style and types, unit tests, the real engine with
# both model runners, coverage. Stops at the first stage that fails and says how long each took.
#
# An engine in a test keeps one core busy; two run at a time.
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

# Triton's interpreter is Python, too: tracing it would double the time of V2, whose adapter has a unit test.
run_pytest() {
  if [[ "$*" == *--runner=v2* ]]; then
    "$python" -m pytest "$@"
  else
    COVERAGE_FILE=build/test/.coverage "$python" -m coverage run -m pytest "$@"
  fi
}

# `two_at_a_time NAME "ARGUMENTS" ...`: runs selections of tests, each in a process of its own, two at any moment since
# there are two cores. What a selection prints is shown when it is through, so that the lines do not mix.
two_at_a_time() {
  local status=0 running=0
  while [ $# -gt 0 ]; do
    if [ "$running" -eq 2 ]; then
      wait -n || status=1
      running=1
    fi
    # Arguments are split at spaces; none of them has one inside.
    # shellcheck disable=SC2086
    (run_pytest $2 -q -p no:cacheprovider >"$reports/$1.txt" 2>&1; code=$?; echo "-- $1"; cat "$reports/$1.txt"; exit "$code") &
    running=$((running + 1))
    shift 2
  done
  while [ "$running" -gt 0 ]; do
    wait -n || status=1
    running=$((running - 1))
  done
  return "$status"
}

unit_tests() {
  two_at_a_time rules "tests/unit/checks tests/unit/state" others "tests/unit --ignore=tests/unit/checks --ignore=tests/unit/state"
}

# The longest first. A process cannot change its runner.
engine_tests() {
  local faults=tests/engine/test_faults.py
  two_at_a_time \
    v2-faults "$faults --runner=v2" v1-faults "$faults --runner=v1" \
    v2 "tests/engine --runner=v2 --ignore=$faults" v1 "tests/engine --runner=v1 --ignore=$faults"
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
