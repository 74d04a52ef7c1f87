/* Makes a pair. Each rank publishes a note under the pair's name: the remote group, and its own side's layout. Every
 * rank reads all notes, so all find the same disagreement. Only the two ranks concerned find out that they can't reach
 * each other.
 *
 * The first rank that finds a disagreement stops waiting, and its request would disappear before others have read it.
 * So it replaces the request by a *refusal*, which says why. A refusal is in force for all ranks until its author makes
 * the pair again, or a rank that it names is restarted. A rank that was refused makes the pair again in the next
 * *round*, in which refusals of earlier rounds do not count. */
#include "bus/pair_notes.h"

#include "base/descriptors.h"
#include "base/int.h"
#include "base/log.h"
#include "base/opts.h"
#include "device/host/workers.h"
#include "layout/layout.h"

#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>

enum {
    SPIN_US = 50,  /* how long the driver polls before it sleeps, if every rank of the machine has a core */
    ASK_MS = 5000, /* after waiting this long for others' notes, the store is probed */
    ANSWER_MS = 4000,
    HINT_MS = 1000,
};

bool tb__pair_has_layout(const char *layout) {
    return strcmp(layout, TB__NO_LAYOUT) != 0;
}

tb_status tb__pair_layout_parse(const char *layout, int32_t seat, tb_layout **out) {
    return tb__pair_has_layout(layout)
               ? tb_layout_parse(layout, out)
               : tb_layout_create(1, &(int64_t){1}, &seat, &(tb_placement){.kind = TB_REPLICATE}, out);
}

tb_status tb__pair_layout(const tb_pair *pair, int side, const char *text, tb_layout **out) {
    const tb__pair_side *s = &pair->sides[side];
    tb_layout *seats;
    TB_TRY(tb_layout_parse(text ? text : s->layout, &seats));
    int32_t n = tb_layout_nranks(seats), *ranks = tb__malloc((size_t)n, sizeof *ranks);
    tb_status status = ranks ? TB_OK : TB_NO_MEMORY;
    for (int32_t i = 0; i < n && status == TB_OK; i++) {
        int32_t seat = tb_layout_rank_at(seats, i);
        if (seat >= s->size)
            status = tb__fail(TB_INVALID, "the layout names rank %" PRId32 " of group '%s', which has %" PRId32, seat,
                              s->group, s->size);
        else
            ranks[i] = s->peers[seat]->rank;
    }
    if (status == TB_OK)
        status = tb_layout_create(seats->ndim, seats->shape, ranks, seats->place, out);
    free(ranks);
    tb_layout_destroy(seats);
    return status;
}

typedef struct pairing {
    tb_pair *pair;
    const atomic_bool *cancelled; /* NULL: it is wanted */
    tb_status status;
    tb__pair_refusal refusal; /* the ranks that `status` is about */
    bool is_complete;
    bool has_lost; /* a rank was lost, and may be connected again */
    uint32_t last_round;
    char missing[512];
    int32_t sizes[2]; /* by side, if it is complete ... */
    bool has_layout[2];
    bool only_looks; /* the pair may be in use: nothing in it is changed */
} pairing;

/* This process's current round for pairs of this name. With the lock held; NULL: no memory. */
static uint32_t *round_of(tb_world *world, const char *name) {
    for (size_t i = 0; i < world->rounds.count; i++) {
        if (strcmp(world->rounds.item[i].pair, name) == 0)
            return &world->rounds.item[i].round;
    }
    char *copy = tb__strdup(name);
    if (copy && tb__vec_push(&world->rounds, (struct tb__round){copy, 0}))
        return &world->rounds.item[world->rounds.count - 1].round;
    free(copy);
    return NULL;
}

static tb_status add_subject(pairing *m, tb_status status, const char *group, int32_t index) {
    return tb__refusal_add_subject(m->pair, &m->refusal, status, group, index);
}

