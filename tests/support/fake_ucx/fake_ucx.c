/* A UCX with CUDA for tests on machines without a GPU: the system's UCX, which takes memory of the fake driver's GPUs
 * (tests/support/fake_cuda/fake_cuda.h) where the host can access it. Who breaks the rules for such memory dies with a
 * message: it is one piece, sent by rendezvous, its kind is told, and a context is current in the thread.
 *
 * Environment: FAKE_UCX_DELAY_US, how long a send from memory of a GPU takes longer (0). */
#include "../fake_cuda/fake_cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <ucp/api/ucp.h>

#define EXPORTED __attribute__((visibility("default")))

EXPORTED extern _Atomic long fake_ucx_sent_from_gpu, fake_ucx_received_on_gpu;
_Atomic long fake_ucx_sent_from_gpu, fake_ucx_received_on_gpu;

static void *find(const char *name) {
    void *function = dlsym(RTLD_NEXT, name);
    if (!function) { /* this library was opened with RTLD_LOCAL */
        void *ucx = dlopen("libucp.so.0", RTLD_NOW | RTLD_LOCAL);
        function = ucx ? dlsym(ucx, name) : NULL;
    }
    if (!function)
        abort();
    return function;
}

static _Noreturn void die(const char *what) {
    fprintf(stderr, "fake UCX: %s\n", what);
    abort();
}

static void *look(const void *address, size_t nbytes) {
    const fake_cuda_control *fake = fake_cuda();
    return fake ? fake->look(address, nbytes) : NULL;
}

/* Where the memory of a request is for UCX; *own is what it is told. */
static void *translate(const void *buffer, size_t count, const ucp_request_param_t *param, ucp_request_param_t *own) {
    bool is_list = param->op_attr_mask & UCP_OP_ATTR_FIELD_DATATYPE && param->datatype == ucp_dt_make_iov();
    *own = *param;
    if (!(param->op_attr_mask & UCP_OP_ATTR_FIELD_MEMORY_TYPE))
        die("a request whose kind of memory is not told");
    if (param->memory_type == UCS_MEMORY_TYPE_HOST) {
        const ucp_dt_iov_t *list = buffer;
        for (size_t i = 0; is_list && i < count; i++) {
            if (look(list[i].buffer, list[i].length))
                die("memory of a GPU in a list");
        }
        if (!is_list && look(buffer, count))
            die("memory of a GPU that is called memory of the host");
        return (void *)(uintptr_t)buffer;
    }
    void *at = look(buffer, count);
    if (is_list || !at)
        die("memory that is called a GPU's, and is not");
    if (!fake_cuda()->has_context())
        die("memory of a GPU without a current context");
    own->memory_type = UCS_MEMORY_TYPE_HOST;
    return at;
}

EXPORTED ucs_status_t ucp_context_query(ucp_context_h context, ucp_context_attr_t *attr) {
    ucs_status_t (*real)(ucp_context_h, ucp_context_attr_t *) =
        (ucs_status_t(*)(ucp_context_h, ucp_context_attr_t *))(uintptr_t)find("ucp_context_query");
    ucs_status_t status = real(context, attr);
    if (fake_cuda())
        attr->memory_types |= UCS_BIT(UCS_MEMORY_TYPE_CUDA);
    return status;
}

static void delay(void) {
    const char *text = getenv("FAKE_UCX_DELAY_US");
    long us = text ? strtol(text, NULL, 10) : 0;
    nanosleep(&(struct timespec){us / 1000000, us % 1000000 * 1000}, NULL);
}

EXPORTED ucs_status_ptr_t ucp_am_send_nbx(ucp_ep_h ep, unsigned id, const void *header, size_t header_nbytes,
                                          const void *buffer, size_t count, const ucp_request_param_t *param) {
    __typeof__(&ucp_am_send_nbx) real = (__typeof__(&ucp_am_send_nbx))(uintptr_t)find("ucp_am_send_nbx");
    ucp_request_param_t own;
    const void *at = translate(buffer, count, param, &own);
    if (at != buffer) {
        if (!(param->flags & UCP_AM_SEND_FLAG_RNDV))
            die("memory of a GPU without a rendezvous");
        fake_ucx_sent_from_gpu++;
        delay();
    }
    return real(ep, id, header, header_nbytes, at, count, &own);
}

EXPORTED ucs_status_ptr_t ucp_am_recv_data_nbx(ucp_worker_h worker, void *descriptor, void *buffer, size_t count,
                                               const ucp_request_param_t *param) {
    __typeof__(&ucp_am_recv_data_nbx) real = (__typeof__(&ucp_am_recv_data_nbx))(uintptr_t)find("ucp_am_recv_data_nbx");
    ucp_request_param_t own;
    void *at = translate(buffer, count, param, &own);
    fake_ucx_received_on_gpu += at != buffer;
    return real(worker, descriptor, at, count, &own);
}
