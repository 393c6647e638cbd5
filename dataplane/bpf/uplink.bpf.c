/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A device that stays the host's: only the overlay's packets to our own addresses go to the
 * datapath, all else to the kernel untouched. Fragments and IPv6 extension headers pass: the
 * overlay sends neither.
 */
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/udp.h>

#include "common.h"

#define IPV4_FRAGMENT 0x3fff /* more fragments, or an offset (RFC 791 section 3.1) */

/* What is ours, in network byte order; an address of zeros matches nothing. */
struct uplink_config {
	__be16 port;
	__u8 unused[2];
	__be32 ipv4;
	__be32 ipv6[4];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct uplink_config);
} config SEC(".maps");

static __always_inline int is_own_ipv6(const struct uplink_config *own,
				       const struct in6_addr *address)
{
	const __be32 *words = address->in6_u.u6_addr32;

	return ((own->ipv6[0] ^ words[0]) | (own->ipv6[1] ^ words[1]) |
		(own->ipv6[2] ^ words[2]) | (own->ipv6[3] ^ words[3])) == 0;
}

/* The UDP header of a packet to one of our addresses, else NULL. */
static __always_inline struct udphdr *udp_to_us(const struct uplink_config *own,
						void *data, void *end)
{
	struct ethhdr *ethernet = data;

	if ((void *)(ethernet + 1) > end)
		return NULL;
	if (ethernet->h_proto == bpf_htons(ETH_P_IP)) {
		struct iphdr *ip = (void *)(ethernet + 1);

		if ((void *)(ip + 1) > end || ip->ihl < 5)
			return NULL;
		if (ip->protocol != IPPROTO_UDP || ip->daddr != own->ipv4)
			return NULL;
		if (ip->frag_off & bpf_htons(IPV4_FRAGMENT))
			return NULL;
		return (void *)ip + ip->ihl * 4;
	}
	if (ethernet->h_proto == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr *ip = (void *)(ethernet + 1);

		if ((void *)(ip + 1) > end || ip->nexthdr != IPPROTO_UDP)
			return NULL;
		return is_own_ipv6(own, &ip->daddr) ? (void *)(ip + 1) : NULL;
	}
	return NULL;
}

static __always_inline int uplink(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data;
	void *end = (void *)(long)ctx->data_end;
	__u32 key = 0;
	struct uplink_config *own = bpf_map_lookup_elem(&config, &key);
	struct udphdr *udp;

	if (!own)
		return XDP_PASS;
	udp = udp_to_us(own, data, end);
	/* With fragments of a large frame the headers may lie beyond the linear part. */
	if (!udp || (void *)(udp + 1) > end)
		return XDP_PASS;
	if (!own->port || udp->dest != own->port)
		return XDP_PASS;
	return to_socket(ctx);
}

SKEIN_PROGRAM(skein_uplink, uplink)