/* Checks that the requests of group `here` name group `there` and have equal layouts. *count: how many there are. */
static tb_status compare_requests(pairing *m, const tb__notes *notes, const char *here, const char *there,
                                  int32_t *count, tb__pair_note *agreed) {
    const tb__note *first = NULL;
    *count = 0;
    for (size_t i = 0; i < notes->count; i++) {
        const tb__note *at = &notes->item[i];
        tb__pair_note n;
        if (strcmp(at->group, here) != 0 || !tb__pair_read_request(at, &n))
            continue;
        if (strcmp(n.remote, there) != 0) {
            tb_status status = tb__fail(TB_CONFLICT, "pair '%s': %s %" PRId32 " expects group '%s', not '%s'",
                                        m->pair->name, here, at->index, n.remote, there);
            return add_subject(m, status, here, at->index);
        }
        if (first && strcmp(n.layout, agreed->layout) != 0) {
            tb_status status =
                tb__fail(TB_CONFLICT, "pair '%s': %s %" PRId32 " has layout '%.100s', but %s %" PRId32 " '%.100s'",
                         m->pair->name, here, first->index, agreed->layout, here, at->index, n.layout);
            return add_subject(m, add_subject(m, status, here, first->index), here, at->index);
        }
        if (!first) {
            first = at;
            *agreed = n;
        }
        ++*count;
    }
    return TB_OK;
}

static void describe_missing(pairing *m, const char *group, const tb__roster *roster, int32_t nnotes) {
    char seats[128];
    if (roster->size == 0)
        snprintf(m->missing, sizeof m->missing, "nobody has joined group '%.100s'", group);
    else if (tb__world_name_missing(roster, seats, sizeof seats))
        snprintf(m->missing, sizeof m->missing, "group '%.100s' is not complete: nobody has taken seat %s", group,
                 seats);
    else if (nnotes < roster->size)
        snprintf(m->missing, sizeof m->missing, "only %" PRId32 " of %" PRId32 " ranks of group '%.100s' have come",
                 nnotes, roster->size, group);
}

static void describe_absent(pairing *m, const tb__notes *notes, const char *group, int32_t size) {
    int32_t absent = 0; /* notes are sorted by index */
    tb__pair_note n;
    for (size_t j = 0; j < notes->count; j++)
        absent += notes->item[j].index == absent && strcmp(notes->item[j].group, group) == 0 &&
                  tb__pair_read_request(&notes->item[j], &n);
    size_t at = strlen(m->missing);
    if (absent < size)
        snprintf(m->missing + at, sizeof m->missing - at, "; %.100s %" PRId32 " is missing", group, absent);
}

static void describe_lost(pairing *m, const char *group, int32_t seat, const tb__peer *peer) {
    snprintf(m->missing, sizeof m->missing, "%.100s %" PRId32 " is gone, and nobody has taken its seat: %.200s", group,
             seat, peer->why ? peer->why : "it was lost");
}

/* This process may notice a loss before the store does. The seat counts as empty: another process may take it. True if
 * a lost rank can't be connected again. */
static bool has_lost_member(pairing *m, const char *group, const tb__roster *roster) {
    for (int32_t i = 0; i < roster->size; i++) {
        const tb__member *at = &roster->member[i];
        const tb__peer *peer = tb__loop_find_peer(m->pair->world->loop, at->rank, at->incarnation);
        if (!peer || !peer->is_lost)
            continue;
        describe_lost(m, group, i, peer);
        if (!tb__peer_can_reconnect(peer))
            return true;
    }
    return false;
}

/* Checks whether all ranks of a side have requested the pair, and stores what they agree on, while it is being made. */
static tb_status check_side_complete(pairing *m, const tb__notes *notes, int side, bool *is_complete) {
    tb_pair *pair = m->pair;
    tb__pair_side *s = &pair->sides[side];
    tb__roster roster;
    tb__pair_note agreed = {0};
    int32_t nnotes;
    TB_TRY(compare_requests(m, notes, s->group, pair->sides[!side].group, &nnotes, &agreed));
    TB_TRY(tb__directory_roster(pair->world->directory, s->group, &roster));
    *is_complete = roster.size > 0 && roster.npresent == roster.size && nnotes == roster.size && !roster.sizes_differ;
    if (!*is_complete) {
        describe_missing(m, s->group, &roster, nnotes);
        if (roster.npresent == roster.size && roster.size > 0)
            describe_absent(m, notes, s->group, roster.size);
    } else if (has_lost_member(m, s->group, &roster)) {
        *is_complete = false;
    }
    m->sizes[side] = roster.size;
    m->has_layout[side] = agreed.layout && tb__pair_has_layout(agreed.layout);
    if (*is_complete && !m->only_looks) {
        s->size = roster.size;
        free(s->layout);
        s->layout = tb__strdup(agreed.layout);
    }
    tb__roster_fini(&roster);
    return *is_complete && !m->only_looks && !s->layout ? TB_NO_MEMORY : TB_OK;
}

