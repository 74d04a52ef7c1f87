/* A rank's report, in the store, of the batches that it leads, for `tensorbus status --store`. The first rank of a
 * group leads the group's side of a pair, and knows of all ranks of that side; so one rank of each side writes, however
 * many there are.
 *
 *   {"batches":[{"batch":"step","pair":"weights","group":"trainer","state":"ready","why":"","tensors":290,
 *     "bytes":16060522496,"sent":12,"version":0,"torn":0,"in_doubt":0,"ended":1760000000,
 *     "transfers":[{"direction":"send","attempt":13,"bytes_done":1048576,"bytes_total":4015130624,"seconds":0.002,
 *       "gb_per_s":0.524}],
 *     "nmissing":1,"missing":[3],"devices":[["cuda:0",1],["cuda:1",1]]}]}
 *
 * `sent` is the number of the last send, `version` that of the last receive that is complete, `ended` when the last
 * transfer ended here. `transfers` are those that are under way here: this rank's part of them, with `seconds` and
 * speed 0 until the first bytes have moved, so that a receiver that only waits writes nothing. `missing` has the first
 * seats of the side that have not registered; `devices` are by seat, runs of equal ones together. */
#include "bus/transfer_inside.h"

#include "base/int.h"
#include "base/process.h"

#include <inttypes.h>
#include <string.h>

enum { MOST_MISSING = 64 };

void tb__world_report(tb_world *world) {
    if (world->directory && atomic_load(&world->is_ready))
        tb__directory_report(world->directory);
}

static int64_t count_bytes(const tb__exchange_side *side) {
    int64_t total = 0, nbytes;
    for (size_t i = 0; i < side->tensors.count; i++) {
        const tb__tensor_description *t = side->tensors.item[i].desc;
        if (tb_shape_size(&t->shape, t->dtype, NULL, &nbytes) == TB_OK)
            total += nbytes;
    }
    return total;
}

static void add_missing(tb__text *out, const tb__exchange *exchange, int side) {
    const tb__exchange_side *s = &exchange->sides[side];
    int32_t nmissing = 0;
    tb__text_add(out, ",\"missing\":[");
    for (int32_t seat = 0; seat < exchange->pair->sides[side].size; seat++) {
        if (s->seats[seat].has_come)
            continue;
        if (nmissing < MOST_MISSING)
            tb__text_add(out, "%s%" PRId32, nmissing ? "," : "", seat);
        nmissing++;
    }
    tb__text_add(out, "],\"nmissing\":%" PRId32, nmissing);
}

static const char *devices_of(const tb__exchange *exchange, int side, int32_t seat) {
    const tb__pair_side *s = &exchange->pair->sides[side];
    size_t at = tb__handshake_find(&exchange->handshake, s->peers[seat]);
    return exchange->devices && at != TB__NOWHERE ? exchange->devices[at].text : "";
}

static void add_devices(tb__text *out, const tb__exchange *exchange, int side) {
    const int32_t size = exchange->pair->sides[side].size;
    tb__text_add(out, ",\"devices\":[");
    for (int32_t seat = 0, end; seat < size; seat = end) {
        const char *devices = devices_of(exchange, side, seat);
        for (end = seat + 1; end < size && strcmp(devices_of(exchange, side, end), devices) == 0; end++)
            ;
        tb__text_add(out, "%s[", seat ? "," : "");
        tb__text_add_json(out, devices);
        tb__text_add(out, ",%" PRId32 "]", end - seat);
    }
    tb__text_add(out, "]");
}

