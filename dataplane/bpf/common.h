/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the XDP programs share.
 *
 * Each source is compiled once and holds its program twice: in section "xdp" for kernels
 * without multi-buffer AF_XDP (< 6.6), and in "xdp.frags" for those with it. The loader
 * picks one; the verifier never sees the other.
 */
#ifndef SKEIN_COMMON_H
#define SKEIN_COMMON_H

#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

/* The most receive queues of a device. */
#define MAX_QUEUES 256

/* Socket of each receive queue. The kernel empties a slot when its socket closes. */
struct {
	__uint(type, BPF_MAP_TYPE_XSKMAP);
	__uint(max_entries, MAX_QUEUES);
	__type(key, __u32);
	__type(value, __u32);
} xsks SEC(".maps");

/*
 * To the socket of this packet's queue. Without one the packet is dropped, never passed:
 * the kernel's stack would forward it without policy, or answer it in our name.
 */
static __always_inline int to_socket(struct xdp_md *ctx)
{
	return bpf_redirect_map(&xsks, ctx->rx_queue_index, XDP_DROP);
}

/* Defines NAME ("xdp") and NAME_frags ("xdp.frags"), both calling VERDICT(ctx). */
#define SKEIN_PROGRAM(NAME, VERDICT)                          \
	SEC("xdp") int NAME(struct xdp_md *ctx)               \
	{                                                     \
		return VERDICT(ctx);                          \
	}                                                     \
	SEC("xdp.frags") int NAME##_frags(struct xdp_md *ctx) \
	{                                                     \
		return VERDICT(ctx);                          \
	}

char LICENSE[] SEC("license") = "Apache-2.0";

#endif
