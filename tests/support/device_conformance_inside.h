/* What the files of the suite share. */
#ifndef TB_TESTS_DEVICE_CONFORMANCE_INSIDE_H
#define TB_TESTS_DEVICE_CONFORMANCE_INSIDE_H

#include "asserts.h"
#include "device_conformance.h"
#include "numbers.h"

#include <sys/types.h>

enum { POISON = 0xa5, MOST_SOURCES = 20 };

/* Sources that are all in the buffer of a run. */
extern tb__mapping *in_buffer[MOST_SOURCES];

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { LESS = 4 }; /* so many times fewer cases */
#else
enum { LESS = 1 };
#endif

/* Another process, which has the same device and does what it is told. */
typedef struct peer {
    pid_t pid;
    int socket;
} peer;

enum { NPEERS = 3 };

typedef struct suite {
    const device_traits *traits;
    tb__device *device; /* that is tested */
    tb__device *host;
    bool is_host;    /* both are the same */
    unsigned nareas; /* on the device, so far */
    rng g;
    peer peers[NPEERS];
} suite;

/* ---- Runs ---- */

/* Lets both devices work until the fences are done. Fails the test after a minute. */
void wait_for(suite *s, tb__fence *const *fences, size_t n);
void wait_for_one(suite *s, tb__fence *fence);
/* One round of progress: whether any of the devices did something. */
bool progress_devices(suite *s);

/* Prepares moves and runs all of them, once. */
void run_moves(suite *s, tb__device *device, const tb__move *moves, size_t n, void *buffer);
/* The same, of moves that fail: returns the fence. */
tb__fence try_moves(suite *s, tb__device *device, const tb__move *moves, size_t n);

/* ---- Memory ---- */

/* Memory of a device, or of the host, and what is to be found in it: a copy in host memory. */
typedef struct area {
    tb__device *owner;
    uint8_t *at;    /* for moves */
    uint8_t *image; /* for the test */
    size_t nbytes;
} area;

area make_area(suite *s, tb__device *owner, size_t nbytes);
void free_area(area *a);
/* Writes the image to the memory. */
void put_area(suite *s, const area *a);
/* Fails the test if the memory differs from the image. */
void check_area(suite *s, const area *a, const char *what);
/* Reads the memory into `out`. */
void get_area(suite *s, const area *a, uint8_t *out);
void fill_random(suite *s, uint8_t *bytes, size_t nbytes);

/* A copy of bytes. `src` and `stride` are pointed to by the result. */
tb__move byte_move(void *dst, const void *const *src, size_t nbytes);

/* ---- Random boxes ---- */

enum { AREA_DST, AREA_SRC, AREA_HOST_SRC, AREA_BUFFER, NAREAS };

/* A move, and its places as offsets in areas. */
typedef struct box {
    tb__move move;
    int dst_area, src_area[MOST_SOURCES];
    size_t dst_offset, src_offset[MOST_SOURCES];
    const void *src[MOST_SOURCES];
    int64_t src_stride[MOST_SOURCES][TB_MAX_DIMS];
} box;

/* What may be in a move. */
typedef struct box_rules {
    tb_dtype src_dtype, wire_dtype, dst_dtype;
    uint32_t nsrc;
    tb_reduce_op op;
    uint64_t divisor;
    int64_t most;       /* elements */
    bool is_contiguous; /* with one dimension of `most` */
    int src_area;       /* or -1: any */
    int dst_area;       /* AREA_DST or AREA_BUFFER */
} box_rules;

typedef struct boxes {
    area areas[NAREAS];
    size_t used[NAREAS]; /* bytes that have places of destinations or of sources */
    box *box;
    size_t n;
} boxes;

void make_boxes(suite *s, boxes *b, size_t most_boxes, size_t area_nbytes);
void free_boxes(boxes *b);
void add_box(suite *s, boxes *b, const box_rules *rules, uint32_t part);
box_rules random_rules(suite *s, const boxes *b, int64_t most);
/* What the move does, in images. `images` are by area. */
void evaluate_box(const box *x, uint8_t *const *images);
tb__job *prepare_boxes(suite *s, const boxes *b);
/* The images' bytes to the areas, and poison to the destination. */
void put_boxes(suite *s, boxes *b);
void check_boxes(suite *s, boxes *b, const char *what);

/* ---- Other processes ---- */

void start_peers(suite *s);
void stop_peers(suite *s);

/* ---- Parts of the suite ---- */

void check_moves(suite *s);
void check_matrices(suite *s);
void check_casts(suite *s);
void check_reductions(suite *s);
void check_parts_of_jobs(suite *s);
void check_runs_at_once(suite *s);
void check_order(suite *s);
void check_cancel(suite *s);
void check_refusals(suite *s);
void check_shortage(suite *s);
void check_lifetimes(suite *s);
void check_checksums(suite *s);
void check_quantised(suite *s);
void check_not_finite(suite *s);
void check_sharing(suite *s);
void check_forged_keys(suite *s);
void check_dead_peer(suite *s);

#endif