/* Without layouts, seat i sends to seat i. */
static tb_status check_sides_match(pairing *m) {
    const tb__pair_side *s = m->pair->sides;
    int without = m->has_layout[0];
    tb_status status = TB_OK;
    if (m->has_layout[0] != m->has_layout[1])
        status = tb__fail(TB_CONFLICT,
                          "pair '%s': group '%s' has made it without a layout, and group '%s' with one; without one, "
                          "seat i sends to seat i, and neither side has any",
                          m->pair->name, s[without].group, s[!without].group);
    else if (!m->has_layout[0] && m->sizes[0] != m->sizes[1])
        status = tb__fail(TB_CONFLICT,
                          "pair '%s' has no layouts, so that seat i sends to seat i, but group '%s' has %" PRId32
                          " ranks and group '%s' %" PRId32,
                          m->pair->name, s[0].group, m->sizes[0], s[1].group, m->sizes[1]);
    return status == TB_OK ? TB_OK : add_subject(m, add_subject(m, status, s[0].group, 0), s[1].group, 0);
}

static bool check_cancelled(pairing *m) {
    if (m->cancelled && atomic_load(m->cancelled))
        m->status = tb__fail(TB_CANCELLED, "pair '%s' was given up", m->pair->name);
    return m->status != TB_OK;
}

/* The pair is connected, or the call was cancelled. */
static bool is_pairing_over(void *arg) {
    pairing *m = arg;
    return m->pair->is_connected || check_cancelled(m);
}

/* By the notes and rosters that this process knows. */
static bool evaluate_requests(pairing *m) {
    m->status = TB_OK;
    tb__notes notes;
    bool is_complete[2] = {false, false};
    m->missing[0] = '\0';
    m->is_complete = false;
    if (!tb__directory_is_current(m->pair->world->directory,
                                  m->pair->name)) { /* notes of an earlier pair of this name */
        snprintf(m->missing, sizeof m->missing, "the first rank of group '%.100s' has not told that all have come",
                 m->pair->sides[m->pair->side].group);
        return false;
    }
    tb__directory_notes(m->pair->world->directory, m->pair->name, &notes);
    m->refusal = (tb__pair_refusal){0};
    m->status = tb__pair_check_refusals(m->pair, &notes, &m->refusal, &m->last_round);
    for (size_t i = 0; i < notes.count && m->status == TB_OK; i++) {
        const char *group = notes.item[i].group, *here = m->pair->sides[0].group, *there = m->pair->sides[1].group;
        tb__pair_note n;
        if (strcmp(group, here) == 0 || strcmp(group, there) == 0 || !tb__pair_read_request(&notes.item[i], &n))
            continue;
        m->status =
            tb__fail(TB_CONFLICT, "pair '%s' of groups '%s' and '%s' is also used by group '%s' (its rank %" PRId32 ")",
                     m->pair->name, here, there, group, notes.item[i].index);
        add_subject(m, m->status, group, notes.item[i].index);
    }
    for (int side = 0; side < 2 && m->status == TB_OK; side++)
        m->status = check_side_complete(m, &notes, side, &is_complete[side]);
    tb__notes_fini(&notes);
    m->is_complete = is_complete[0] && is_complete[1];
    if (m->status == TB_OK && m->is_complete)
        m->status = check_sides_match(m);
    return m->status != TB_OK || m->is_complete;
}

static bool check_requests(void *arg) {
    return is_pairing_over(arg) || evaluate_requests(arg);
}

static uint64_t hash_bytes(uint64_t hash, const void *data, size_t nbytes) {
    for (size_t i = 0; i < nbytes; i++)
        hash = tb__hash(hash, ((const unsigned char *)data)[i]);
    return hash;
}

/* Who makes the pair, how, and at which store, and why it can't be made; 0 while ranks are missing and nobody
 * disagrees. A rank that has come again finds out by the change that a refusal is still in force. */
