/* Finds positions in an array by hash: open addressing, at most half full. */
#include "base/index.h"

#include "base/mem.h"

#include <string.h>

static void insert_slot(tb__index *index, struct tb__index_slot entry) {
    size_t at = entry.hash & (index->nslots - 1);
    while (index->slot[at].position)
        at = (at + 1) & (index->nslots - 1);
    index->slot[at] = entry;
}

bool tb__index_add(tb__index *index, uint64_t hash, size_t position) {
    if (2 * (index->count + 1) > index->nslots) {
        tb__index grown = {.nslots = index->nslots ? 2 * index->nslots : 32, .count = index->count};
        grown.slot = tb__calloc(grown.nslots, sizeof *grown.slot);
        if (!grown.slot)
            return false;
        for (size_t i = 0; i < index->nslots; i++) {
            if (index->slot[i].position)
                insert_slot(&grown, index->slot[i]);
        }
        free(index->slot);
        *index = grown;
    }
    insert_slot(index, (struct tb__index_slot){hash, position + 1});
    index->count++;
    return true;
}

void tb__index_clear(tb__index *index) {
    if (index->nslots)
        memset(index->slot, 0, index->nslots * sizeof *index->slot);
    index->count = 0;
}

size_t tb__index_next(const tb__index *index, uint64_t hash, size_t *probe) {
    if (index->count == 0)
        return TB__NOWHERE;
    for (;;) {
        const struct tb__index_slot *slot = &index->slot[(hash + (*probe)++) & (index->nslots - 1)];
        if (!slot->position)
            return TB__NOWHERE;
        if (slot->hash == hash)
            return slot->position - 1;
    }
}

void tb__index_fini(tb__index *index) {
    free(index->slot);
    *index = (tb__index){0};
}
