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

/* The device has so many units: "slow:0" to "slow:7". */
enum { SLOW_DEVICE_NUNITS = 8 };

/* Memory of unit 0, for as long as the process has it, whichever devices are open. Never NULL. */
void *slow_device_alloc(size_t nbytes);
/* The same on any unit, and so that it can't be shared with other processes. */
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
/* Bytes of host memory that are pinned. */
size_t slow_device_pinned(void);

/* A stream: a queue of work of the program's own on the device. The handle of one is a slow_stream *, that of the
 * default stream NULL. */
typedef struct slow_stream slow_stream;
typedef struct slow_work slow_work;

slow_stream *slow_stream_create(void);
void slow_stream_destroy(slow_stream *stream); /* with its work, all of which must be done */
/* Adds work: when all before it is done, and it is not held, it calls `fn`, unless that is NULL, and is done. `fn` must
 * not call the library nor what is declared here. */
slow_work *slow_stream_add(slow_stream *stream, void (*fn)(void *arg), void *arg, bool is_held);
void slow_work_let_go(slow_work *work);
bool slow_work_wait(slow_work *work, int timeout_ms); /* false: it is not done after so long */
/* All that was added so far, by the library as well. */
size_t slow_stream_count(slow_stream *stream);
/* As while a graph of it is made. */
void slow_stream_set_captured(slow_stream *stream, bool is_captured);
/* What the library has recorded and comes now fails. */
void slow_stream_fail(slow_stream *stream, tb_status status, const char *why);

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
    SLOW_DEVICE_PIN,
    SLOW_DEVICE_STREAM, /* record, wait and gates */
    SLOW_DEVICE_NCALLS
} slow_device_call;

/* In what follows, n counts from now on, in all devices of the process; 0 is the next one. */

/* The n-th of these calls fails, once. */
void slow_device_fail_call(slow_device_call call, long n, tb_status status);
/* The n-th run, or checksum, does some of its moves and fails. */
void slow_device_fail_run(long n, tb_status status, const char *why);
/* The n-th run, or checksum, does some of its moves and stops there, cancelled or not, until runs are let go. */
void slow_device_hold_run(long n);
void slow_device_let_go(void); /* and waits until those that had begun have ended */
/* Nothing fails any more, and nothing is held. */
void slow_device_mend(void);

#endif
