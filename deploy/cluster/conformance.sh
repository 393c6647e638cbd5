#!/bin/sh
# Runs Kubernetes' network conformance tests on a cluster of two nodes and writes the results to
# docs/conformance.md; exits with 0 only if all passed. As root, or with SUDO in the environment.
#
#   CNI      reference or skein
#   FOCUS    which specs, a regular expression
#   LAB      the program skein-lab
#   SKIP     and which not; by default those of DNS, since the cluster has no name server
set -eu
cd "$(dirname "$0")/../.."
lab="${SUDO:-} ${LAB:-target/release/skein-lab}"
focus=${FOCUS:-'\[sig-network\].*\[Conformance\]'}
skip=${SKIP:-'DNS'}

# shellcheck disable=SC2086 # $lab is a list of words, here and below
name=$($lab cluster up --nodes 2 --cni "${CNI:-reference}" |
    sed -n 's/^cluster \(sk[0-9a-f]*\) is up.*/\1/p')
trap '$lab cluster down --lab "$name"' EXIT
trap 'exit 1' INT TERM
# shellcheck disable=SC2086
$lab cluster e2e --lab "$name" --skip "$skip" --markdown docs/conformance.md "$focus"
