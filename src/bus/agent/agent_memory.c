/* Device memory of clients: mapped by the keys and descriptors that come with RegisterTensors, and read and written
 * where it is. Peers map it by the same keys. */
#include "bus/agent/agent_inside.h"

#include <inttypes.h>

/* The key of a memory of the frame, with descriptors of its own. */
static tb_status make_key(const agent_job *job, const tb__device_memory *m, tb__memory_key *out) {
    if (m->nfds > job->nfds || m->fd > job->nfds - m->nfds)
        return tb__fail(TB_INVALID,
                        "device memory has %" PRIu64 " descriptors from %" PRIu64 " on, but %zu came with "
                        "the command",
                        m->nfds, m->fd, job->nfds);
    tb__memory_key shared = {.fds = {.item = job->fds + m->fd, .count = m->nfds}};
    tb__pack_raw(&shared.bytes, m->key.data, m->key.nbytes);
    tb_status status = shared.bytes.failed ? TB_NO_MEMORY : tb__memory_key_copy(&shared, out);
    tb__pack_fini(&shared.bytes);
    return status;
}

static tb_status adopt_memory(agent_job *job, const char *device, const tb__device_memory *m, agent_memory *made) {
    tb__memory_key key;
    if (job->agent->no_gpu)
        return tb__fail(TB_REFUSED, "the agent was started with --no-gpu");
    TB_TRY(make_key(job, m, &key));
    return tb__adopted_create(job->agent->world->loop, device, &key, &made->adopted);
}

/* With the process's lock. */
static tb_status find_memory(agent_job *job, const char *device, const tb__device_memory *m, agent_memory **out) {
    agent_session *s = job->session;
    agent_memory *known = LIST_FIRST(&s->memories);
    while (known && known->id != m->id)
        known = LIST_NEXT(known, link);
    if (!known) {
        known = tb__calloc(1, sizeof *known);
        tb_status status = known ? adopt_memory(job, device, m, known) : TB_NO_MEMORY;
        if (status != TB_OK) {
            free(known);
            return status;
        }
        known->id = m->id;
        LIST_INSERT_HEAD(&s->memories, known, link);
    }
    known->refs++;
    *out = known;
    return TB_OK;
}

void tb__agent_unmap_memory(agent_session *s, agent_memory *memory) {
    pthread_mutex_lock(&s->process_lock);
    if (--memory->refs == 0) {
        LIST_REMOVE(memory, link);
        tb__adopted_destroy(memory->adopted);
        free(memory);
    }
    pthread_mutex_unlock(&s->process_lock);
}

static tb_status map_memory(agent_job *job, const tb__entry *entry, agent_memory **out) {
    tb__device_memory m = {0};
    TB_TRY(tb__map_decode(&tb__device_memory_schema, entry->payload, &job->arena, &m));
    pthread_mutex_lock(&job->session->process_lock);
    tb_status status = find_memory(job, entry->pair_name, &m, out);
    pthread_mutex_unlock(&job->session->process_lock);
    return status;
}

tb_status tb__agent_map_memory(agent_job *job, size_t index, agent_memory **out) {
    const tb__entries *entries = &job->message.memories;
    if (index >= entries->count || entries->item[index].payload.nbytes == 0)
        return tb__fail(TB_INVALID, "its memory is number %zu, but %zu came with the command", index, entries->count);
    const tb__entry *entry = &entries->item[index];
    tb_status status = map_memory(job, entry, out);
    if (status == TB_OK || status == TB_NO_MEMORY)
        return status;
    job->reply.unmapped = tb__some_bool(true);
    return tb__fail_within(TB_REFUSED, "the agent can't map memory of device %.40s", entry->pair_name);
}
