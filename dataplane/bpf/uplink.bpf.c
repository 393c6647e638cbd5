/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A device that stays the host's. To the datapath go the overlay's packets to our own addresses,
 * and what is addressed to ports of them that the datapath has claimed: answers to translated
 * connections, Services' node ports, and ICMP errors about either. All else goes to the kernel
 * untouched.
 *
 * Later fragments name no port: the first one of a claimed packet is remembered. One that comes
 * before its first goes to the kernel, which finds no first and drops it.
 */
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/udp.h>

#include "common.h"

#define IPV4_MORE_FRAGMENTS 0x2000 /* RFC 791 section 3.1 */
#define IPV4_OFFSET 0x1fff
#define IPV6_MORE_FRAGMENTS 0x0001 /* RFC 8200 section 4.5 */
#define IPV6_OFFSET 0xfff8
#define FRAGMENT_HEADER 44
#define SCTP 132

/* ICMP's types (RFC 792) and ICMPv6's (RFC 4443); <linux/icmp.h> wants the C library. */
#define ICMP_ECHO_REPLY 0
#define ICMP_UNREACHABLE 3
#define ICMP_TIME_EXCEEDED 11
#define ICMP_PARAMETER_PROBLEM 12
#define ICMPV6_FIRST_ERROR 1
#define ICMPV6_LAST_ERROR 4
#define ICMPV6_ECHO_REPLY 129

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

/* A bit for each port. */
#define CLAIM_BYTES 8192
struct claims {
	__u8 bits[CLAIM_BYTES];
};

/* Whose ports; for ICMP, identifiers of echo requests. Those of IPv6 follow those of IPv4. */
enum { CLAIMS_TCP, CLAIMS_UDP, CLAIMS_SCTP, CLAIMS_ICMP, CLAIMS_OF_IPV4, CLAIMS_KINDS = 8 };

/* Shared by all uplinks, and written by the datapath's workers in its own memory. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, CLAIMS_KINDS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct claims);
} claims SEC(".maps");

/* A packet whose first fragment was claimed. */
struct fragment {
	__be32 src[4];
	__be32 id;
	__u32 protocol;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, struct fragment);
	__type(value, __u64); /* when the first came, in nanoseconds */
} fragments SEC(".maps");

/* The rest of a packet is waited for as long as Linux does (net.ipv4.ipfrag_time). */
#define FRAGMENT_NS (30ULL * 1000 * 1000 * 1000)

/* An IP packet to one of our addresses. */
struct packet {
	void *l4;
	__u32 protocol;
	__u32 is_v6;
	int is_first; /* of several fragments */
	int is_later;
	struct fragment fragment;
};

struct ports {
	__be16 src;
	__be16 dst;
};

struct icmp {
	__u8 type;
	__u8 code;
	__be16 checksum;
	__be16 identifier; /* of an echo */
	__be16 sequence;
};

static __always_inline int is_own_ipv6(const struct uplink_config *own,
				       const struct in6_addr *address)
{
	const __be32 *words = address->in6_u.u6_addr32;

	return ((own->ipv6[0] ^ words[0]) | (own->ipv6[1] ^ words[1]) |
		(own->ipv6[2] ^ words[2]) | (own->ipv6[3] ^ words[3])) == 0;
}

static __always_inline int read_ipv4(const struct uplink_config *own, struct iphdr *ip,
				     void *end, struct packet *out)
{
	__u16 offset;

	if ((void *)(ip + 1) > end || ip->ihl < 5 || ip->daddr != own->ipv4)
		return 0;
	offset = bpf_ntohs(ip->frag_off);
	out->l4 = (void *)ip + ip->ihl * 4;
	out->protocol = ip->protocol;
	out->is_later = (offset & IPV4_OFFSET) != 0;
	out->is_first = !out->is_later && (offset & IPV4_MORE_FRAGMENTS);
	out->fragment.src[0] = ip->saddr;
	out->fragment.id = ip->id;
	return 1;
}

static __always_inline int read_ipv6(const struct uplink_config *own, struct ipv6hdr *ip,
				     void *end, struct packet *out)
{
	struct {
		__u8 next;
		__u8 reserved;
		__be16 offset;
		__be32 id;
	} *header;

	if ((void *)(ip + 1) > end || !is_own_ipv6(own, &ip->daddr))
		return 0;
	out->l4 = ip + 1;
	out->protocol = ip->nexthdr;
	out->is_v6 = 1;
	if (ip->nexthdr != FRAGMENT_HEADER)
		return 1;
	header = out->l4;
	if ((void *)(header + 1) > end)
		return 0;
	out->l4 = header + 1;
	out->protocol = header->next;
	out->is_later = (header->offset & bpf_htons(IPV6_OFFSET)) != 0;
	out->is_first = !out->is_later && (header->offset & bpf_htons(IPV6_MORE_FRAGMENTS));
	__builtin_memcpy(out->fragment.src, &ip->saddr, sizeof(out->fragment.src));
	out->fragment.id = header->id;
	return 1;
}

/* Where a protocol's claims stand; negative for one without. */
static __always_inline int claims_of(__u32 protocol)
{
	switch (protocol) {
	case IPPROTO_TCP:
		return CLAIMS_TCP;
	case IPPROTO_UDP:
		return CLAIMS_UDP;
	case SCTP:
		return CLAIMS_SCTP;
	case IPPROTO_ICMP:
	case IPPROTO_ICMPV6:
		return CLAIMS_ICMP;
	default:
		return -1;
	}
}

