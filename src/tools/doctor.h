/* `tensorbus doctor`: what its files share. A *check* looks at one thing and adds what it has found. */
#ifndef TB_TOOLS_DOCTOR_H
#define TB_TOOLS_DOCTOR_H

#include "tools/tools.h"

/* How it is with one thing. */
typedef enum doctor_state {
    DOCTOR_OK,
    DOCTOR_LIMITED, /* something is slower without it, or can't be had */
    DOCTOR_FAILED,  /* tensorbus does not work without it */
} doctor_state;

typedef struct doctor_finding {
    char *name, *found;
    const char *remedy; /* NULL: nothing is to be done */
    doctor_state state;
} doctor_finding;

typedef struct doctor {
    const char *store, *token; /* NULL: not to be looked at; none */
    TB_VEC(doctor_finding) findings;
    bool has_failed; /* no memory */
    bool is_refused; /* the store's URL is none */
    bool is_over;    /* what else is looked at would only seem to be missing */
} doctor;

void doctor_add(doctor *d, doctor_state state, const char *name, const char *remedy, const char *format, ...)
    __attribute__((format(printf, 5, 6)));

/* ---- What the system gives (doctor_system.c) ----------------------------------------------------------------- */

void doctor_process_vm(doctor *d, const char *name);
void doctor_tb_alloc(doctor *d, const char *name);
void doctor_huge_pages(doctor *d, const char *name);
void doctor_dev_shm(doctor *d, const char *name);
/* Whether there is room in it, and it may be written to. */
bool doctor_has_dev_shm(void);
void doctor_memlock(doctor *d, const char *name);
void doctor_descriptors(doctor *d, const char *name);
void doctor_cores(doctor *d, const char *name);
void doctor_vectors(doctor *d, const char *name);
void doctor_copies(doctor *d, const char *name);

/* ---- GPUs (doctor_gpu.c) ------------------------------------------------------------------------------------- */

void doctor_gpus(doctor *d, const char *name);

/* ---- Transports and the store (doctor_transport.c, doctor_store.c) -------------------------------------------------
 */

void doctor_transports(doctor *d, const char *name);
void doctor_store(doctor *d, const char *name);

/* ---- Probes (doctor_probe.c) --------------------------------------------------------------------------------- */

enum { DOCTOR_SAID = 4096 };

typedef struct doctor_answer {
    bool is_ok;             /* it came to its end, and has found nothing wrong */
    char said[DOCTOR_SAID]; /* what it wrote, or what has become of it */
} doctor_answer;

/* Has a forked child look, because what it calls is not ours, and may hang or abort: it is killed after some seconds.
 * The child writes to the descriptor; what else it says is lost. */
void doctor_probe(bool (*look)(const void *arg, int out), const void *arg, doctor_answer *out);

#endif
