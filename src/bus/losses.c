/* Informs ranks of lost ranks. A rank is connected with its leads, and with the ranks that the plan moves bytes to or
 * from; it does not notice the death of others. A lead is connected with all ranks of its side, and informs all
 * connected ranks of losses, whether it still has the pair or not: it may learn of a failed transfer and destroy the
 * pair before it notices the cause. A rank that makes the pair again, from slightly older contents of the store, gets
 * earlier losses when its manifest reaches the lead. */
#include "bus/world.h"

#include "base/log.h"

static bool leads_group(const tb_world *world) {
    for (size_t i = 0; i < world->memberships.count; i++) {
        if (world->memberships.item[i].index == 0)
            return true;
    }
    return false;
}

/* Later connections with the process, or later incarnations of its rank, count instead. */
static bool is_lost_for_good(tb_world *world, const tb__peer *peer) {
    return peer->is_lost && tb__loop_find_peer(world->loop, peer->rank, peer->incarnation) == peer &&
           !tb__loop_find_peer(world->loop, peer->rank, peer->incarnation + 1);
}

/* Returns how many there are. */
static uint32_t pack_losses(tb_world *world, tb__pack *rows) {
    uint32_t count = 0;
    for (const tb__peer *peer = tb__loop_peers(world->loop); peer; peer = peer->next) {
        if (!is_lost_for_good(world, peer))
            continue;
        count++;
        tb__pack_u32(rows, (uint32_t)peer->rank);
        tb__pack_u64(rows, peer->incarnation);
        tb__pack_string(rows, peer->why ? peer->why : "it is gone");
    }
    return count;
}

static void send_losses(tb__peer *to, uint32_t count, const tb__pack *rows) {
    tb__pack pack = {0};
    tb__pack_u32(&pack, TB__WORLD_LOST);
    tb__pack_string(&pack, "");
    tb__pack_u32(&pack, 0);
    tb__pack_u32(&pack, count);
    tb__pack_raw(&pack, rows->data, rows->count);
    pack.failed |= rows->failed;
    if (tb__loop_send(to, TB__PORT_WORLD, &pack) != TB_OK)
        tb__log(TB_LOG_ERROR, "no memory to inform %s of lost ranks", to->label);
}

void tb__losses_tell(tb_world *world, tb__peer *to) {
    tb__pack rows = {0};
    uint32_t count = pack_losses(world, &rows);
    if (count > 0)
        send_losses(to, count, &rows);
    tb__pack_fini(&rows);
}

void tb__losses_tell_all(tb_world *world) {
    tb__pack rows = {0};
    uint32_t count = leads_group(world) ? pack_losses(world, &rows) : 0;
    for (tb__peer *to = count > 0 ? tb__loop_peers(world->loop) : NULL; to; to = to->next) {
        if (to->is_open && !to->is_lost && to->rank != world->rank)
            send_losses(to, count, &rows);
    }
    tb__pack_fini(&rows);
}

static bool leads_pair(const tb_pair *pair, const tb__peer *peer) {
    for (int side = 0; side < 2; side++) {
        const tb__pair_side *s = &pair->sides[side];
        if (s->peers && s->peers[0] == peer)
            return true;
    }
    return false;
}

/* In pairs that `from` leads, the rank is lost up to this incarnation. */
static void report_lost(tb_world *world, const tb__peer *from, int32_t rank, uint64_t incarnation, const char *why) {
    for (tb_pair *pair = world->pairs; pair; pair = pair->next) {
        for (int side = 0; side < 2 && leads_pair(pair, from); side++) {
            const tb__pair_side *s = &pair->sides[side];
            for (int32_t i = 0; s->peers && i < s->size; i++) {
                if (s->peers[i] && s->peers[i]->rank == rank && s->peers[i]->incarnation <= incarnation)
                    tb__peer_report_lost(s->peers[i], why);
            }
        }
    }
}

void tb__losses_on_message(tb_world *world, const tb__peer *from, tb__unpack *message) {
    size_t count = tb__unpack_count(message, 16);
    for (size_t i = 0; i < count && !message->failed; i++) {
        int32_t rank = (int32_t)tb__unpack_u32(message);
        uint64_t incarnation = tb__unpack_u64(message);
        const char *why = tb__unpack_string(message);
        if (!message->failed)
            report_lost(world, from, rank, incarnation, why);
    }
}