static __always_inline int is_claimed(int kind, __u32 is_v6, __be16 port)
{
	__u32 key = is_v6 ? kind + CLAIMS_OF_IPV4 : kind;
	__u32 number = bpf_ntohs(port);
	struct claims *of;

	if (kind < 0)
		return 0;
	of = bpf_map_lookup_elem(&claims, &key);
	return of && (of->bits[(number >> 3) & (CLAIM_BYTES - 1)] & (1 << (number & 7)));
}

/* Whether the packet that an ICMP error quotes came from a port that is claimed. */
static __always_inline int quotes_claimed(void *quote, void *end, __u32 is_v6)
{
	__u32 protocol;
	void *l4;
	struct ports *ports;
	struct icmp *echo;

	if (is_v6) {
		struct ipv6hdr *ip = quote;

		if ((void *)(ip + 1) > end)
			return 0;
		protocol = ip->nexthdr;
		l4 = ip + 1;
	} else {
		struct iphdr *ip = quote;

		if ((void *)(ip + 1) > end || ip->ihl < 5)
			return 0;
		if (ip->frag_off & bpf_htons(IPV4_OFFSET))
			return 0;
		protocol = ip->protocol;
		l4 = quote + ip->ihl * 4;
	}
	if (protocol == IPPROTO_ICMP || protocol == IPPROTO_ICMPV6) {
		echo = l4;
		if ((void *)(echo + 1) > end)
			return 0;
		return is_claimed(CLAIMS_ICMP, is_v6, echo->identifier);
	}
	ports = l4;
	if ((void *)(ports + 1) > end)
		return 0;
	return is_claimed(claims_of(protocol), is_v6, ports->src);
}

/* Whether an ICMP message is an answer to a claimed identifier, or an error about a claimed
 * port. Identifiers are claimed for what is sent out, so a request from outside is the host's.
 */
static __always_inline int is_our_icmp(const struct packet *packet, void *end)
{
	struct icmp *icmp = packet->l4;
	int is_reply, is_error;

	if ((void *)(icmp + 1) > end)
		return 0;
	if (packet->is_v6) {
		is_reply = icmp->type == ICMPV6_ECHO_REPLY;
		is_error = icmp->type >= ICMPV6_FIRST_ERROR &&
			   icmp->type <= ICMPV6_LAST_ERROR;
	} else {
		is_reply = icmp->type == ICMP_ECHO_REPLY;
		is_error = icmp->type == ICMP_UNREACHABLE ||
			   icmp->type == ICMP_TIME_EXCEEDED ||
			   icmp->type == ICMP_PARAMETER_PROBLEM;
	}
	if (is_reply)
		return is_claimed(CLAIMS_ICMP, packet->is_v6, icmp->identifier);
	return is_error && quotes_claimed(icmp + 1, end, packet->is_v6);
}

static __always_inline int is_ours(const struct uplink_config *own,
				   const struct packet *packet, void *end)
{
	struct ports *ports = packet->l4;

	if (packet->protocol == IPPROTO_ICMP || packet->protocol == IPPROTO_ICMPV6)
		return is_our_icmp(packet, end);
	/* With fragments of a large frame the headers may lie beyond the linear part. */
	if ((void *)(ports + 1) > end)
		return 0;
	/* The overlay sends no fragments. */
	if (packet->protocol == IPPROTO_UDP && own->port && ports->dst == own->port)
		return !packet->is_first;
	return is_claimed(claims_of(packet->protocol), packet->is_v6, ports->dst);
}

static __always_inline int uplink(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data;
	void *end = (void *)(long)ctx->data_end;
	struct ethhdr *ethernet = data;
	struct packet packet = {};
	__u32 key = 0;
	__u64 now = bpf_ktime_get_ns();
	__u64 *since;
	struct uplink_config *own = bpf_map_lookup_elem(&config, &key);

	if (!own || (void *)(ethernet + 1) > end)
		return XDP_PASS;
	if (ethernet->h_proto == bpf_htons(ETH_P_IP)) {
		if (!read_ipv4(own, (void *)(ethernet + 1), end, &packet))
			return XDP_PASS;
	} else if (ethernet->h_proto == bpf_htons(ETH_P_IPV6)) {
		if (!read_ipv6(own, (void *)(ethernet + 1), end, &packet))
			return XDP_PASS;
	} else {
		return XDP_PASS;
	}
	packet.fragment.protocol = packet.protocol;
	if (packet.is_later) {
		since = bpf_map_lookup_elem(&fragments, &packet.fragment);
		return since && now - *since < FRAGMENT_NS ? to_socket(ctx) : XDP_PASS;
	}
	if (!is_ours(own, &packet, end)) {
		/* The number may have been that of one of ours before. */
		if (packet.is_first)
			bpf_map_delete_elem(&fragments, &packet.fragment);
		return XDP_PASS;
	}
	if (packet.is_first)
		bpf_map_update_elem(&fragments, &packet.fragment, &now, BPF_ANY);
	return to_socket(ctx);
}

SKEIN_PROGRAM(skein_uplink, uplink)