static uint64_t hash_state(tb_pair *pair) {
    pairing m = {.pair = pair, .only_looks = true};
    tb__notes notes;
    tb__roster roster;
    uint64_t hash = tb__directory_store_number(pair->world->directory);
    evaluate_requests(&m);
    if (m.status != TB_OK)
        hash = hash_bytes(hash, tb_error_detail(), strlen(tb_error_detail()));
    else if (!m.is_complete)
        return 0;
    tb__directory_notes(pair->world->directory, pair->name, &notes);
    for (size_t i = 0; i < notes.count; i++)
        hash = hash_bytes(hash, notes.item[i].data, notes.item[i].nbytes);
    tb__notes_fini(&notes);
    for (int side = 0; side < 2; side++) {
        if (tb__directory_roster(pair->world->directory, pair->sides[side].group, &roster) != TB_OK)
            return 0;
        for (int32_t i = 0; i < roster.size; i++)
            hash = tb__hash(tb__hash(hash, (uint64_t)roster.member[i].rank), roster.member[i].incarnation);
        tb__roster_fini(&roster);
    }
    return hash | 1;
}

static void send_hint(const tb_pair *pair, uint64_t state) {
    const char *groups[2] = {pair->sides[pair->side].group, pair->sides[!pair->side].group};
    if (tb__directory_hint(pair->world->directory, pair->name, groups, state, HINT_MS) != TB_OK)
        tb__log(TB_LOG_INFO, "the ranks of pair '%s' do not hear that it has changed: %s", pair->name,
                tb_error_detail());
}

typedef struct pair_names {
    char pair[TB__DIRECTORY_MAX_NAME + 1], groups[2][TB__DIRECTORY_MAX_NAME + 1]; /* this process's group first */
} pair_names;

/* The first pair of this process as a lead whose state the others do not know. */
static bool find_changed_pair(tb_world *world, pair_names *names, uint64_t *state) {
    bool is_found = false;
    tb__loop_lock(world->loop);
    for (tb_pair *pair = world->pairs; pair && !is_found; pair = pair->next) {
        if (pair->index != 0 || (*state = hash_state(pair)) == pair->hinted)
            continue;
        is_found = true;
        snprintf(names->pair, sizeof names->pair, "%s", pair->name);
        for (int i = 0; i < 2; i++)
            snprintf(names->groups[i], sizeof names->groups[i], "%s", pair->sides[pair->side ^ i].group);
    }
    tb__loop_unlock(world->loop);
    return is_found;
}

static void set_hinted(tb_world *world, const pair_names *names, uint64_t state) {
    tb__loop_lock(world->loop);
    for (tb_pair *pair = world->pairs; pair; pair = pair->next) {
        if (strcmp(pair->name, names->pair) == 0 && strcmp(pair->sides[pair->side].group, names->groups[0]) == 0)
            pair->hinted = state;
    }
    tb__loop_unlock(world->loop);
}

/* A store that does not answer is asked again; one that is lost, when it is back, by the next call. */
void tb__pairs_hint(tb_world *world) {
    pair_names names;
    uint64_t state;
    tb_status status = TB_OK;
    while ((status == TB_OK || status == TB_TIMEOUT) && find_changed_pair(world, &names, &state)) {
        const char *groups[2] = {names.groups[0], names.groups[1]};
        status = tb__directory_hint(world->directory, names.pair, groups, state, HINT_MS);
        if (status == TB_OK)
            set_hinted(world, &names, state);
        else
            tb__log(TB_LOG_INFO, "the ranks of pair '%s' do not hear that it has changed: %s", names.pair,
                    tb_error_detail());
    }
}

/* Whether this rank is connected with the peer in this seat as long as the pair exists: a lead, the first rank of a
 * side, is with all ranks of its side and with the other lead; between machines with those of the other side, too,
 * because a rank may leave after its first message to them, and network transports may lose what is sent over a
 * connection that has just begun. Over transports with `reports_strangers`, others are connected when there is
 * something to send. */
static bool is_in_touch(const tb_pair *pair, int side, int32_t seat) {
    const tb__peer *peer = pair->sides[side].peers[seat];
    bool is_one_lead = seat == 0 || pair->index == 0, are_both = seat == 0 && pair->index == 0;
    return are_both || (is_one_lead && (side == pair->side || !peer->transport->ops->is_local));
}

