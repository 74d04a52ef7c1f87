/* What every device must do: the same bits as reference arithmetic that shares no code with any device, whatever the
 * shapes, places and order of work; no byte beside them; failures that say what they are; memory of other processes. */
#ifndef TB_TESTS_DEVICE_CONFORMANCE_H
#define TB_TESTS_DEVICE_CONFORMANCE_H

#include "device/device.h"

typedef struct device_traits {
    const char *name; /* of a device in tb__devices */
    /* (optional) Puts another offset and size into the bytes of a memory key. NULL: keys of this device have none. */
    void (*forge_key)(unsigned char *key, size_t key_nbytes, uint64_t offset, uint64_t nbytes);
    bool has_opaque_fds; /* nothing tells which memory a descriptor stands for */
    unsigned nunits;     /* memory is on so many units, in turn; 0: one */
} device_traits;

/* All of the suite. Asserts with cmocka. It forks first of all: there must be no other threads, and no workers. */
void device_conformance(const device_traits *traits);

#endif
