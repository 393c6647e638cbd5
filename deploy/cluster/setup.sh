#!/bin/sh
# Installs the Debian or Ubuntu packages that the test cluster needs beside those of the lab
# (deploy/setup.sh); does nothing when all of them are there. Go is the user's own.
set -eu

packages=""
# need COMMAND PACKAGE: the package is wanted when the command is missing.
need() {
    command -v "$1" >/dev/null 2>&1 || [ -x "/usr/sbin/$1" ] || packages="$packages $2"
}
need containerd containerd
need runc runc
need etcd etcd-server
need openssl openssl              # the cluster's certificates
need iptables iptables            # kube-proxy's rules
need conntrack conntrack
need sysctl procps
need busybox busybox-static       # what goes into the tests' image
need dash dash
need nc.openbsd netcat-openbsd
need curl curl
[ -e /usr/lib/cni/bridge ] || packages="$packages containernetworking-plugins"
[ -n "$packages" ] || exit 0

if ! command -v apt-get >/dev/null 2>&1; then
    echo "cluster: these Debian packages' programs are missing:$packages; install your" >&2
    echo "cluster: distribution's own, then run this again" >&2
    exit 1
fi
sudo=""
[ "$(id -u)" = 0 ] || sudo=sudo
echo "cluster: installing$packages" >&2
$sudo apt-get update -qq
# Debian would start containerd and etcd as services, and etcd listens: none of that is wanted.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' | $sudo tee "$policy" >/dev/null
    $sudo chmod 755 "$policy"
    trap '$sudo rm -f "$policy"' EXIT
    trap 'exit 1' INT TERM
fi
# shellcheck disable=SC2086 # a list of words
DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends $packages \
    >/dev/null
