/* `tensorbus demo`: what its files share. */
#ifndef TB_TOOLS_DEMO_H
#define TB_TOOLS_DEMO_H

#include "tools/move.h"

enum { DEMO_NVERSIONS = 3 };

/* What was measured of one version. */
typedef struct demo_version {
    double seconds;
    double phase[TB_PHASE_COUNT]; /* of the rank that was slowest in it */
} demo_version;

typedef struct demo {
    tool_job job;
    tool_llama llama;
    tool_ranks *ranks;
    tool_mover mover; /* in a rank's process: that rank */
    int nmoved;       /* versions */
    tool_step step;
    demo_version version[DEMO_NVERSIONS];
    int64_t nverified; /* bytes, of all versions */
    double memcpy_gb_per_s;
    int nthreads; /* of memcpy */
} demo;

/* (demo_report.c) The moving line: which version, what is done with it, how much of that; and the report. */
void demo_show_progress(const demo *d);
void demo_add_report(tb__text *out, const demo *d);

#endif
