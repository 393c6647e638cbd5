#!/bin/sh
# Builds the test cluster's programs (Kubernetes' own, its end-to-end tests, agnhost and a pause
# program) into a cache outside the tree, and prints the folder that holds them. What is built
# already is not built again: the folder's name is a hash of all that goes into it.
#
#   SKEIN_CLUSTER_CACHE   the cache; ~/.cache/skein-cluster if unset
#   GO                    the go command; found in PATH or /usr/local/go/bin if unset
set -eu
cd "$(dirname "$0")/kubernetes"

go=${GO:-}
[ -n "$go" ] || go=$(command -v go || true)
[ -n "$go" ] || go=/usr/local/go/bin/go
if ! [ -x "$go" ]; then
    echo "cluster: no go command found: install Go 1.26 (https://go.dev/dl) and put it into PATH," >&2
    echo "cluster: or set GO to its path" >&2
    exit 1
fi
# The toolchain that is here, not one that it would fetch.
export GOTOOLCHAIN=local
version=$("$go" env GOVERSION)
minor=$(echo "$version" | sed -n 's/^go1\.\([0-9]*\).*/\1/p')
if [ "${minor:-0}" -lt 26 ]; then
    echo "cluster: $go is $version; Kubernetes' programs need Go 1.26 or newer" >&2
    exit 1
fi
# From 1.27 on encoding/json is the new implementation, which breaks /openapi/v2 of 1.36.
[ "$minor" -lt 27 ] || export GOEXPERIMENT=nojsonv2
export CGO_ENABLED=0

kubernetes=$(sed -n 's,^[[:space:]]*k8s.io/kubernetes v\([^ ]*\).*,\1,p' go.mod)
stamp="-X k8s.io/component-base/version.gitVersion=v$kubernetes"
stamp="$stamp -X k8s.io/component-base/version.gitMajor=${kubernetes%%.*}"
stamp="$stamp -X k8s.io/component-base/version.gitMinor=$(echo "$kubernetes" | cut -d . -f 2)"

cache=${SKEIN_CLUSTER_CACHE:-${XDG_CACHE_HOME:-${HOME:?}/.cache}/skein-cluster}
# The number is raised when this script puts something else into the folder.
key=$({ cat go.mod go.sum pause/main.go; echo "$version $("$go" env GOARCH) $stamp 2"; } |
    sha256sum | cut -c 1-16)
out=$cache/$key
if [ -e "$out/complete" ]; then
    echo "$out"
    exit 0
fi
mkdir -p "$out"

# program NAME COMMAND...: one program, by way of a name that only a finished one gets.
program() {
    name=$1
    shift
    [ ! -e "$out/$name" ] || return 0
    begin=$(date +%s)
    "$go" "$@" -mod=readonly -trimpath -ldflags "-s -w $stamp" -o "$out/.$name" "$package" >&2
    mv "$out/.$name" "$out/$name"
    echo "cluster: built $name in $(($(date +%s) - begin)) s" >&2
}
echo "cluster: building Kubernetes $kubernetes into $out; the first time this takes long" >&2
for name in kube-apiserver kube-controller-manager kube-scheduler kubelet kubectl kube-proxy; do
    package=k8s.io/kubernetes/cmd/$name program "$name" build
done
package=k8s.io/kubernetes/test/images/agnhost program agnhost build
package=./pause program pause build
package=k8s.io/kubernetes/test/e2e program e2e.test test -c

# What agnhost serves TLS with, where a test asks it to.
source=$("$go" list -m -f '{{.Dir}}' k8s.io/kubernetes)
for name in localhost.crt localhost.key; do
    cp "$source/test/images/agnhost/porter/$name" "$out/$name"
done
touch "$out/complete"
echo "$out"
