/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The datapath's end of the host link: everything that the host routes into it goes to the
 * datapath. The same as for a pod today, under a name of its own, since bpftool and other
 * tools show the program's name.
 */
#include "common.h"

SKEIN_PROGRAM(skein_host, to_socket)
