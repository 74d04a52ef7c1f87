/* A device for tests, "slow", which shows what a GPU would show, without one. The addresses of its memory have no
 * access rights: whoever reads or writes there dies at once. The device itself uses a second mapping of the same
 * memory. Runs are done by a thread of the device's own, after random delays, their moves in random order and mixed
 * with those of other runs. Memory that was freed is not used again, and dies even if the device touches it.
 *
 * A device that is closed, a job that is released, a mapping that is unmapped and memory that is freed too early end
 * the process with a message, and so does a run of a job that uses what is unmapped.
 * All functions here may be called from any thread. */
#ifndef TB_TESTS_SLOW_DEVICE_H
#define TB_TESTS_SLOW_DEVICE_H

#include "device/device.h"

extern const tb__device_ops slow_device_ops;

/* The library finds it, before the host device, when it opens devices from now on. */
void slow_device_install(void);

/* Where tests can read and write what is in its memory, while no run touches that. */
void *slow_device_bytes(const void *address);

/* Memory of the device, for as long as the process has it, whichever devices are open. Never NULL. */
void *slow_device_alloc(size_t nbytes);
/* The same on one of its units, which are any numbers, and so that it can't be shared with other processes. */
void *slow_device_alloc_on(int unit, bool is_shareable, size_t nbytes);
void slow_device_free(void *address);

/* Other memory takes the place of this, at the same address, with anything in it. */
void slow_device_replace(void *address);

/* Memory of other processes that the devices of this one have mapped. */
size_t slow_device_count_mappings(void);
/* Runs that wrote to a buffer in its memory. */
size_t slow_device_count_buffer_runs(void);
/* Memory that the library has allocated on this unit, of all devices that are open in this process. */
size_t slow_device_count_allocations(int unit);

/* Of random delays and orders. At first delays are up to 300 microseconds, now and then ten times that. */
void slow_device_set_seed(uint64_t seed);
void slow_device_set_delay(int64_t most_us);

typedef enum slow_device_call {
    SLOW_DEVICE_OPEN,
    SLOW_DEVICE_ALLOC,
    SLOW_DEVICE_SHARE,
    SLOW_DEVICE_MAP,
    SLOW_DEVICE_PREPARE,
    SLOW_DEVICE_RUN, /* and checksum */
    SLOW_DEVICE_NCALLS
} slow_device_call;

/* In what follows, n counts from now on, in all devices of the process; 0 is the next one. */

/* The n-th of these calls fails, once. */
void slow_device_fail_call(slow_device_call call, long n, tb_status status);
/* The n-th run, or checksum, does some of its moves and fails. */
void slow_device_fail_run(long n, tb_status status, const char *why);
/* The n-th run, or checksum, does some of its moves and stops there, cancelled or not, until runs are let go. */
void slow_device_hold_run(long n);
void slow_device_let_go(void);
/* Nothing fails any more, and nothing is held. */
void slow_device_mend(void);

#endif