/* `has_gaps`: ranks are missing that were present a moment ago: they are gone, or the store was restarted and does not
 * know them yet. */
static tb_status connect_side(pairing *m, int side, bool *has_gaps) {
    tb_pair *pair = m->pair;
    tb__pair_side *s = &pair->sides[side];
    tb__roster roster;
    TB_TRY(tb__directory_roster(pair->world->directory, s->group, &roster));
    *has_gaps = roster.npresent != s->size || roster.size != s->size;
    free(s->peers); /* of an attempt before */
    s->peers = *has_gaps ? NULL : tb__calloc((size_t)s->size, sizeof *s->peers);
    tb_status status = s->peers || *has_gaps ? TB_OK : TB_NO_MEMORY;
    for (int32_t i = 0; i < s->size && status == TB_OK && !*has_gaps; i++) {
        status = tb__world_meet(pair->world, s->group, &roster, i, &s->peers[i]);
        if (status == TB_OK && is_in_touch(pair, side, i))
            status = tb__peer_open(s->peers[i]);
        if (tb__is_refusal(status)) { /* others will read the message, too */
            const char *here = pair->sides[pair->side].group;
            tb__prefix_detail("%s %" PRId32, here, pair->index);
            add_subject(m, add_subject(m, status, here, pair->index), s->group, i);
        }
        if (status == TB_OK && s->peers[i]->is_lost && !tb__peer_can_reconnect(s->peers[i]))
            status = tb__fail(TB_LOST, "%s was lost: %s", s->peers[i]->label, s->peers[i]->why);
    }
    tb__roster_fini(&roster);
    return status;
}

/* Whether all ranks have answered. Also true if a rank was lost: another process may take its seat. */
static bool pair_has_answered(void *arg) {
    pairing *m = arg;
    bool have_all = true;
    m->has_lost = false;
    if (check_cancelled(m))
        return true;
    for (int side = 0; side < 2; side++) {
        const tb__pair_side *s = &m->pair->sides[side];
        m->has_lost |= !s->peers; /* another thread that makes the pair found a rank missing */
        for (int32_t i = 0; s->peers && i < s->size; i++) {
            m->has_lost |= s->peers[i]->is_lost;
            if (s->peers[i]->is_lost) {
                describe_lost(m, s->group, i, s->peers[i]);
            } else if (!tb__peer_is_reached(s->peers[i])) {
                have_all = false;
                snprintf(m->missing, sizeof m->missing, "%s does not answer", s->peers[i]->label);
            }
        }
    }
    return have_all || m->has_lost;
}

static tb_status fail_pair_timeout(const pairing *m) {
    if (tb__directory_is_connected(m->pair->world->directory))
        return tb__fail(TB_TIMEOUT, "pair '%s': %s%s", m->pair->name, m->missing, tb__shortage_text());
    tb__saved_detail why = tb__save_detail();
    return tb__fail(TB_TIMEOUT, "pair '%s': %s; the store is lost: %s", m->pair->name, m->missing, why.text);
}

/* Connects with all ranks. Unless `is_whole` (all are present and have answered), it has to be called again. */
static tb_status connect_all(pairing *m, int64_t deadline_ms, bool *is_whole) {
    tb__loop *loop = m->pair->world->loop;
    *is_whole = false;
    for (int side = 0; side < 2; side++) {
        bool has_gaps;
        TB_TRY(connect_side(m, side, &has_gaps));
        if (has_gaps)
            return TB_OK;
    }
    int64_t again_ms = tb__min64(tb__now_ms() + TB__CONNECT_AGAIN_MS, deadline_ms);
    bool is_done = tb__loop_wait(loop, pair_has_answered, m, again_ms);
    *is_whole = is_done && !m->has_lost;
    if (m->status != TB_OK || *is_whole || m->pair->is_connected)
        return m->status;
    if (tb__now_ms() >= deadline_ms)
        return fail_pair_timeout(m);
    tb__loop_wait(loop, is_pairing_over, m, again_ms);
    return m->status;
}

