/* Memory for programs, of tb_alloc_on: on a GPU, where other processes can map it, and host memory that is pinned. */
#include "device/cuda/cuda.h"

#include "base/mem.h"

#include <pthread.h>

/* Memory that the program has allocated and not freed. */
typedef struct held {
    void *address;
    tb__cuda_pin *pin; /* NULL: it is memory of a GPU */
} held;

static struct {
    pthread_mutex_t lock;
    TB_VEC(held) list;
} program = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* In a forked child that can't use the driver, the lock may be held by a thread of the parent; the child has only one
 * thread. */
static bool lock_list(void) {
    return !tb__cuda_is_inherited() && pthread_mutex_lock(&program.lock) == 0;
}

static void unlock_list(bool is_locked) {
    if (is_locked)
        pthread_mutex_unlock(&program.lock);
}

static tb_status hold(held h) {
    bool is_locked = lock_list();
    bool is_held = tb__vec_push(&program.list, h);
    unlock_list(is_locked);
    return is_held ? TB_OK : TB_NO_MEMORY;
}

/* Removes it from the list. False: it is not there in this form. */
static bool let_go(void *address, bool is_pinned, held *out) {
    bool is_found = false, is_locked = lock_list();
    for (size_t i = 0; i < program.list.count && !is_found; i++) {
        held *h = &program.list.item[i];
        if (h->address != address || (h->pin != NULL) != is_pinned)
            continue;
        *out = *h;
        *h = program.list.item[--program.list.count];
        is_found = true;
    }
    unlock_list(is_locked);
    return is_found;
}

int tb__cuda_current_ordinal(void) {
    CUdevice current, device;
    if (tb__cuda.cuCtxGetDevice(&current) != CUDA_SUCCESS)
        return 0;
    for (int i = 0; i < tb__gpu_count(); i++) {
        if (tb__cuda.cuDeviceGet(&device, i) == CUDA_SUCCESS && device == current)
            return i;
    }
    return 0;
}

tb_status tb__cuda_alloc_on(int index, size_t nbytes, void **out) {
    void *address;
    TB_TRY(tb__cuda_load());
    int count = tb__gpu_count();
    if (index >= count)
        return tb__fail(TB_REFUSED, "there is no cuda:%d: this process sees %d GPU%s", index, count,
                        count == 1 ? "" : "s");
    TB_TRY(tb__cuda_alloc(NULL, index < 0 ? tb__cuda_current_ordinal() : index, nbytes, &address));
    tb_status status = hold((held){.address = address});
    if (status == TB_OK)
        *out = address;
    else
        tb__cuda_free(NULL, address);
    return status;
}

bool tb__cuda_free_on(void *address) {
    held unused;
    if (!let_go(address, false, &unused))
        return false;
    tb__cuda_free(NULL, address);
    return true;
}

tb_status tb__cuda_pin_pages(void *address, size_t nbytes) {
    tb__gpu *gpu;
    held h = {.address = address};
    TB_TRY(tb__cuda_load());
    TB_TRY(tb__gpu_get(tb__cuda_current_ordinal(), &gpu));
    TB_TRY(tb__cuda_pin_bytes(gpu, address, nbytes, &h.pin));
    tb_status status = hold(h);
    if (status != TB_OK)
        tb__cuda_unpin(h.pin);
    return status;
}

void tb__cuda_unpin_pages(void *address) {
    held h;
    if (let_go(address, true, &h))
        tb__cuda_unpin(h.pin);
}
