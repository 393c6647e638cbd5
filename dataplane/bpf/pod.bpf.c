/* SPDX-License-Identifier: Apache-2.0 */
/* The host end of a pod's veth: everything that the pod sends goes to the datapath. */
#include "common.h"

SKEIN_PROGRAM(skein_pod, to_socket)