/* Pings ranks that still have their seats; the store does not tell how to reach others. */
static tb_status ping_side(tb_pair *pair, const tb__pair_side *s) {
    tb__roster roster;
    tb_status status = TB_OK;
    TB_TRY(tb__directory_roster(pair->world->directory, s->group, &roster));
    for (int32_t i = 0; i < s->size && i < roster.size && status == TB_OK; i++) {
        const tb__member *at = &roster.member[i];
        tb__peer *peer = s->peers[i];
        if (!peer->is_lost && at->rank == peer->rank && at->incarnation == peer->incarnation)
            status = tb__world_meet(pair->world, s->group, &roster, i, &peer);
    }
    tb__roster_fini(&roster);
    return status;
}

tb_status tb__pair_ping(tb_pair *pair, int64_t deadline_ms, const atomic_bool *cancelled) {
    pairing m = {.pair = pair, .cancelled = cancelled};
    tb__loop *loop = pair->world->loop;
    tb__loop_lock(loop);
    tb_status status = TB_OK;
    for (int side = 0; side < 2 && status == TB_OK; side++)
        status = ping_side(pair, &pair->sides[side]);
    if (status == TB_OK && !tb__loop_wait(loop, pair_has_answered, &m, deadline_ms))
        status = fail_pair_timeout(&m);
    else if (status == TB_OK && m.status == TB_OK && m.has_lost)
        status = tb__fail(TB_LOST, "pair '%s': %s", pair->name, m.missing);
    tb__loop_unlock(loop);
    return status == TB_OK ? m.status : status;
}

/* In canonical form, since layouts are compared as text. */
static tb_status format_layout(const tb_pair *pair, const char *layout, char **out) {
    tb_layout *parsed;
    char *canonical;
    if (!layout)
        return (*out = tb__strdup(TB__NO_LAYOUT)) ? TB_OK : TB_NO_MEMORY;
    TB_TRY(tb_layout_parse(layout, &parsed));
    tb_status status = tb_layout_format(parsed, &canonical);
    const tb__membership *seat = tb__world_find_membership(pair->world, pair->sides[pair->side].group);
    int32_t beyond = tb__layout_rank_from(parsed, seat->size);
    if (status == TB_OK && beyond != TB_NO_RANK) {
        free(canonical);
        status = tb__fail(TB_INVALID, "the layout names rank %" PRId32 " of group '%s', which has %" PRId32, beyond,
                          seat->group, seat->size);
    }
    tb_layout_destroy(parsed);
    if (status == TB_OK)
        *out = canonical;
    return status;
}

static tb_status publish_request(tb_pair *pair, const char *layout, int64_t deadline_ms) {
    TB_TRY(format_layout(pair, layout, &pair->sides[pair->side].layout));
    return tb__pair_publish(pair, pair->round, &(tb__pair_refusal){0}, "", deadline_ms);
}

/* Divides the machine's cores among its ranks. */
void tb__world_set_workers(tb_world *world) {
    cpu_set_t set;
    int cores = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1, ranks = 1;
    tb__pack contact = {0};
    if (tb__loop_contact(world->loop, &contact) == TB_OK)
        ranks = tb__directory_count_contacts(world->directory, contact.data, TB__CONTACT_PREFIX);
    tb__pack_fini(&contact);
    ranks = ranks > 0 ? ranks : 1;
    tb__workers_set(world->workers ? world->workers : cores / ranks);
    tb__loop_lock(world->loop);
    tb__loop_set_spin(world->loop, ranks <= cores ? SPIN_US : 0);
    tb__loop_unlock(world->loop);
}

void tb__pair_describe_wait(tb_world *world, const char *name, char *out, size_t room) {
    *out = '\0';
    (void)tb__directory_follow_all(world->directory, HINT_MS);
    tb__loop_lock(world->loop);
    for (tb_pair *p = world->pairs; p; p = p->next) {
        pairing m = {.pair = p};
        if (strcmp(p->name, name) != 0 || p->is_connected)
            continue;
        if (!check_cancelled(&m))
            evaluate_requests(&m);
        snprintf(out, room, "%s", m.status == TB_OK ? m.missing : tb_error_detail());
        break;
    }
    tb__loop_unlock(world->loop);
}