/* Returns whether there are any. */
static bool add_transfers(tb__text *out, const tb__exchange *exchange, int side) {
    const tb_transfer *both[] = {exchange->batch->sending, exchange->batch->receiving};
    bool is_first = true;
    tb__text_add(out, ",\"transfers\":[");
    for (size_t i = 0; i < 2; i++) {
        const tb_transfer *t = both[i];
        for (size_t j = 0; t && !t->has_ended && j < t->nparts; j++) {
            const tb__flow *flow = t->parts[j].flow;
            if (!flow || flow != exchange->flows[t->is_send ? side : !side])
                continue;
            const tb__leg *leg = tb__transfer_leg(t, j);
            double seconds = leg->bytes_done > 0 ? tb__seconds() - t->begun : 0;
            tb__text_add(out,
                         "%s{\"direction\":\"%s\",\"attempt\":%" PRIu64 ",\"bytes_done\":%" PRId64
                         ",\"bytes_total\":%" PRId64 ",\"seconds\":%.3f,\"gb_per_s\":%.3f}",
                         is_first ? "" : ",", t->is_send ? "send" : "recv",
                         leg->attempt ? tb__flow_number(flow, leg->attempt) : 0, leg->bytes_done, leg->bytes_total,
                         seconds, seconds > 0 ? (double)leg->bytes_done / seconds / 1e9 : 0.0);
            is_first = false;
        }
    }
    tb__text_add(out, "]");
    return !is_first;
}

/* Returns whether a transfer is under way. */
static bool add_side(tb__text *out, const tb__exchange *exchange, int side) {
    static const char *const states[] = {
        [EXCHANGE_WAITING] = "waiting", [EXCHANGE_AGREED] = "ready", [EXCHANGE_BROKEN] = "failed"};
    const tb_batch *batch = exchange->batch;
    const tb__flow *sends = exchange->flows[side], *receives = exchange->flows[!side];
    bool is_torn = false, is_broken = exchange->state == EXCHANGE_BROKEN;
    uint64_t version = receives ? tb__flow_version(receives, &is_torn) : 0;
    tb__text_add(out, "{\"batch\":");
    tb__text_add_json(out, batch->name);
    tb__text_add(out, ",\"pair\":");
    tb__text_add_json(out, exchange->pair->name);
    tb__text_add(out, ",\"group\":");
    tb__text_add_json(out, exchange->pair->sides[side].group);
    tb__text_add(out, ",\"state\":\"%s\",\"why\":", states[exchange->state]);
    tb__text_add_json(out, is_broken ? exchange->handshake.why : "");
    tb__text_add(out,
                 ",\"tensors\":%zu,\"bytes\":%" PRId64 ",\"sent\":%" PRIu64 ",\"version\":%" PRIu64
                 ",\"torn\":%d,\"in_doubt\":%d,\"ended\":%" PRId64,
                 exchange->sides[side].tensors.count, count_bytes(&exchange->sides[side]), sends ? batch->nsends : 0,
                 version, is_torn, receives && tb__batch_is_in_doubt(batch), batch->ended);
    add_missing(out, exchange, side);
    add_devices(out, exchange, side);
    bool is_under_way = add_transfers(out, exchange, side);
    tb__text_add(out, "}");
    return is_under_way;
}

void tb__world_add_report(void *arg, tb__text *out) {
    tb_world *world = arg;
    bool is_first = true, is_under_way = false;
    if (!atomic_load(&world->is_ready))
        return;
    tb__loop_lock(world->loop);
    for (const tb__memory_user *user = world->memory_users; user; user = user->next) {
        if (user->invalidate != tb__batch_invalidate)
            continue;
        const tb_batch *batch = (const tb_batch *)((const char *)user - offsetof(tb_batch, memory));
        for (size_t i = 0; i < batch->exchanges.count; i++) {
            const tb__exchange *exchange = batch->exchanges.item[i];
            for (int side = 0; side < 2; side++) {
                if (!exchange->sides[side].is_here || exchange->sides[side].index != 0)
                    continue;
                tb__text_add(out, is_first ? "{\"batches\":[" : ",");
                is_under_way |= add_side(out, exchange, side);
                is_first = false;
            }
        }
    }
    tb__loop_unlock(world->loop);
    if (is_under_way) /* its bytes are told again in a second */
        tb__world_report(world);
    if (!is_first)
        tb__text_add(out, "]}");
}
