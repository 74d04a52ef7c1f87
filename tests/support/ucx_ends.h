/* Two endpoints of transport ucx that are connected to each other, and what its tests do with them. Asserts with
 * cmocka.
 */
#ifndef TB_TESTS_UCX_ENDS_H
#define TB_TESTS_UCX_ENDS_H

#include "conformance.h"
#include "transport/ucx/ucx.h"

#include <sys/types.h>
#include <time.h>

enum { LARGE = 64 << 20 }; /* bytes of a message that takes a while */

/* Who is lost, of those that an endpoint knows. */
typedef struct losses {
    int count;
    int32_t rank;
    char why[128];
} losses;

/* By the endpoints of the last make. */
extern losses lost_by_a, lost_by_b;

/* Of endpoints that are opened from then on: whether they say that they work all the time. They do at first. */
extern bool ends_are_driven;
/* Their key. */
extern unsigned char ends_key[TB_KEY_SIZE];

/* What the tests of this program go over: TCP, or with "shm" as its first argument UCX's shared memory. False: there is
 * no UCX, which is said. */
bool choose_lanes(int argc, char **argv);

void open_one(tb_transport *t, int32_t rank, losses *l, unsigned char *address, size_t *n);
void connect_to(const tb_transport *t, int32_t rank, const unsigned char *address, size_t n);
void make(endpoints *e);
/* Both at once: an end that leaves waits for the other to take what is on its way. */
void unmake(endpoints *e);
void post(const tb_transport *t, tb_op *op);
void progress(endpoints *e);
time_t seconds(void);
/* Sleeps until one end has something to do. */
void rest(endpoints *e);
void work_until_lost(endpoints *e, const losses *l);
void send_byte(endpoints *e, bool from_a, uint64_t tag, unsigned char value);
/* Lets a send to b until the message is half in. One call of UCX at a time, else it would be all in at once. */
void work_until_half(endpoints *e);
/* Cancels an operation of one end while the other works. */
void cancel(tb_transport *t, tb_op *op, const tb_transport *other);
/* Closes one end while the other works. */
void leave(tb_transport *t, const tb_transport *other);
/* Another process, with an endpoint of rank 1, until it is killed. */
typedef struct stranger {
    pid_t pid;
    int up, down; /* what it says, what it is told */
    unsigned char address[TB_ADDRESS_MAX];
    size_t nbytes;
} stranger;

/* What it does there; `address` is the first that it was told, in and out are its ends of the pipes. */
typedef void stranger_part(tb_transport *t, const unsigned char *address, size_t nbytes, int in, int out,
                           const void *arg);

/* Begins when it has an address. It waits to be told one. */
void stranger_start(stranger *o, stranger_part *part, const void *arg);
void stranger_tell(const stranger *o, const void *bytes, size_t nbytes);
void stranger_kill(const stranger *o);
void stranger_close(const stranger *o);

/* That LARGE bytes are the same. */
void check(const unsigned char *memory, unsigned char value);

#endif