/* Waits until check_requests is true; false at the deadline. */
static bool wait_for_others(pairing *m, int64_t deadline_ms) {
    tb__loop *loop = m->pair->world->loop;
    for (int64_t delay_ms = ASK_MS;; delay_ms *= 2) {
        int64_t ask_ms = tb__now_ms() + delay_ms;
        if (tb__loop_wait(loop, check_requests, m, ask_ms < deadline_ms ? ask_ms : deadline_ms))
            return true;
        int left_ms = tb__ms_until(deadline_ms);
        tb__loop_unlock(loop);
        if (left_ms == 0) /* to name who is missing */
            (void)tb__directory_follow_all(m->pair->world->directory, HINT_MS);
        else
            tb__directory_probe_store(m->pair->world->directory, left_ms < ANSWER_MS ? left_ms : ANSWER_MS);
        tb__loop_lock(loop);
        if (left_ms == 0)
            return check_requests(m);
    }
}

tb_status tb__pair_connect(tb_pair *pair, int64_t deadline_ms, const atomic_bool *cancelled) {
    tb__loop *loop = pair->world->loop;
    pairing m = {.pair = pair, .cancelled = cancelled};
    tb__loop_lock(loop);
    if (pair->is_connected) {
        tb__loop_unlock(loop);
        return TB_OK;
    }
    bool is_whole = false;
    tb_status status;
    do {
        bool has_looked = wait_for_others(&m, deadline_ms);
        if (pair->is_connected) { /* another thread has connected it */
            tb__loop_unlock(loop);
            return TB_OK;
        }
        status = has_looked ? m.status : fail_pair_timeout(&m);
        if (status == TB_OK)
            status = connect_all(&m, deadline_ms, &is_whole);
    } while (status == TB_OK && !is_whole);
    pair->is_connected = status == TB_OK;
    uint32_t *round = tb__is_refusal(status) ? round_of(pair->world, pair->name) : NULL;
    if (round)
        *round = m.last_round + 1;
    tb__loop_unlock(loop);
    if (round) {
        tb__saved_detail why = tb__save_detail();
        m.refusal.status = status;
        /* if this fails, the others find the disagreement themselves, or time out */
        tb__pair_publish(pair, m.last_round, &m.refusal, why.text, deadline_ms);
        if (pair->index == 0)
            send_hint(pair, hash_bytes(m.last_round, why.text, strlen(why.text)) | 1);
        status = tb__fail(status, "%s", why.text);
    }
    if (status == TB_OK)
        tb__world_set_workers(pair->world);
    return status;
}

static void free_pair(tb_pair *pair) {
    for (int side = 0; side < 2; side++) {
        free(pair->sides[side].group);
        free(pair->sides[side].peers);
        free(pair->sides[side].layout);
    }
    free(pair->name);
    free(pair);
}

/* Adds the pair to the world's list. A process makes a pair once from each side: notes are told apart by name and seat.
 */
static tb_status add_to_world(tb_pair *pair) {
    tb_world *world = pair->world;
    tb_status status = TB_OK;
    tb__loop_lock(world->loop);
    for (const tb_pair *p = world->pairs; p && status == TB_OK; p = p->next) {
        if (strcmp(p->name, pair->name) == 0 && strcmp(p->sides[p->side].group, pair->sides[pair->side].group) == 0)
            status = tb__fail(TB_CONFLICT, "this process has made pair '%s' as group '%s' already", p->name,
                              p->sides[p->side].group);
    }
    uint32_t *round = status == TB_OK ? round_of(world, pair->name) : NULL;
    if (round) {
        pair->round = *round;
        pair->serial = ++world->last_serial;
        pair->next = world->pairs;
        world->pairs = pair;
    }
    tb__loop_unlock(world->loop);
    return status == TB_OK && !round ? TB_NO_MEMORY : status;
}

static void remove_from_world(const tb_pair *pair) {
    tb_world *world = pair->world;
    tb__loop_lock(world->loop);
    for (tb_pair **at = &world->pairs; *at; at = &(*at)->next) {
        if (*at == pair) {
            *at = pair->next;
            break;
        }
    }
    tb__loop_unlock(world->loop);
}

