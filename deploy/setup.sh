#!/bin/sh
# Installs the Debian or Ubuntu packages that building and testing need; does nothing when all
# of them are there. The Rust toolchain is the user's own.
set -eu

packages=""
# need COMMAND PACKAGE: the package is wanted when the command is missing.
need() {
    command -v "$1" >/dev/null 2>&1 || [ -x "/usr/sbin/$1" ] || packages="$packages $2"
}
need clang clang                  # compiles the XDP programs
need llvm-strip llvm              # strips their debug sections but BTF
need cc gcc                       # links
need make make
need ip iproute2                  # the lab's namespaces and links
need ethtool ethtool              # offloads of the lab's wires
need ping iputils-ping            # what the demo and the tests send
need iperf3 iperf3
need tcpdump tcpdump              # what they look at
need nft nftables                 # the check that nodes have no rules; the baselines' rules
need iptables iptables
need nsenter util-linux
need openssl openssl              # certificates of the lab's Kubernetes
[ -e /usr/include/bpf/bpf_helpers.h ] || packages="$packages libbpf-dev"
[ -e /usr/include/linux/bpf.h ] || packages="$packages linux-libc-dev"

if ! command -v cargo >/dev/null 2>&1; then
    echo "setup: no cargo found: install a Rust toolchain (1.95 or later) first" >&2
    exit 1
fi
[ -n "$packages" ] || exit 0

if ! command -v apt-get >/dev/null 2>&1; then
    echo "setup: these Debian packages' programs are missing:$packages; install your" >&2
    echo "setup: distribution's own, then run this again" >&2
    exit 1
fi
sudo=""
[ "$(id -u)" = 0 ] || sudo=sudo
echo "setup: installing$packages"
$sudo apt-get update -qq
# shellcheck disable=SC2086 # a list of words
DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends $packages >/dev/null
