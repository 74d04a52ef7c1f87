/* Detects GPUs, in a separate process. */
#include "tools/gpu.h"

#include "tools/doctor.h"

#include <string.h>
#include <unistd.h>

static tb_status describe(tool_gpus *gpus) {
    TB_TRY(tb__cuda_describe_driver(&gpus->driver));
    gpus->n = gpus->driver.ngpus < TOOL_MAX_GPUS ? gpus->driver.ngpus : TOOL_MAX_GPUS;
    for (int i = 0; i < gpus->n; i++) {
        TB_TRY(tb__cuda_describe_gpu(i, &gpus->gpu[i]));
        for (int k = 0; k < gpus->n; k++)
            gpus->reaches[i][k] = i != k && tb__cuda_can_reach(i, k);
    }
    return TB_OK;
}

static bool look(const void *arg, int out) {
    tool_gpus gpus = {0};
    (void)arg;
    _Static_assert(sizeof gpus < DOCTOR_SAID, "it fits into an answer");
    bool is_there = describe(&gpus) == TB_OK;
    if (is_there)
        return write(out, &gpus, sizeof gpus) == (ssize_t)sizeof gpus;
    (void)!write(out, tb_error_detail(), strlen(tb_error_detail()));
    return false;
}

tb_status tool_gpus_look(tool_gpus *out) {
#ifndef TB_HAS_CUDA
    (void)out;
    (void)look;
    return tb__fail(TB_REFUSED, "this build has no CUDA device: " TB_NO_CUDA);
#else
    doctor_answer answer;
    doctor_probe(look, NULL, &answer);
    if (!answer.is_ok)
        return tb__fail(TB_REFUSED, "%s", answer.said);
    memcpy(out, answer.said, sizeof *out);
    if (out->n == 0)
        return tb__fail(TB_REFUSED, "the driver of CUDA is there, but no GPU");
    return TB_OK;
#endif
}