tb_status tb__local_pair_create(tb_world *world, const char *name, const char *remote_group, const char *layout,
                                const tb_pair_opts *opts, const atomic_bool *cancelled, tb_pair **out) {
    tb_pair_opts o;
    TB_TRY(tb__opts_read(&o, sizeof o, opts));
    int64_t deadline_ms = tb__world_deadline(world, o.timeout_ms);
    TB_TRY(tb__name_check("pair", name));
    TB_TRY(tb__name_check("group", remote_group));
    tb__loop_lock(world->loop); /* seats may be added meanwhile */
    const char *group = o.group ? o.group : world->memberships.item[0].group;
    const tb__membership *found = tb__world_find_membership(world, group);
    tb__membership seat = found ? *found : (tb__membership){0};
    tb__loop_unlock(world->loop);
    if (!found)
        return tb__fail(TB_INVALID, "this process is not in group '%.100s'", group);
    if (strcmp(group, remote_group) == 0)
        return tb__fail(TB_INVALID, "a pair has two groups; '%s' can't be both of them", group);
    tb_pair *pair = tb__calloc(1, sizeof *pair);
    if (!pair)
        return TB_NO_MEMORY;
    pair->base = world->base;
    pair->world = world;
    pair->refs = 1;
    pair->side = strcmp(group, remote_group) > 0;
    pair->index = seat.index;
    pair->size = seat.size;
    pair->name = tb__strdup(name);
    pair->sides[pair->side].group = tb__strdup(group);
    pair->sides[!pair->side].group = tb__strdup(remote_group);
    tb_status status = pair->name && pair->sides[0].group && pair->sides[1].group ? TB_OK : TB_NO_MEMORY;
    if (status == TB_OK)
        status = add_to_world(pair);
    if (status != TB_OK) {
        free_pair(pair);
        return status;
    }
    status = publish_request(pair, layout, deadline_ms);
    /* Afterwards: ranks that find a lead's request rely on its hints from then on. */
    if (status == TB_OK && pair->index == 0)
        (void)tb__directory_follow_all(world->directory, tb__ms_until(deadline_ms));
    if (status == TB_OK && !o.no_wait)
        status = tb__pair_connect(pair, deadline_ms, cancelled);
    if (status != TB_OK) {
        tb__saved_detail why = tb__save_detail();
        if (!tb__is_refusal(status)) /* a refusal has replaced the request */
            tb__pair_withdraw(pair);
        remove_from_world(pair);
        free_pair(pair);
        return tb__fail(status, "%s", why.text);
    }
    tb__world_ref(world);
    *out = pair;
    return TB_OK;
}

/* The number of ranks of a side that still request the pair with its layouts. */
static int32_t count_requests(const tb_pair *pair, int side, const tb__notes *notes) {
    const tb__pair_side *here = &pair->sides[side], *there = &pair->sides[!side];
    int32_t count = 0;
    for (size_t i = 0; i < notes->count; i++) {
        tb__pair_note n;
        count += strcmp(notes->item[i].group, here->group) == 0 && tb__pair_read_request(&notes->item[i], &n) &&
                 strcmp(n.remote, there->group) == 0 && strcmp(n.layout, here->layout) == 0;
    }
    return count;
}

bool tb__pair_is_stale(const tb_pair *pair) {
    bool is_stale = false;
    tb__notes notes;
    tb__loop_lock(pair->world->loop);
    tb__directory_notes(pair->world->directory, pair->name, &notes);
    for (int side = 0; side < 2 && pair->is_connected; side++) {
        const tb__pair_side *s = &pair->sides[side];
        for (int32_t i = 0; i < s->size; i++)
            is_stale |= s->peers[i]->is_lost;
        is_stale |= count_requests(pair, side, &notes) < s->size;
    }
    tb__loop_unlock(pair->world->loop);
    tb__notes_fini(&notes);
    return is_stale;
}

void tb__pair_unref(tb_pair *pair) {
    if (pair && --pair->refs == 0)
        free_pair(pair);
}

void tb__local_pair_destroy(tb_pair *pair) {
    tb_world *world = pair->world;
    if (tb__world_is_inherited(world)) {
        if (tb__world_was_unlocked(world))
            tb__pair_unref(pair);
    } else {
        tb__pair_withdraw(pair);
        remove_from_world(pair);
        tb__loop_lock(world->loop);
        tb__pair_unref(pair);
        tb__loop_unlock(world->loop);
    }
    tb__world_unref(world);
}
